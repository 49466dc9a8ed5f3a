"""Attention that tokens received.

Letters: L layers, N requests, n new tokens, Q query heads, H KV heads, T tokens, D head size.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from harness.engines.vllm.layout import CacheLayout
from harness.engines.vllm.paged import PagedValues
from harness.engines.vllm.signals.batch import StepBatch

QUERY_CHUNK = 256
MAX_LOGITS = 1 << 26  # held at once, a quarter GiB: a long prompt is summed in smaller chunks


@dataclass(frozen=True)
class _Group:
    """Requests of a step with equally many new and resident tokens, computed together.

    Attributes:
        tokens: int64 [N, n], their new tokens' places in the batch.
        block_table: int64 [N, blocks], only the blocks that hold resident tokens.
    """

    num_resident: int
    tokens: torch.Tensor
    block_table: torch.Tensor


class AttentionMass:
    """Attention that every resident token received so far, summed over queries and over the group; paged, float32."""

    def __init__(self, layouts: Sequence[CacheLayout], num_blocks: int, scale: float, device: torch.device) -> None:
        first = layouts[0]
        self._layouts, self._scale = layouts, scale
        self.values = PagedValues(len(layouts), num_blocks, first.num_heads, first.block_size, torch.float32, device)
        self._block_size = first.block_size
        self._groups: list[_Group] = []

    def begin_step(self, batch: StepBatch) -> None:
        """New tokens start from nothing; requests with equal lengths are computed together."""
        self.values.write(batch.slot_mapping, torch.zeros(1, device=batch.slot_mapping.device))
        members: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for index, resident in enumerate(batch.num_resident):
            start, stop = batch.starts[index : index + 2]
            members[stop - start, resident].append((index, start))
        self._groups = [self._group(batch, *lengths, places) for lengths, places in members.items()]

    def _group(self, batch: StepBatch, num_new: int, num_resident: int, places: list[tuple[int, int]]) -> _Group:
        """`places`: index in the batch and first token of each request."""
        device = batch.block_table.device
        indices, starts = async_tensor_h2d(places, device=device, dtype=torch.int64).unbind(dim=-1)
        num_blocks = -(-num_resident // self._block_size)
        return _Group(
            num_resident,
            tokens=starts[:, None] + torch.arange(num_new, device=device),
            block_table=batch.block_table[:, :num_blocks].index_select(0, indices),
        )

    def observe(self, layer: int, query: torch.Tensor) -> None:
        """Add this step's attention of one layer; query [tokens, Q, D], keys are in the cache already."""
        for group in self._groups:
            keys, _ = self._layouts[layer].read(group.block_table, group.num_resident)
            sums = column_sums(query[group.tokens].float(), keys.float(), self._scale)
            self.values.add(layer, group.block_table, sums)


def column_sums(queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax attention summed over the queries and over the query heads of each KV head.

    The queries are the newest tokens: query i of n sees all keys but the n - 1 - i last. Computed in chunks of queries,
    so that memory stays O(chunk x T).

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
    size = max(1, min(QUERY_CHUNK, MAX_LOGITS // (num_rows * num_query_heads * num_keys)))
    for start in range(0, num_new, size):
        chunk = grouped[:, start : start + size]
        places = torch.arange(start, start + chunk.shape[1], device=keys.device) + num_keys - num_new
        logits = torch.einsum("nqhgd,nhtd->nhgqt", chunk, keys) * scale
        logits.masked_fill_(slots > places[:, None], float("-inf"))
        sums += logits.softmax(dim=-1).sum(dim=(2, 3))
    return sums
