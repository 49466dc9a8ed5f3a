"""Attention that tokens received.

Letters: L layers, N requests, n new tokens, Q query heads, H KV heads, T tokens, D head size.
"""

from collections.abc import Sequence

import torch

from harness.engine.layout import CacheLayout
from harness.engine.paged import PagedValues
from harness.engine.signals.batch import StepBatch

QUERY_CHUNK = 256


class AttentionMass:
    """Attention that every resident token received so far, summed over queries and over the group; paged, float32."""

    def __init__(self, layouts: Sequence[CacheLayout], num_blocks: int, scale: float, device: torch.device) -> None:
        first = layouts[0]
        self._layouts, self._scale = layouts, scale
        self.values = PagedValues(len(layouts), num_blocks, first.num_heads, first.block_size, torch.float32, device)
        self._batch: StepBatch | None = None
        self._groups: dict[tuple[int, int], list[int]] = {}

    def begin_step(self, batch: StepBatch) -> None:
        """New tokens start from nothing; requests with equal lengths are computed together."""
        self._batch, self._groups = batch, {}
        self.values.write(batch.slot_mapping, torch.zeros(1, device=batch.slot_mapping.device))
        for index, resident in enumerate(batch.num_resident):
            num_new = batch.starts[index + 1] - batch.starts[index]
            self._groups.setdefault((num_new, resident), []).append(index)

    def observe(self, layer: int, query: torch.Tensor) -> None:
        """Add this step's attention of one layer; query [tokens, Q, D], keys are in the cache already."""
        for (num_new, resident), members in self._groups.items():
            tables = self._batch.block_table[members]
            keys, _ = self._layouts[layer].read(tables, resident)
            starts = [self._batch.starts[index] for index in members]
            queries = torch.stack([query[start : start + num_new] for start in starts]).float()
            self.values.add(layer, tables, column_sums(queries, keys.float(), self._scale))


def column_sums(queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax attention summed over the queries and over the query heads of each KV head.

    The queries are the newest tokens: query i of n sees all keys but the n - 1 - i last. Computed in blocks of
    queries, so that memory stays O(chunk x T).

    Args:
        queries: float32 [N, n, Q, D].
        keys: float32 [N, H, T, D], the new tokens last.
        scale: softmax scale.

    Returns:
        float32 [N, H, T].
    """
    num_rows, num_new, num_query_heads, head_size = queries.shape
    num_heads, num_keys = keys.shape[1:3]
    grouped = queries.view(num_rows, num_new, num_heads, num_query_heads // num_heads, head_size)
    slots = torch.arange(num_keys, device=keys.device)
    sums = keys.new_zeros(num_rows, num_heads, num_keys)
    for start in range(0, num_new, QUERY_CHUNK):
        chunk = grouped[:, start : start + QUERY_CHUNK]
        places = torch.arange(start, start + chunk.shape[1], device=keys.device) + num_keys - num_new
        logits = torch.einsum("nqhgd,nhtd->nhgqt", chunk, keys) * scale
        logits.masked_fill_(slots > places[:, None], float("-inf"))
        sums += logits.softmax(dim=-1).sum(dim=(2, 3))
    return sums
