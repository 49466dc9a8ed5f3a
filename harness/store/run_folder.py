"""A run's folder: its name, its lock, and whether a run with that name is new, unfinished or finished."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import psutil

from harness.errors import UserError
from harness.store.manifest import FILE_NAME as MANIFEST
from harness.store.manifest import SCHEMA_VERSION, code_digest, digest, now

LOCK = ".lock"
HASH_DIGITS = 10
WITHOUT_EFFECT = (("benchmark", "path"), ("results_dir",), ("overwrite",), ("tracker",))


def make_run_id(config: dict[str, Any], data_sha256: str) -> str:
    """Readable prefix and a hash of everything that decides results.

    The place of the data, of the results and the tracker do not count; the data's content and the code do.
    """
    relevant = json.loads(json.dumps(config))
    for *parents, key in WITHOUT_EFFECT:
        part = relevant
        for parent in parents:
            part = part[parent]
        part.pop(key)
    identity = digest([SCHEMA_VERSION, relevant, data_sha256, code_digest()])[:HASH_DIGITS]
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
    content = file.read()
    return json.loads(content) if content.strip() else None


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
