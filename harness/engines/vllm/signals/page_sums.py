"""Powers of attention that tokens received, by some of the queries, on pages that may be looked up.

Letters: L layers, N requests, n new tokens, Q query heads, H KV heads, T tokens, D head size.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from harness.engines.vllm.layout import CacheLayout
from harness.engines.vllm.paged import PagedValues
from harness.engines.vllm.signals.batch import StepBatch, StepPages
from policies.products import as_multiplied, products

QUERY_CHUNK = 256
MAX_LOGITS = 1 << 26  # held at once, a quarter GiB: a long prompt is summed in smaller chunks


@dataclass(frozen=True)
class _Group:
    """Requests of a step with equally many new and resident tokens, computed together.

    Attributes:
        tokens: int64 [N, n], the places in the batch of their observing tokens, the last of the new ones.
        block_table: int64 [N, W], only the blocks that hold resident tokens.
        places: int64 [N], where the requests are in the batch.
        width: pages of the longest head, where heads have unequally many.
    """

    num_resident: int
    tokens: torch.Tensor
    block_table: torch.Tensor
    places: torch.Tensor
    width: int


class PageSums:
    """Attention that every resident token received, to some power, summed over queries and over the group; paged.

    What `AttentionMass` is to policies with equal counts, where pages are looked up and rows are padded.
    """

    def __init__(self, layout: CacheLayout, scale: float, power: int) -> None:
        """Allocate.

        Args:
            layout: the caches of all layers.
            scale: softmax scale.
            power: of each query's attention, before it is summed.
        """
        grid = layout.grid
        self._layout, self._scale, self._power = layout, scale, power
        self.values = PagedValues(
            grid.num_layers, grid.num_blocks, grid.num_heads, grid.block_size, torch.float32, grid.device
        )
        self._block_size = grid.block_size
        self._groups: list[_Group] = []
        self._pages: StepPages | None = None

    def begin_step(self, batch: StepBatch, observed: Sequence[int] | None = None) -> None:
        """New tokens start from nothing; requests with equal lengths are computed together.

        Args:
            batch: the requests of the step.
            observed: how many of each one's new tokens count, the last of them; None for all.
        """
        self._pages = batch.pages
        zero = torch.zeros(1, device=batch.slot_mapping.device)
        if batch.pages is None:
            self.values.write(batch.slot_mapping, zero)
        else:
            self.values.put(batch.pages.slots, zero)
        members: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for index, resident in enumerate(batch.num_resident):
            start, stop = batch.starts[index : index + 2]
            count = stop - start if observed is None else observed[index]
            if count:
                members[count, resident].append((index, stop - count))
        self._groups = [self._group(batch, *lengths, places) for lengths, places in members.items()]

    def _group(self, batch: StepBatch, num_queries: int, num_resident: int, places: list[tuple[int, int]]) -> _Group:
        """`places`: index in the batch and first observing token of each request."""
        device = batch.block_table.device
        indices, starts = async_tensor_h2d(places, device=device, dtype=torch.int64).unbind(dim=-1)
        num_blocks = -(-num_resident // self._block_size)
        names = [batch.request_ids[index] for index, _ in places]
        return _Group(
            num_resident,
            tokens=starts[:, None] + torch.arange(num_queries, device=device),
            block_table=batch.block_table[:, :num_blocks].index_select(0, indices),
            places=indices,
            width=num_blocks if batch.pages is None else batch.pages.width(names),
        )

    def observe(self, layer: int, query: torch.Tensor) -> None:
        """Add this step's attention of one layer; query [tokens, Q, D], keys are in the cache already."""
        for group in self._groups:
            queries = query[group.tokens]
            if self._pages is not None:
                pages, lengths = self._pages.read(layer, group.places, group.width)
                keys = self._layout.read_keys(pages, group.width * self._block_size)
                self.values.add(pages, sums_of_powers(queries, keys, self._scale, lengths, self._power))
                continue
            pages, places = (
                grid.numbers(group.block_table, slice(layer, layer + 1))[0]
                for grid in (self._layout.grid, self.values.grid)
            )
            keys = self._layout.read_keys(pages, group.num_resident)
            self.values.add(places, sums_of_powers(queries, keys, self._scale, power=self._power))

    def end_step(self) -> None:
        """Nothing was put off."""


def sums_of_powers(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, lengths: torch.Tensor | None = None, power: int = 1
) -> torch.Tensor:
    """Softmax attention summed over the queries and over the query heads of each KV head.

    The queries are the newest tokens: query i of n sees all keys but the n - 1 - i last. Computed in chunks of queries,
    so that memory stays O(chunk x T).

    Args:
        queries: [N, n, Q, D].
        keys: [N, H, T, D], the new tokens last.
        scale: softmax scale.
        lengths: int64 [N, H], keys of each head, the others are padding; None for T.
        power: of each query's attention, before it is summed.

    Returns:
        float32 [N, H, T], 0 in padding.
    """
    queries, keys = as_multiplied(queries, keys)
    num_rows, num_new, num_query_heads, head_size = queries.shape
    num_heads, num_keys = keys.shape[1:3]
    group = num_query_heads // num_heads
    grouped = queries.view(num_rows, num_new, num_heads, group, head_size).permute(0, 2, 3, 1, 4)
    slots = torch.arange(num_keys, device=keys.device)
    behind = num_keys if lengths is None else lengths[:, :, None, None, None]
    sums = torch.zeros(num_rows, num_heads, num_keys, device=keys.device)
    size = max(1, min(QUERY_CHUNK, MAX_LOGITS // (num_rows * num_query_heads * num_keys)))
    for start in range(0, num_new, size):
        chunk = grouped[:, :, :, start : start + size]
        count = chunk.shape[3]
        places = torch.arange(start, start + count, device=keys.device)[:, None] - num_new + behind
        logits = products(chunk.reshape(num_rows, num_heads, -1, head_size), keys, scale).unflatten(2, (group, count))
        logits.masked_fill_(slots > places, float("-inf"))
        attention = logits.softmax(dim=-1)
        sums += (attention if power == 1 else attention**power).sum(dim=(2, 3))
    return sums
