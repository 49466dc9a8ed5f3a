"""Progress of a long loop: a bar on a terminal, a plain line now and then in a log."""

import os
import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

SECONDS_BETWEEN_LINES = 30.0


class Progress:
    """Counts up to `total`. Use as a context manager; `TQDM_DISABLE=1` silences it."""

    def __init__(self, title: str, total: int, done: int = 0) -> None:
        self._title, self._total, self._done = title, total, done
        self._already_done = done
        self._started = self._last_line = time.monotonic()
        self._silent = os.environ.get("TQDM_DISABLE", "") not in ("", "0")
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        console = Console(stderr=True)
        if console.is_terminal and not self._silent:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=console,
            )
            self._bar.start()
            self._bar.add_task(self._title, total=self._total, completed=self._done, note="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, note: str = "") -> None:
        """One more is done; `note` is shown beside the count."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done, note=note)
        elif not self._silent and time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            print(self._line(note), file=sys.stderr, flush=True)

    def _line(self, note: str) -> str:
        elapsed = time.monotonic() - self._started
        left = elapsed / max(self._done - self._already_done, 1) * (self._total - self._done)
        return f"{self._title} {self._done}/{self._total}, {elapsed:.0f} s, about {left:.0f} s left  {note}".rstrip()
