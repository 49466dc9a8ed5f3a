"""Attention that tokens received.

Letters: N requests, n new tokens, Q query heads, H KV heads, W blocks, T tokens, D head size.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from harness.engines.vllm.layout import CacheLayout
from harness.engines.vllm.paged import PagedValues
from harness.engines.vllm.signals.batch import StepBatch
from harness.engines.vllm.signals.column_sums import column_sums
from harness.engines.vllm.signals.newest import NewestAttention
from harness.engines.vllm.slices import cut, rows_at_once


@dataclass(frozen=True)
class _Prompts:
    """Requests of a step that read equally many new tokens and have equally many, computed together in each layer.

    Attributes:
        tokens: int64 [N, n], their new tokens' places in the batch.
        block_table: int64 [N, W], only the blocks that hold resident tokens.
    """

    num_resident: int
    tokens: torch.Tensor
    block_table: torch.Tensor


class AttentionMass:
    """Attention that every resident token received so far, summed over queries and over the group; paged, float32.

    Prompts are summed beside each layer's kernel; requests that decode by `end_step`, before anything is evicted or
    written in the next step, for all layers together.
    """

    def __init__(self, layout: CacheLayout, num_rows: int, scale: float, prompts_only: bool = False) -> None:
        """`num_rows`: requests that can be watched at once; `prompts_only` if nothing is evicted while decoding."""
        grid = layout.grid
        self._prompts_only = prompts_only
        self._layout, self._scale = layout, scale
        self.values = PagedValues(
            grid.num_layers, grid.num_blocks, grid.num_heads, grid.block_size, torch.float32, grid.device
        )
        self._prompts: list[_Prompts] = []
        self._newest = NewestAttention(layout, num_rows, scale)

    def begin_step(self, batch: StepBatch) -> None:
        """New tokens start from nothing; find who reads a prompt and who decodes."""
        self.values.write(batch.slot_mapping, torch.zeros(1, device=batch.slot_mapping.device))
        prompts: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        decoding: list[int] = []
        for index, resident in enumerate(batch.num_resident):
            start, stop = batch.starts[index : index + 2]
            if self._prompts_only and not batch.prefilling[index]:
                continue
            if stop - start == 1:
                decoding.append(index)
            else:
                prompts[stop - start, resident].append((index, start))
        self._prompts = [self._prompts_of(batch, *lengths, places) for lengths, places in prompts.items()]
        self._newest.begin_step(batch, decoding)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.values.grid.block_size)

    def _to_device(self, numbers: list) -> torch.Tensor:
        return async_tensor_h2d(numbers, device=self.values.grid.device, dtype=torch.int64)

    def _prompts_of(self, batch: StepBatch, num_new: int, num_resident: int, places: list[tuple[int, int]]) -> _Prompts:
        """`places`: index in the batch and first token of each request."""
        indices, starts = self._to_device(places).unbind(dim=-1)
        return _Prompts(
            num_resident,
            tokens=starts[:, None] + torch.arange(num_new, device=starts.device),
            block_table=batch.block_table[:, : self._num_blocks(num_resident)].index_select(0, indices),
        )

    def observe(self, layer: int, query: torch.Tensor) -> None:
        """See this step's queries of one layer, [tokens, Q, D]; their keys are in the cache already."""
        for group in self._prompts:
            pages, places = (
                grid.numbers(group.block_table, slice(layer, layer + 1))[0]
                for grid in (self._layout.grid, self.values.grid)
            )
            keys = self._layout.read_keys(pages, group.num_resident)
            self.values.add(places, column_sums(query[group.tokens], keys, self._scale))
        self._newest.observe(layer, query)

    def end_step(self) -> None:
        """Sum the attention of the requests that decoded."""
        grid = self.values.grid
        for group in self._newest.groups:
            at_once = rows_at_once(self._newest.bytes_a_layer(group), grid.device)
            for layers in cut(grid.num_layers, at_once):
                sums = self._newest.attention(group, layers).sum(dim=3)
                self.values.add(grid.numbers(group.block_table, layers), sums)
        self._newest.groups = []
