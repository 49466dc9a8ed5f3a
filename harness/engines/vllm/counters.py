"""Running totals that one process writes and another reads: a small file mapped into both."""

import mmap
import struct
from dataclasses import astuple, dataclass
from pathlib import Path

LAYOUT = struct.Struct("<5q")


@dataclass(frozen=True)
class Counters:
    """Totals since the engine started, and the KV blocks held now."""

    num_evictions: int = 0
    num_evicted_tokens: int = 0
    num_preemptions: int = 0
    resident_blocks: int = 0
    num_blocks: int = 0


class CounterFile:
    """The shared file. A reader may see a mixture of two steps, never a torn number."""

    def __init__(self, path: str) -> None:
        """Open `path`, creating it with zeros."""
        with Path(path).open("a+b") as file:
            if file.tell() < LAYOUT.size:
                file.truncate(LAYOUT.size)
            self._map = mmap.mmap(file.fileno(), LAYOUT.size)

    def write(self, counters: Counters) -> None:
        """Publish."""
        LAYOUT.pack_into(self._map, 0, *astuple(counters))

    def read(self) -> Counters:
        """What was published last."""
        return Counters(*LAYOUT.unpack_from(self._map, 0))
