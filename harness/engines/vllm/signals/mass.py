"""Attention that tokens received.

Letters: L layers, N requests, n new tokens, Q query heads, H KV heads, W blocks, T tokens, D head size, R rows of
per-request state.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from harness.engines.vllm.layout import CacheLayout
from harness.engines.vllm.paged import PagedValues
from harness.engines.vllm.signals.batch import StepBatch
from harness.engines.vllm.signals.column_sums import column_sums, sums_of_newest
from harness.engines.vllm.slices import FLOAT_BYTES, cut, rows_at_once


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


@dataclass(frozen=True)
class _Decoding:
    """Requests of a step with one new token each, computed together after the step, for all layers.

    Attributes:
        rows: int64 [N], among those that decode in this step.
        num_resident: int64 [N], None where all have `longest` tokens.
        block_table: int64 [N, W].
    """

    rows: torch.Tensor
    longest: int
    num_resident: torch.Tensor | None
    block_table: torch.Tensor


class AttentionMass:
    """Attention that every resident token received so far, summed over queries and over the group; paged, float32.

    Prompts are summed beside each layer's kernel. Of requests that decode a layer only sets the query aside; before
    anything is evicted or written in the next step, `end_step` sums for all layers together.
    """

    def __init__(self, layout: CacheLayout, num_rows: int, scale: float, prompts_only: bool = False) -> None:
        """`num_rows`: requests that can be watched at once; `prompts_only` if nothing is evicted while decoding."""
        grid = layout.grid
        self._prompts_only = prompts_only
        self._layout, self._num_rows, self._scale = layout, num_rows, scale
        self.values = PagedValues(
            grid.num_layers, grid.num_blocks, grid.num_heads, grid.block_size, torch.float32, grid.device
        )
        self._prompts: list[_Prompts] = []
        self._decoding: list[_Decoding] = []
        self._tokens = torch.empty(0, dtype=torch.int64)
        self._queries: torch.Tensor | None = None  # [L, R, Q, D]

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
        classes: dict[int, list[int]] = defaultdict(list)
        for row, index in enumerate(decoding):
            classes[self._num_blocks(batch.num_resident[index]).bit_length()].append(row)
        self._decoding = [self._decoding_of(batch, rows, [decoding[row] for row in rows]) for rows in classes.values()]
        self._tokens = self._to_device([batch.starts[index] for index in decoding])

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

    def _decoding_of(self, batch: StepBatch, rows: list[int], indices: list[int]) -> _Decoding:
        """`rows` and `indices`: places of these requests among those that decode, and in the batch."""
        lengths = [batch.num_resident[index] for index in indices]
        numbers = self._to_device([rows, indices, lengths])
        longest = max(lengths)
        return _Decoding(
            rows=numbers[0],
            longest=longest,
            num_resident=None if min(lengths) == longest else numbers[2],
            block_table=batch.block_table[:, : self._num_blocks(longest)].index_select(0, numbers[1]),
        )

    def observe(self, layer: int, query: torch.Tensor) -> None:
        """See this step's queries of one layer, [tokens, Q, D]; their keys are in the cache already."""
        for group in self._prompts:
            pages, places = (
                grid.numbers(group.block_table, slice(layer, layer + 1))[0]
                for grid in (self._layout.grid, self.values.grid)
            )
            keys = self._layout.read_keys(pages, group.num_resident)
            self.values.add(places, column_sums(query[group.tokens].float(), keys.float(), self._scale))
        if self._queries is None:
            self._queries = query.new_empty(self.values.grid.num_layers, self._num_rows, *query.shape[1:])
        if self._decoding:
            self._queries[layer, : len(self._tokens)] = query[self._tokens]

    def end_step(self) -> None:
        """Sum the attention of the requests that decoded."""
        grid = self._layout.grid
        for group in self._decoding:
            num_requests, head_size = len(group.rows), self._layout.head_size
            group_size = self._queries.shape[2] // grid.num_heads
            a_row = FLOAT_BYTES * grid.num_heads * group.longest * (2 * head_size + 3 * group_size)
            for layers in cut(grid.num_layers, max(1, rows_at_once(a_row, grid.device) // num_requests)):
                queries = self._queries[layers][:, group.rows].float()
                keys = self._layout.read_keys(grid.numbers(group.block_table, layers), group.longest)
                sums = sums_of_newest(queries, keys.float(), self._scale, group.num_resident)
                self.values.add(self.values.grid.numbers(group.block_table, layers), sums)
        self._decoding = []
