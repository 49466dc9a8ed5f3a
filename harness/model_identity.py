"""Which model this is: what its files hold, whatever folder they lie in and whenever they were written.

A file is read once: its digest is kept beside prepared models, with the size and the time of the file, and taken from
there as long as these are the same. Files in the hub's cache are named by their digest already.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.config import ModelConfig
from harness.hub import commit_of

DIGESTS = "file-digests.json"
LARGE, VERY_LARGE = 2**20, 2**31
COUNTED = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".safetensors", ".bin", ".pt", ".pth", ".gguf")
OF_TRAINING = re.compile(
    r"(trainer_state\.json|training_args\.bin|(optimizer|scheduler|scaler|rng_state.*)\.(pt|pth|bin))"
)
SUBFOLDERS = (".", "additional_chat_templates")
OTHER_WEIGHTS = (".bin", ".pt", ".pth")  # not read beside safetensors
_BLOB = re.compile(r"[0-9a-f]{64}")


def folder_digests(folder: Path, cache: Path) -> dict[str, str]:
    """SHA-256 by name of the files that make a model: weights, tokenizer, templates, settings.

    Args:
        folder: a model in Hugging Face format.
        cache: folder in which digests of large files are remembered.
    """
    files = {str(path.relative_to(folder)): path for path in _files(folder)}
    if any(name.endswith(".safetensors") for name in files):
        files = {name: path for name, path in files.items() if path.suffix not in OTHER_WEIGHTS}
    known = _Digests(cache / DIGESTS)
    return {name: known.of(path) for name, path in sorted(files.items())}


def hub_identity(model: ModelConfig) -> dict[str, str]:
    """The commit of a model on the hub; empty if neither the hub nor the cache knows it."""
    commit = commit_of(str(model.path), model.revision)
    return {} if commit is None else {"repository": str(model.path), "commit": commit}


def option_digests(options: Mapping[str, Any]) -> dict[str, str]:
    """Digest by option of the files that a policy's options name: they count by what they hold."""
    return {
        f"policy.options.{option}": hashlib.sha256(Path(value).read_bytes()).hexdigest()
        for option, value in options.items()
        if isinstance(value, str) and Path(value).is_file()
    }


def _files(folder: Path) -> Iterator[Path]:
    for place in SUBFOLDERS:
        for path in (folder / place).glob("*"):
            if path.suffix in COUNTED and path.is_file() and not OF_TRAINING.fullmatch(path.name):
                yield path


class _Digests:
    """Digests of files, remembered by place, size and time."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[str, list[object]] = {}
        with contextlib.suppress(OSError, ValueError):
            self._known = json.loads(file.read_text(encoding="utf-8"))

    def of(self, path: Path) -> str:
        real = path.resolve()
        if real.parent.name == "blobs" and _BLOB.fullmatch(real.name):
            return real.name
        status = real.stat()
        stamp = [status.st_size, status.st_mtime_ns, status.st_ino]
        known = self._known.get(str(real))
        if known is not None and known[:3] == stamp:
            return str(known[3])
        if status.st_size > VERY_LARGE:
            size = status.st_size / 2**30
            print(f"reading {real} once, {size:.1f} GiB, to know this model again", file=sys.stderr, flush=True)
        with real.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if status.st_size > LARGE:
            self._known[str(real)] = [*stamp, digest]
            self._remember()
        return digest

    def _remember(self) -> None:
        """Keep what is known; a cache that cannot be written is no reason to stop."""
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._file.with_name(f".{self._file.name}.{os.getpid()}")
            temporary.write_text(json.dumps(self._known), encoding="utf-8")
            temporary.replace(self._file)
