"""Values kept beside the KV cache, one a slot, paged like it.

Paging makes clean-up needless: a finished or preempted request's values are overwritten when its slots are.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SlotAddress:
    """Where slots lie: physical blocks, heads and offsets within the block, broadcastable to one shape [..., H, M]."""

    block: torch.Tensor
    head: torch.Tensor
    offset: torch.Tensor

    def layer(self, index: int) -> "SlotAddress":
        """The addresses of one layer of [L, N, H, M]."""
        return SlotAddress(self.block[index], self.head, self.offset[index])


def address(block_table: torch.Tensor, slots: torch.Tensor, num_heads: int, block_size: int) -> SlotAddress:
    """Addresses of request-local slots.

    Args:
        block_table: int64 [N, blocks], physical block ids.
        slots: int64 [L, N, H or 1, M], slot numbers within each request.
        num_heads: H of what is addressed.
        block_size: B.
    """
    block = torch.take_along_dim(block_table[None, :, None, :], slots // block_size, dim=-1)
    head = torch.arange(num_heads, device=slots.device)[:, None]
    return SlotAddress(block, head, slots % block_size)


class PagedValues:
    """[L, num_blocks, H, B] values: L layers, H heads (1 where all heads share them), B slots a block."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_heads: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._pages = torch.zeros(num_layers, num_blocks, num_heads, block_size, dtype=dtype, device=device)
        self._layers = torch.arange(num_layers, device=device)[:, None, None, None]
        self._num_heads = num_heads
        self._block_size = block_size

    def write(self, slot_mapping: torch.Tensor, values: torch.Tensor) -> None:
        """Set physical slots int64 [n] of all layers and heads to values [n] (or one value [1])."""
        blocks, offsets = slot_mapping // self._block_size, slot_mapping % self._block_size
        self._pages[:, blocks, :, offsets] = values.to(self._pages.dtype)[:, None, None]

    def read(self, block_table: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """[L, N, H, T] of the first T slots of each request; block_table int64 [N, blocks]."""
        return self._pages[:, block_table].transpose(2, 3).flatten(3, 4)[..., :num_tokens]

    def store(self, block_table: torch.Tensor, values: torch.Tensor) -> None:
        """Set the first T slots of each request to [L, N, H, T]; the rest of the last block becomes 0."""
        num_layers, num_rows, num_heads, num_tokens = values.shape
        padded = torch.nn.functional.pad(values, (0, block_table.shape[1] * self._block_size - num_tokens))
        pages = padded.view(num_layers, num_rows, num_heads, -1, self._block_size).transpose(2, 3)
        self._pages[:, block_table] = pages

    def add(self, layer: int, block_table: torch.Tensor, increments: torch.Tensor) -> None:
        """Add [N, H, T] to the first T slots of each request in one layer."""
        num_rows, num_heads, num_tokens = increments.shape
        blocks = block_table[:, : -(-num_tokens // self._block_size)]
        padded = torch.nn.functional.pad(increments, (0, blocks.shape[1] * self._block_size - num_tokens))
        pages = padded.view(num_rows, num_heads, -1, self._block_size).transpose(1, 2)
        self._pages[layer, blocks] += pages  # no block is shared, so nothing has to be accumulated

    def move(self, block_table: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Follow tokens that moved: slots int64 [L, N, H or 1, M]."""
        src = address(block_table, source, self._num_heads, self._block_size)
        dst = address(block_table, target, self._num_heads, self._block_size)
        self._pages[self._layers, dst.block, dst.head, dst.offset] = self._pages[
            self._layers, src.block, src.head, src.offset
        ]
