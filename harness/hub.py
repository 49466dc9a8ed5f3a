"""The Hugging Face hub: what of it is at hand, and whether it can be asked. Nothing here waits for a network."""

import functools
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

NETWORK_TIMEOUT_S = 3.0
COMMIT_DIGITS = 40


def why_unreachable() -> str | None:
    """Why the hub cannot be asked, None if it can; a proxy is taken to work."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if not getproxies() and not is_reachable(constants.ENDPOINT):
        return "the hub cannot be reached"
    return None


@functools.cache
def is_reachable(endpoint: str) -> bool:
    """Whether a connection can be opened; asked once a process."""
    parts = urlsplit(endpoint)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=NETWORK_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def cached_file(repo: str, file: str, revision: str | None, repo_type: str | None = None) -> Path | None:
    """A file of a repository in the hub's cache, None if it is not there."""
    import huggingface_hub

    kind = {} if repo_type is None else {"repo_type": repo_type}
    found = huggingface_hub.try_to_load_from_cache(repo, file, revision=revision, **kind)
    return Path(found) if isinstance(found, str) else None


def commit_of(repo: str, revision: str | None) -> str | None:
    """The commit that a branch or tag of a model stands for: as the hub says, or if it cannot be asked, the cache."""
    import httpx
    from huggingface_hub import HfApi

    if revision is not None and len(revision) == COMMIT_DIGITS and set(revision) <= set("0123456789abcdef"):
        return revision
    if why_unreachable() is None:
        try:
            return HfApi().model_info(repo, revision=revision, timeout=NETWORK_TIMEOUT_S).sha
        except (OSError, httpx.HTTPError):
            pass
    config = cached_file(repo, "config.json", revision)
    return None if config is None else config.parent.name
