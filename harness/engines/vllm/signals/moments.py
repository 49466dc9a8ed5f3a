"""How the prompt's queries are distributed.

Letters: L layers, N requests, t tokens, Q query heads, D head size, R rows of per-request state.
"""

from collections.abc import Sequence

import torch

from harness.engines.vllm.rotation import inverse_frequencies, turn
from harness.engines.vllm.signals.batch import StepBatch


class QueryMoments:
    """First and second moments of every request's pre-RoPE prompt queries, float32 [L, R, Q, D (, D)]."""

    def __init__(self, num_layers: int, num_rows: int, rotary: torch.nn.Module, first: int) -> None:
        """`rotary`: the model's rotary embedding; prompt positions below `first` do not count."""
        self._cos_sin = rotary.cos_sin_cache
        self.inv_freq = inverse_frequencies(rotary)
        self._first, self._num_layers, self._num_rows = first, num_layers, num_rows
        self._sum: torch.Tensor | None = None
        self._outer: torch.Tensor | None = None
        self._count = torch.zeros(num_rows, device=self._cos_sin.device)
        self._spans: list[tuple[int, slice, torch.Tensor]] = []
        self._new_rows: list[int] = []

    @property
    def num_query_heads(self) -> int:
        """Q, once a query was seen."""
        return 0 if self._sum is None else self._sum.shape[2]

    def begin_step(self, batch: StepBatch, rows: Sequence[int], new_rows: Sequence[int]) -> None:
        """Find the prompt tokens of this step."""
        self._spans, self._new_rows = [], list(new_rows)
        for row in new_rows:
            self._count[row].zero_()
        for index, row in enumerate(rows):
            if not batch.prefilling[index]:
                continue
            start, stop = batch.starts[index], batch.starts[index + 1]
            position = batch.num_seen[index] - (stop - start)
            skip = min(max(self._first - position, 0), stop - start)
            if skip < stop - start:
                cos_sin = self._cos_sin[position + skip : batch.num_seen[index]].float()
                self._spans.append((row, slice(start + skip, stop), cos_sin))
                self._count[row].add_(stop - start - skip)

    def observe(self, layer: int, query: torch.Tensor) -> None:
        """Add this layer's prompt queries [tokens, Q, D]."""
        if self._sum is None:
            shape = (self._num_layers, self._num_rows, *query.shape[1:])
            self._sum = query.new_zeros(shape, dtype=torch.float32)
            self._outer = query.new_zeros((*shape, query.shape[-1]), dtype=torch.float32)
        for row in self._new_rows:
            self._sum[layer][row] = 0
            self._outer[layer][row] = 0
        for row, span, cos_sin in self._spans:
            cos, sin = cos_sin[:, None].chunk(2, dim=-1)
            plain = turn(query[span].float(), cos, -sin)
            self._sum[layer][row] += plain.sum(dim=0)
            self._outer[layer][row] += torch.einsum("tqd,tqe->qde", plain, plain)

    def read(self, layers: slice, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean [l, N, Q, D] and population covariance [l, N, Q, D, D] of the requests in `rows`; 0 without queries."""
        count = self._count[rows].clamp_min(1)
        mean = self._sum[layers][:, rows] / count[:, None, None]
        second = self._outer[layers][:, rows] / count[:, None, None, None]
        return mean, second - mean[..., :, None] * mean[..., None, :]
