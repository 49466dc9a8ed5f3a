"""A run's folder: its name, its lock, and whether the run in it is the one that is asked for."""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import psutil

from harness.errors import UserError
from harness.store.manifest import FILE_NAME as MANIFEST
from harness.store.manifest import SCHEMA_VERSION, Manifest, digest, now, read_manifest, remove_leftovers
from harness.store.result_code import ResultCode

LOCK = ".lock"
HASH_DIGITS = 10
WITHOUT_EFFECT = (("benchmark", "path"), ("results_dir",), ("overwrite",), ("tracker",))
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


def make_run_id(config: dict[str, Any], data_sha256: str, code: ResultCode) -> str:
    """Readable prefix and a hash of everything that decides results.

    The place of the data, of the results and the tracker do not count; the data's content and the code do.
    """
    identity = digest([SCHEMA_VERSION, _relevant(config), data_sha256, asdict(code)])[:HASH_DIGITS]
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


def find_run_of_other_code(folder: Path, wanted: Manifest) -> Path | None:
    """The newest run beside `folder` with the settings and the data of `wanted`, but other code; None without one."""
    namesakes = folder.parent.glob(folder.name[:-HASH_DIGITS] + "?" * HASH_DIGITS)
    records = {path: _readable(path) for path in namesakes if path != folder}
    found = [
        ([session.started_at for session in record.sessions[-1:]], path)
        for path, record in records.items()
        if record is not None and _settings(record) == _settings(wanted)
    ]
    return max(found)[1] if found else None


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


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make `folder` and keep other processes out of it; the lock of a process that died is taken over.

    Raises:
        UserError: a living process, or one on another machine, works in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    with _exclusively_open(path) as file:
        owner = _owner(file)
        if owner is not None and _may_live(owner):
            raise UserError(
                f"{folder} is in use by process {owner['pid']} on {owner['host']} (since {owner['since']}). "
                f"Wait for it; if it is dead, delete {path}."
            )
        process = psutil.Process()
        _replace(
            file,
            {"pid": process.pid, "host": socket.gethostname(), "since": now(), "born": process.create_time()},
        )
    remove_leftovers(folder)
    try:
        yield
    finally:
        with _exclusively_open(path) as file:
            _replace(file, None)


@contextlib.contextmanager
def _exclusively_open(path: Path) -> Iterator[TextIO]:
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _owner(file: TextIO) -> dict[str, Any] | None:
    """The process that took the lock; None if none did, or if a full disk kept its name from being written."""
    try:
        return json.load(file)
    except ValueError:
        return None


def _replace(file: TextIO, owner: dict[str, Any] | None) -> None:
    file.seek(0)
    file.truncate()
    file.write("" if owner is None else json.dumps(owner))
    file.flush()


def _may_live(owner: dict[str, Any]) -> bool:
    if owner["host"] != socket.gethostname():
        return True
    try:
        return psutil.Process(owner["pid"]).create_time() == owner["born"]
    except psutil.NoSuchProcess:
        return False


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
    return _flat(_relevant(manifest.config)) | {"data.content_sha256": manifest.data.get("content_sha256")}


def _identity(manifest: Manifest) -> dict[str, Any]:
    """What decides the results of a run, by dotted name."""
    code = {"run_id": manifest.run_id, "code_sha256": manifest.code_sha256, "own_code": manifest.own_code}
    return _settings(manifest) | _flat(code)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
