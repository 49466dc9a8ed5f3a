"""Host time that the plugin takes (on CUDA: the time to queue the work)."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class HostTime:
    """Seconds spent so far.

    Attributes:
        total: of all.
        decoding: of those in steps where no request reads its prompt.
    """

    def __init__(self) -> None:
        self.total = self.decoding = 0.0

    @contextmanager
    def spent(self, decoding: bool) -> Iterator[None]:
        """Count what happens inside."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.total += seconds
            self.decoding += seconds if decoding else 0.0
