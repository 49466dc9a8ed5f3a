"""One process at a time in a run folder.

The lock is the kernel's (`flock`), so that it goes with its process, however that ends and whatever the clocks say. It
reaches other machines on file systems that carry it; for those that do not, and for those that know no `flock`, the
lock file names its owner, who touches it every few seconds. An owner on another machine that has not done so for
`LEASE_S` is taken for dead, times being compared on the file system's own clock.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from harness.errors import UserError
from harness.store.manifest import now, remove_leftovers

LOCK = ".lock"
TOUCH_EVERY_S = 15.0
LEASE_S = 90.0
NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
BUSY = (errno.EAGAIN, errno.EACCES)

_held: set[int] = set()
os.register_at_fork(after_in_child=lambda: [os.close(descriptor) for descriptor in _held])  # else a child keeps locks


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make `folder` and keep other processes out of it; the lock of a process that died is taken over.

    Where the last owner was on another machine and has not been heard of for a while, this waits until it is heard of
    or its lease has run out.

    Raises:
        UserError: a living process works in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+", encoding="utf-8") as file:
        _held.add(file.fileno())
        try:
            has_flock = _take(file, folder)
            _refuse_the_living(_owner(file), path, has_flock)
            _replace(file, _this_process())
            remove_leftovers(folder)
            try:
                with _kept_fresh(path):
                    yield
            finally:
                with contextlib.suppress(OSError):
                    _replace(file, None)
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # a child that was just forked may not have closed its copy yet
            _held.discard(file.fileno())


def _take(file: TextIO, folder: Path) -> bool:
    """Take the kernel's lock; False where the file system has none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_FLOCK:
            return False
        if error.errno not in BUSY:
            raise
        raise _in_use(folder, _owner(file)) from None
    return True


def _refuse_the_living(owner: dict[str, Any] | None, path: Path, has_flock: bool) -> None:
    """Raise if the owner that the file names lives in spite of our lock: elsewhere, or where locks do not work."""
    if owner is None or _was_this_job(owner):
        return
    if owner["host"] == socket.gethostname() and (has_flock or not _is_running(owner["pid"])):
        return
    last = path.stat().st_mtime
    while (age := _file_system_time(path.parent) - last) < LEASE_S:
        print(
            f"{path.parent} was in use by process {owner['pid']} on {owner['host']} {age:.0f} s ago; "
            f"waiting up to {LEASE_S - age:.0f} s to see whether it lives",
            flush=True,
        )
        give_up = time.monotonic() + min(LEASE_S - age, 2 * TOUCH_EVERY_S)
        while time.monotonic() < give_up:
            time.sleep(min(1.0, TOUCH_EVERY_S / 4))
            if path.stat().st_mtime != last:
                raise _in_use(path.parent, owner)


def _in_use(folder: Path, owner: dict[str, Any] | None) -> UserError:
    who = "another process" if owner is None else f"process {owner['pid']} on {owner['host']} (since {owner['since']})"
    return UserError(f"{folder} is in use by {who}. Wait for it, or end it.")


def _this_process() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": now(), **_scheduler_job()}


def _scheduler_job() -> dict[str, Any]:
    """SLURM's number of this job and of its start: one that is queued again keeps the first."""
    job = os.environ.get("SLURM_JOB_ID")
    return {} if job is None else {"job": job, "start": int(os.environ.get("SLURM_RESTART_COUNT", "0"))}


def _was_this_job(owner: dict[str, Any]) -> bool:
    """Whether the owner was this very job before it was queued again."""
    here = _scheduler_job()
    return "job" in owner and owner["job"] == here.get("job") and owner["start"] < here["start"]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _file_system_time(folder: Path) -> float:
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock.") as file:
        return os.stat(file.fileno()).st_mtime


@contextlib.contextmanager
def _kept_fresh(path: Path) -> Iterator[None]:
    """Touch the lock file now and then, as the sign of life for other machines."""
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(TOUCH_EVERY_S):
            with contextlib.suppress(OSError):
                os.utime(path)

    thread = threading.Thread(target=touch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _owner(file: TextIO) -> dict[str, Any] | None:
    """The process that took the lock; None if none did, or if a full disk kept its name from being written."""
    file.seek(0)
    try:
        owner = json.load(file)
    except ValueError:
        return None
    return owner if isinstance(owner, dict) and {"pid", "host", "since"} <= owner.keys() else None


def _replace(file: TextIO, owner: dict[str, Any] | None) -> None:
    file.seek(0)
    file.truncate()
    file.write("" if owner is None else json.dumps(owner))
    file.flush()
