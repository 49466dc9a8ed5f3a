"""KV block usage over time: written by the scheduler's process, read by the front end when a batch is done."""

import json
import time
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import IO

FLUSH_EVERY = 256


@dataclass(frozen=True)
class PoolShape:
    """First line of a trace: the KV pool as the engine allocated it. Sizes in blocks and bytes."""

    block_size: int
    num_blocks: int
    bytes_per_block: int


@dataclass(frozen=True)
class StepUsage:
    """One engine step: seconds since the first step, blocks in use, requests in the step, and totals so far.

    `prefilling` of the running requests read prompt tokens in this step. `running` is 0 where a finished request has
    handed its blocks back: no step, but the pool changed.
    """

    t_s: float
    blocks: int
    running: int
    prefilling: int
    num_evictions: int
    num_evicted_tokens: int
    num_preemptions: int


class TraceWriter:
    """Appends one JSON list a step; flushed every few hundred steps and whenever `flush` is called."""

    def __init__(self, path: str, shape: PoolShape) -> None:
        self._file: IO[str] = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - open as long as the engine
        self._start: float | None = None
        self._pending = 0
        self._file.write(json.dumps(asdict(shape)) + "\n")
        self.flush()

    def now(self) -> float:
        """Seconds since the first step."""
        now = time.monotonic()
        self._start = now if self._start is None else self._start
        return round(now - self._start, 4)

    def add(self, step: StepUsage) -> None:
        """Append a step."""
        self._file.write(json.dumps(astuple(step)) + "\n")
        self._pending += 1
        if self._pending >= FLUSH_EVERY:
            self.flush()

    def flush(self) -> None:
        """Make everything visible to readers."""
        self._file.flush()
        self._pending = 0


def read_trace(path: Path) -> tuple[PoolShape, list[StepUsage]]:
    """The pool and every complete step of a trace."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return PoolShape(**json.loads(lines[0])), [StepUsage(*json.loads(line)) for line in lines[1:]]
