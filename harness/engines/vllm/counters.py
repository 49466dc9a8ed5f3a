"""Running totals that engine processes write and the server reads: a small file mapped into all."""

import atexit
import mmap
import os
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

TOTALS, FLAG = struct.Struct("<5q"), struct.Struct("<q")
SIZE = TOTALS.size + FLAG.size
PREFIX = "kv-eviction-counters-"


@dataclass(frozen=True)
class Counters:
    """Totals since the engine started, the KV blocks held now, and whether a policy gave scores that are not finite."""

    num_evictions: int = 0
    num_evicted_tokens: int = 0
    num_preemptions: int = 0
    resident_blocks: int = 0
    num_blocks: int = 0
    bad_scores: int = 0


class CounterFile:
    """The shared file. A reader may see a mixture of two steps, never a torn number."""

    def __init__(self, path: str) -> None:
        """Open `path`, creating it with zeros."""
        with Path(path).open("a+b") as file:
            if file.tell() < SIZE:
                file.truncate(SIZE)
            self._map = mmap.mmap(file.fileno(), SIZE)

    def write(self, *totals: int) -> None:
        """Publish the first five of `Counters`: the scheduler's."""
        TOTALS.pack_into(self._map, 0, *totals)

    def report_bad_scores(self) -> None:
        """Publish that a policy gave scores that are not finite: the worker's."""
        FLAG.pack_into(self._map, TOTALS.size, 1)

    def read(self) -> Counters:
        """What was published last."""
        return Counters(*TOTALS.unpack_from(self._map, 0), *FLAG.unpack_from(self._map, TOTALS.size))


def temporary_counter_file() -> str:
    """The path of an empty file that is gone when this process ends, if not before (`forget_name`)."""
    handle, path = tempfile.mkstemp(prefix=PREFIX)
    os.close(handle)
    atexit.register(forget_name, path)
    return path


def forget_name(path: str) -> None:
    """Take a temporary file out of its folder. Who has mapped it keeps it, and a kill leaves nothing behind."""
    if Path(path).name.startswith(PREFIX):
        Path(path).unlink(missing_ok=True)
