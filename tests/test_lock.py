"""One process at a time in a run folder, whatever clocks, kills and other machines do."""

import errno
import fcntl
import json
import multiprocessing
import os
import socket
import time

import pytest

from harness.errors import UserError
from harness.store import lock
from harness.store.lock import LOCK, locked


def hold(folder, ready):
    with locked(folder):
        ready.set()
        time.sleep(60)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of tmp_path / "run"."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold, args=(tmp_path / "run", ready))
    process.start()
    assert ready.wait(20)
    yield process
    process.kill()
    process.join()


def test_a_second_process_is_refused_and_told_by_whom(tmp_path, holder):
    with (
        pytest.raises(UserError, match=rf"in use by process {holder.pid} on {socket.gethostname()}"),
        locked(tmp_path / "run"),
    ):
        pass


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path, holder):
    holder.kill()
    holder.join()
    with locked(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / LOCK).read_text())["pid"] == os.getpid()
    assert (tmp_path / "run" / LOCK).read_text() == ""


def leave(folder, **owner) -> None:
    """A lock that somebody left."""
    folder.mkdir(exist_ok=True)
    (folder / LOCK).write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "?"} | owner))


def age(folder, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(folder / LOCK, (then, then))


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lock, "LEASE_S", 1.0)
    monkeypatch.setattr(lock, "TOUCH_EVERY_S", 0.05)


@pytest.fixture
def without_flock(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_clock_that_jumps_gives_nobody_a_living_lock(tmp_path, holder, monkeypatch):
    """The start of a process, as psutil computes it, moves with the clock; the kernel's lock does not."""
    record = json.loads((tmp_path / "run" / LOCK).read_text())
    (tmp_path / "run" / LOCK).write_text(json.dumps(record | {"born": 0}))
    age(tmp_path / "run", 10**6)
    with pytest.raises(UserError, match=f"in use by process {holder.pid}"), locked(tmp_path / "run"):
        pass


def test_a_child_of_the_owner_does_not_keep_the_lock(tmp_path):
    context = multiprocessing.get_context("fork")
    with locked(tmp_path):
        child = context.Process(target=time.sleep, args=(60,))
        child.start()
    try:
        with locked(tmp_path):
            pass
    finally:
        child.kill()
        child.join()


def test_a_reused_process_id_does_not_keep_a_lock_alive(tmp_path):
    leave(tmp_path, pid=os.getpid(), host=socket.gethostname())
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["since"] != "?"


def test_a_lock_from_another_machine_that_shows_signs_of_life_is_respected(tmp_path, quick):
    leave(tmp_path)
    with (
        lock._kept_fresh(tmp_path / LOCK),
        pytest.raises(UserError, match="in use by process 1 on elsewhere"),
        locked(tmp_path),
    ):
        pass


def test_a_lock_from_another_machine_that_shows_none_is_taken_over_after_its_lease(tmp_path, quick, capsys):
    leave(tmp_path)
    started = time.monotonic()
    with locked(tmp_path):
        assert time.monotonic() - started > 0.5
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert "process 1 on elsewhere" in capsys.readouterr().out


def test_a_lock_from_another_machine_that_is_old_is_taken_over_at_once(tmp_path):
    leave(tmp_path)
    age(tmp_path, lock.LEASE_S + 1)
    started = time.monotonic()
    with locked(tmp_path):
        assert time.monotonic() - started < 1


@pytest.mark.parametrize(("restarts", "is_taken_over"), [("1", True), ("0", False)])
def test_a_job_that_slurm_queues_again_goes_on_at_once_on_another_machine(
    tmp_path, monkeypatch, restarts, is_taken_over
):
    leave(tmp_path, job="7", start=0)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    monkeypatch.setattr(lock, "_file_system_time", lambda folder: pytest.fail("waits") if is_taken_over else 10.0**12)
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["start"] == int(restarts)


def test_without_flock_the_owner_s_signs_of_life_decide(tmp_path, quick, without_flock):
    leave(tmp_path, pid=os.getpid(), host=socket.gethostname())
    with lock._kept_fresh(tmp_path / LOCK), pytest.raises(UserError, match="in use by"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_without_flock_a_dead_owner_on_this_machine_is_known(tmp_path, without_flock):
    leave(tmp_path, pid=2**22 - 1, host=socket.gethostname())
    with locked(tmp_path):
        pass


def test_the_owner_touches_its_lock(tmp_path, quick):
    with locked(tmp_path):
        age(tmp_path, 1000)
        time.sleep(0.3)
        assert time.time() - (tmp_path / LOCK).stat().st_mtime < 10


def test_a_lock_is_released_after_an_error(tmp_path):
    with pytest.raises(RuntimeError), locked(tmp_path):
        raise RuntimeError
    with locked(tmp_path):
        pass
