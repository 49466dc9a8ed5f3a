"""A run's folder: its name, and whether the run in it is the one that is asked for."""

import contextlib
import errno
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.store.lock import LOCK
from harness.store.manifest import FILE_NAME as MANIFEST
from harness.store.manifest import RESULT_PACKAGES, SCHEMA_VERSION, Manifest, digest, read_manifest
from harness.store.result_code import ResultCode

HASH_DIGITS = 10
WITHOUT_EFFECT = (
    ("benchmark", "path"),
    ("model", "path"),
    ("model", "revision"),
    ("results_dir",),
    ("overwrite",),
    ("tracker",),
)
DISK_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ENOTDIR,
    errno.EISDIR,
)


def make_run_id(config: dict[str, Any], data_sha256: str, code: ResultCode, model: Mapping[str, str]) -> str:
    """Readable prefix and a hash of everything that decides results.

    The places of the data, of the model and of the results do not count, nor does the tracker; the content of the data
    and of the model's files does, and so does the code.

    Args:
        model: what tells the model from others, see `harness.model_identity`, and the policy's files likewise.
    """
    identity = digest([SCHEMA_VERSION, _relevant(config), data_sha256, asdict(code), model])[:HASH_DIGITS]
    policy, benchmark = config["policy"], config["benchmark"]
    parts = [policy["name"], config["model"]["name"], benchmark["name"]]
    if policy["budget"] is not None:
        parts.insert(1, f"b{policy['budget']}")
    if benchmark["limit"] is not None:
        parts.append(f"limit{benchmark['limit']}")
    return re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join([*parts, identity]))


def has_run(folder: Path) -> bool:
    """Whether a run was ever started in `folder`."""
    return (folder / MANIFEST).exists()


def was_begun_under(claim: str | None, folder: Path) -> bool:
    """Whether the run in `folder` was begun by the very job of a sweep that holds this claim."""
    found = _readable(folder)
    return claim is not None and found is not None and found.claim == claim


def find_namesake(folder: Path, wanted: Manifest) -> tuple[Path, str] | None:
    """The newest run beside `folder` with the settings and the data of `wanted`, but other code or another model.

    Returns:
        its folder and what differs, None without one.
    """
    namesakes = folder.parent.glob(folder.name[:-HASH_DIGITS] + "?" * HASH_DIGITS)
    records = {path: _readable(path) for path in namesakes if path != folder}
    found = [
        ([session.started_at for session in record.sessions[-1:]], path)
        for path, record in records.items()
        if record is not None and _settings(record) == _settings(wanted)
    ]
    if not found:
        return None
    path = max(found)[1]
    here, there = wanted.model, records[path].model
    files = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    return path, f"other files ({', '.join(files)})" if files else "other code"


def check_same_versions(folder: Path, found: Manifest, wanted: Manifest) -> None:
    """Refuse to go on with a run that was begun with other versions of what decides results.

    Raises:
        UserError: names each package with both versions.
    """
    other = other_versions(found, wanted)
    if other:
        raise UserError(
            f"{folder} was begun with {other}. Install those versions again to go on, or use overwrite=true to begin "
            "anew with these."
        )


def other_versions(found: Manifest, wanted: Manifest) -> str:
    """The packages that decide results and have other versions now, "" if none has."""
    names = [name for name in RESULT_PACKAGES if found.versions.get(name) != wanted.versions.get(name)]
    return ", ".join(
        f"{name} {found.versions.get(name, '-')} (here {wanted.versions.get(name, '-')})" for name in names
    )


def check_same_run(folder: Path, found: Manifest, wanted: Manifest) -> None:
    """Refuse to go on with a run whose record was edited, or copied from another run.

    Args:
        found: what the folder's manifest says.
        wanted: the record of the same run if it started now.

    Raises:
        UserError: they differ in something that decides results; the message shows each difference.
    """
    there, here = _identity(found), _identity(wanted)
    differences = [
        f"{key} is {there.get(key)} there and {here.get(key)} here"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key)
    ]
    if differences:
        raise UserError(
            f"{folder / MANIFEST} is not the record of this run: {'; '.join(differences)}. "
            "Move the folder away or use overwrite=true."
        )


@contextlib.contextmanager
def disk_errors_named(folder: Path) -> Iterator[None]:
    """Turn a full or read-only disk into one clear message.

    Raises:
        UserError: a file could not be read or written; the message names it, or `folder` if nothing else is known.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise UserError(
            f"{error.filename or folder}: {error.strerror}. Finished samples are kept; "
            "mend that and run the same command again."
        ) from error


def clear(folder: Path) -> None:
    """Remove all that an earlier run left in `folder`, except the lock."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def _relevant(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that decides results."""
    relevant = json.loads(json.dumps(config))
    for *parents, key in WITHOUT_EFFECT:
        part = relevant
        for parent in parents:
            part = part.get(parent, {})
        part.pop(key, None)
    return relevant


def _readable(folder: Path) -> Manifest | None:
    with contextlib.suppress(UserError, OSError):
        return read_manifest(folder)
    return None


def _settings(manifest: Manifest) -> dict[str, Any]:
    """What decides the results of a run beside its code, by dotted name."""
    return flat(_relevant(manifest.config)) | {"data.content_sha256": manifest.data.get("content_sha256")}


def _identity(manifest: Manifest) -> dict[str, Any]:
    """What decides the results of a run, by dotted name."""
    rest = {
        "run_id": manifest.run_id,
        "code_sha256": manifest.code_sha256,
        "own_code": manifest.own_code,
        "model_files": manifest.model,
    }
    return _settings(manifest) | flat(rest)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, by dotted name."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
