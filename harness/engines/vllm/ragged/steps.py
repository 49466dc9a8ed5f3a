"""One step as attention by KV head sees it: N requests are N x H sequences of one KV head, ordered (request, head).

In that order the rows of a page table flatten without a copy, and the queries of a step that only decodes need no
order; where prompts are attended, queries are gathered so that each sequence's lie together.

Letters: L layers, R rows, N requests, H KV heads, n new tokens of all requests.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.utils import CpuGpuBuffer

from harness.engines.vllm.ragged.table import PageTable


class HeadSteps:
    """Tables, lengths and slots of the current step, at addresses that never change.

    Attributes:
        table: who holds which page.
        active: False while no request of the batch was ever evicted from: then pages follow from blocks, and the stock
            call serves.
        slots: int64 [L, n, H], where each new token's key and value go.
        query_order: int64 [n x H], which (token, head) comes where; None if that changes nothing.
    """

    def __init__(
        self,
        table: PageTable,
        max_tokens: int,
        block_size: int,
        make_buffer: Callable[..., CpuGpuBuffer],
        lenders: Sequence[int] | None = None,
    ) -> None:
        """Allocate.

        Args:
            table: who holds which page.
            max_tokens: most tokens of a step.
            block_size: B.
            make_buffer: makes a buffer of a shape and dtype on host and device.
            lenders: see `Policy.lenders`; None where every layer reads its own pages.
        """
        self._lenders = range(len(table.pages)) if lenders is None else lenders
        self.table = table
        self.active = False
        self.query_order: torch.Tensor | None = None
        self._block_size = block_size
        num_layers, num_rows, self._num_heads, width = table.pages.shape
        device = table.pages.device
        self._lengths = torch.zeros(num_layers, num_rows, self._num_heads, dtype=torch.int32, device=device)
        self._slots = torch.zeros(num_layers, max_tokens, self._num_heads, dtype=torch.int64, device=device)
        self._starts = make_buffer(num_rows * self._num_heads + 1, dtype=torch.int32)
        self._order = make_buffer(max_tokens * self._num_heads, dtype=torch.int64)
        self._heads = torch.arange(self._num_heads, device=device)
        self._row_origins = torch.arange(num_layers, device=device)[:, None, None] * (
            num_rows * self._num_heads * width
        )
        self._num_requests = self._num_tokens = 0
        self._builder: AttentionMetadataBuilder | None = None
        self._common: CommonAttentionMetadata | None = None

    @staticmethod
    def bytes_a_layer(num_rows: int, num_heads: int, width: int, max_tokens: int) -> int:
        """What table and steps hold of one layer on the device, but for offsets and order, which layers share."""
        a_row = torch.int32.itemsize * (width + 2)  # pages, surplus, length
        return num_heads * (num_rows * a_row + torch.int64.itemsize * max_tokens)

    @property
    def lengths(self) -> torch.Tensor:
        """int32 [L, N, H], tokens of each head after this step."""
        return self._lengths[:, : self._num_requests]

    @property
    def slots(self) -> torch.Tensor:
        """int64 [L, n, H]."""
        return self._slots[:, : self._num_tokens]

    def begin(
        self,
        request_ids: Sequence[str],
        blocks: Sequence[Sequence[int]],
        starts: np.ndarray,
        mean_lengths: torch.Tensor,
        request_of: torch.Tensor,
        places: torch.Tensor,
    ) -> None:
        """Set up a step.

        Args:
            request_ids: N requests, in batch order.
            blocks: what each holds.
            starts: int32 [N + 1], offsets of their new tokens.
            mean_lengths: int32 [N], resident tokens of each after this step, on average over layers and heads.
            request_of: int64 [n], the request of each token.
            places: int64 [n], the slot of each token in its request, on average.
        """
        table, num_heads, block_size = self.table, self._num_heads, self._block_size
        table.hold(request_ids, blocks)
        table.arrange(request_ids)
        self.active, self._num_requests, self._num_tokens = True, len(request_ids), len(places)
        surplus = table.surplus[:, : len(request_ids)]
        torch.add(mean_lengths[:, None], surplus, alpha=block_size, out=self._lengths[:, : len(request_ids)])
        column = places.div(block_size, rounding_mode="floor")[:, None] + surplus[:, request_of]
        row = request_of[:, None] * num_heads + self._heads
        width = table.pages.shape[-1]
        page = table.pages.view(-1).take(self._row_origins + row * width + column)
        torch.add((places % block_size)[:, None], page, alpha=block_size, out=self._slots[:, : len(places)])
        self._order_queries(starts)

    def _order_queries(self, starts: np.ndarray) -> None:
        """Offsets of the sequences' queries, and their order where a request has several."""
        num_heads, counts = self._num_heads, np.diff(starts)
        sequence_starts = starts[:-1, None] * num_heads + counts[:, None] * np.arange(num_heads)
        self._starts.np[: sequence_starts.size] = sequence_starts.ravel()
        self._starts.np[sequence_starts.size :] = starts[-1] * num_heads
        self._starts.copy_to_gpu()
        self.query_order = None
        if counts.max() == 1:
            return
        total = int(starts[-1]) * num_heads
        token = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)  # within its request
        first, stride = np.repeat(sequence_starts[:, 0], counts), np.repeat(counts, counts)
        place = (first + token)[:, None] + stride[:, None] * np.arange(num_heads)
        self._order.np[place.ravel()] = np.arange(total)
        self.query_order = self._order.copy_to_gpu(total)

    def width(self, request_ids: Sequence[str]) -> int:
        """See `StepPages.width`."""
        return self.table.longest(request_ids)

    def read(self, layer: int, places: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StepPages.read`."""
        return self.table.pages[layer, places, :, :width].long(), self._lengths[layer, places].long()

    def slot_mapping(self, layer: int, num_tokens: int) -> torch.Tensor:
        """int64 [num_tokens x H]; -1 for tokens that only pad."""
        self._slots[layer, self._num_tokens : num_tokens] = -1
        return self._slots[layer, :num_tokens].view(-1)

    def metadata(
        self, builder: AttentionMetadataBuilder, request_ids: Sequence[str], max_query_len: int
    ) -> list[AttentionMetadata]:
        """What the backend's own builder makes of the step, one for each layer."""
        num_sequences = self._num_requests * self._num_heads
        self._builder, self._common = (
            builder,
            CommonAttentionMetadata(
                query_start_loc=self._starts.gpu[: num_sequences + 1],
                query_start_loc_cpu=self._starts.cpu[: num_sequences + 1],
                seq_lens=self._lengths[0, : self._num_requests].view(-1),
                num_reqs=num_sequences,
                num_actual_tokens=self._num_tokens * self._num_heads,
                max_query_len=max_query_len,
                max_seq_len=self.table.longest(request_ids) * self._block_size,
                block_table_tensor=self.table.pages[0, : self._num_requests].flatten(0, 1),
                slot_mapping=self.slots[0].view(-1),
                causal=True,
            ),
        )
        return [
            self.metadata_of(layer, self.table.pages[lender], self._lengths[lender])
            for layer, lender in enumerate(self._lenders)
        ]

    def metadata_of(self, layer: int, pages: torch.Tensor, lengths: torch.Tensor) -> AttentionMetadata:
        """That of one layer which reads these pages int32 [R, H, W] as far as `lengths` int32 [R, H]."""
        common = replace(
            self._common,
            seq_lens=lengths[: self._num_requests].view(-1),
            block_table_tensor=pages[: self._num_requests].flatten(0, 1),
            slot_mapping=self.slots[layer].view(-1),
        )
        return self._builder.build(0, common, fast_build=True)
