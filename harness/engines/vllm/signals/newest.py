"""What the newest token of each request attends to.

Letters: L layers, l of them at once, N requests, Q query heads, H KV heads, G = Q / H, W blocks, T tokens, D head size,
R requests that can be watched at once.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from harness.engines.vllm.groups import Group
from harness.engines.vllm.key_products import KeyProducts
from harness.engines.vllm.layout import CacheLayout
from harness.engines.vllm.signals.batch import StepBatch
from harness.engines.vllm.slices import FLOAT_BYTES


@dataclass(eq=False)
class NewestGroup:
    """Requests of a step of like length, computed together.

    Attributes:
        rows: int64 [N], their places among all that are watched in this step.
        longest: tokens of the longest.
        num_resident: int64 [N], None where all have `longest` tokens.
        block_table: int64 [N, W].
        products, logits: where keys are multiplied as each layer runs; logits float32 [L, N, H, G, W * B].
    """

    request_ids: list[str]
    rows: torch.Tensor
    longest: int
    num_resident: torch.Tensor | None
    block_table: torch.Tensor
    products: KeyProducts | None = None
    logits: torch.Tensor | None = None


class NewestAttention:
    """Softmax attention of one query a request and head, that of the newest token, over all resident tokens.

    On CPU each layer's keys are multiplied beside its kernel, which has just brought them into the processor's cache.
    Elsewhere a layer only sets the query aside, and keys are multiplied when somebody asks, which must be before
    anything is evicted or written: those of the step's requests (`attention`), or of any that have a row (`read`). With
    asynchronous scheduling the last token of a request may have been computed a step earlier than the others'.
    """

    def __init__(self, layout: CacheLayout, num_rows: int, scale: float) -> None:
        """`num_rows`: R; `scale`: of the softmax."""
        self._layout, self._num_rows, self._scale = layout, num_rows, scale
        self._queries: torch.Tensor | None = None  # [L, R, Q, D]
        self._tokens = self._rows = torch.empty(0, dtype=torch.int64)
        self.num_query_heads = 0  # until a query was seen
        self.groups: list[NewestGroup] = []

    def begin_step(self, batch: StepBatch, indices: Sequence[int], rows: Sequence[int] | None = None) -> None:
        """Watch the requests at these places of the batch.

        Args:
            batch: of this step.
            indices: N of them.
            rows: where the query of each is kept until its next one, for `read`; None for `attention`.
        """
        by_group = rows is None or self._layout.multiplies_in_place
        self.groups = self._groups(batch, indices) if by_group else []
        tokens = [batch.starts[index + 1] - 1 for index in indices]
        self._tokens, self._rows = self._to_device([tokens, list(range(len(indices)) if rows is None else rows)])

    def _groups(self, batch: StepBatch, indices: Sequence[int]) -> list[NewestGroup]:
        classes: dict[int, list[int]] = defaultdict(list)
        for row, index in enumerate(indices):
            classes[self._num_blocks(batch.num_resident[index]).bit_length()].append(row)
        return [self._group(batch, rows, [indices[row] for row in rows]) for rows in classes.values()]

    def _group(self, batch: StepBatch, rows: list[int], indices: list[int]) -> NewestGroup:
        lengths = [batch.num_resident[index] for index in indices]
        numbers = self._to_device([rows, indices, lengths])
        longest = max(lengths)
        return NewestGroup(
            [batch.request_ids[index] for index in indices],
            rows=numbers[0],
            longest=longest,
            num_resident=None if min(lengths) == longest else numbers[2],
            block_table=batch.block_table[:, : self._num_blocks(longest)].index_select(0, numbers[1]),
        )

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._layout.grid.block_size)

    def _to_device(self, numbers: list) -> torch.Tensor:
        return async_tensor_h2d(numbers, device=self._layout.grid.device, dtype=torch.int64)

    def observe(self, layer: int, query: torch.Tensor) -> None:
        """See this step's queries of one layer, [tokens, Q, D]; their keys are in the cache already."""
        in_place = self._layout.multiplies_in_place
        if self._queries is None and not in_place:
            self._queries = query.new_empty(self._layout.grid.num_layers, self._num_rows, *query.shape[1:])
        self.num_query_heads = query.shape[1]
        if not len(self._tokens):
            return
        newest = query[self._tokens]
        if not in_place:
            self._queries[layer, self._rows] = newest
            return
        grouped = (newest.float() * self._scale).unflatten(1, (self._layout.grid.num_heads, -1))
        for group in self.groups:
            if group.products is None:
                self._prepare(group, grouped.shape[2])
            vectors = grouped if len(self.groups) == 1 else grouped[group.rows]
            group.logits[layer] = group.products.of(vectors, layer * self._layout.grid.layer_step)

    def _prepare(self, group: NewestGroup, num_vectors: int) -> None:
        """Find the keys, and room for the logits."""
        pages = self._layout.grid.numbers(group.block_table, slice(0, 1))[0]
        group.products = self._layout.products(pages, num_vectors)
        width = pages.shape[-1] * self._layout.grid.block_size
        group.logits = torch.empty(self._layout.grid.num_layers, *pages.shape[:-1], num_vectors, width)

    def bytes_a_layer(self, group: NewestGroup) -> int:
        """What `attention` holds for a moment for one layer of a group."""
        grid = self._layout.grid
        if group.logits is not None:
            return 2 * FLOAT_BYTES * group.logits[0].numel()
        group_size = self.num_query_heads // grid.num_heads
        width = 2 * self._layout.head_size + 3 * group_size
        return FLOAT_BYTES * len(group.request_ids) * grid.num_heads * group.longest * width

    def attention(self, group: NewestGroup, layers: slice) -> torch.Tensor:
        """Softmax over the tokens of each request, float32 [l, N, H, G, at least `longest`], 0 in padding."""
        if group.logits is not None:
            logits = group.logits[layers]
            logits[..., group.longest :] = float("-inf")
        else:
            logits = self._multiply(layers, group.rows, group.block_table, group.longest)
        if group.num_resident is not None:
            padding = torch.arange(logits.shape[-1], device=logits.device) >= group.num_resident[:, None, None, None]
            logits.masked_fill_(padding, float("-inf"))
        return torch.softmax(logits, dim=-1)

    def _multiply(self, layers: slice, rows: torch.Tensor, block_table: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Products float32 [l, N, H, G, T] of the queries in `rows` int64 [N] with the keys in blocks int64 [N, W]."""
        grouped = self._queries[layers][:, rows].unflatten(2, (self._layout.grid.num_heads, -1))
        pages = self._layout.grid.numbers(block_table, layers)
        return self._layout.times_keys(grouped, pages, num_tokens).mul_(self._scale)

    def read(self, layers: slice, group: Group) -> torch.Tensor:
        """Attention float32 [l, N, H, G, T] of requests that are evicted from; nothing of others is touched.

        Raises:
            RuntimeError: on CPU, where no steps overlap, one of them was not in the last step.
        """
        num_tokens, wanted = group.alike.num_before, group.request_ids
        if not self._layout.multiplies_in_place:
            logits = self._multiply(layers, group.rows, group.block_table, num_tokens)
            return torch.softmax(logits, dim=-1)
        step = next((step for step in self.groups if set(wanted) <= set(step.request_ids)), None)
        if step is None:
            raise RuntimeError(f"requests {wanted} are evicted from by the attention of a step that they were not in")
        logits = step.logits[layers]
        if wanted != step.request_ids:
            logits = logits.index_select(1, self._to_device([step.request_ids.index(name) for name in wanted]))
        logits[..., num_tokens:] = float("-inf")
        return torch.softmax(logits, dim=-1)[..., :num_tokens]
