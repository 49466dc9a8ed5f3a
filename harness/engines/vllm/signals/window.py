"""The last queries of every request.

Letters: L layers, N requests, Q query heads, W window, D head size, R rows of per-request state.
"""

from collections.abc import Sequence

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from harness.engines.vllm.signals.batch import StepBatch


class WindowQueries:
    """The last W post-RoPE queries of every request, in a ring: [L, R, W, Q, D] in the model's dtype."""

    def __init__(self, num_layers: int, num_rows: int, window: int, device: torch.device) -> None:
        self._ring: torch.Tensor | None = None
        self._num_layers, self._num_rows, self._window, self._device = num_layers, num_rows, window, device
        self._tokens = self._rows = self._places = torch.empty(0, dtype=torch.int64)

    @property
    def num_queries(self) -> int:
        """Q x W, once a query was seen."""
        return 0 if self._ring is None else self._ring.shape[2] * self._ring.shape[3]

    def begin_step(self, batch: StepBatch, rows: Sequence[int]) -> None:
        """Find the tokens of this step that are among the last W of their request."""
        tokens, places, owners = [], [], []
        for index, row in enumerate(rows):
            stop, seen = batch.starts[index + 1], batch.num_seen[index]
            count = min(self._window, stop - batch.starts[index])
            tokens += range(stop - count, stop)
            places += [position % self._window for position in range(seen - count, seen)]
            owners += [row] * count
        self._tokens, self._places, self._rows = (
            async_tensor_h2d(values, device=self._device, dtype=torch.int64) for values in (tokens, places, owners)
        )

    def observe(self, layer: int, query: torch.Tensor) -> None:
        """Remember this layer's queries [tokens, Q, D]."""
        if self._ring is None:
            self._ring = query.new_zeros(self._num_layers, self._num_rows, self._window, *query.shape[1:])
        self._ring[layer, self._rows, self._places] = query[self._tokens]

    def read(self, layers: slice, rows: torch.Tensor, num_seen: torch.Tensor, count: int) -> torch.Tensor:
        """The last `count` queries of the requests in `rows` int64 [N], oldest first: [l, N, Q, count, D]."""
        if self._window == 1:
            return self._ring[layers][:, rows].transpose(2, 3)
        ages = torch.arange(-count, 0, device=self._device)
        places = (num_seen[:, None] + ages) % self._window
        return self._ring[layers][:, rows[:, None], places].transpose(2, 3)
