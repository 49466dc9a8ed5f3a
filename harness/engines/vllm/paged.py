"""Pages: the slots of one block that belong to one layer and one KV head, all reachable by number.

Paging makes clean-up of values beside the cache needless: those of a finished or preempted request are overwritten when
its slots are.

Letters: L layers, N requests, H heads, W blocks of a request, T tokens, M moves, B slots a block.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

ALL = slice(None)


@dataclass(frozen=True)
class PageGrid:
    """Numbers the pages of a buffer: layer * layer_step + block * block_step + head * head_step.

    `num_heads` is 1 where all heads of a layer share a page.
    """

    num_layers: int
    num_blocks: int
    num_heads: int
    block_size: int
    layer_step: int
    block_step: int
    head_step: int
    device: torch.device

    @classmethod
    def dense(
        cls, num_layers: int, num_blocks: int, num_heads: int, block_size: int, device: torch.device
    ) -> "PageGrid":
        """Pages in the order [L, num_blocks, H], without gaps."""
        return cls(
            num_layers, num_blocks, num_heads, block_size, num_blocks * num_heads, num_heads, 1, device
        )  # fmt: skip

    @property
    def num_numbers(self) -> int:
        """One more than the highest number."""
        last = (self.num_layers - 1) * self.layer_step + (self.num_blocks - 1) * self.block_step
        return last + (self.num_heads - 1) * self.head_step + 1

    def numbers(self, block_table: torch.Tensor, layers: slice = ALL) -> torch.Tensor:
        """int64 [l, N, H, W] of the blocks int64 [N, W] in these layers."""
        return self._origins[layers] + (block_table * self.block_step if self.block_step > 1 else block_table)[:, None]

    @cached_property
    def _origins(self) -> torch.Tensor:
        layers = torch.arange(self.num_layers, device=self.device)[:, None, None, None] * self.layer_step
        return layers + torch.arange(self.num_heads, device=self.device)[:, None] * self.head_step


@dataclass(frozen=True)
class SlotAddress:
    """Where slots lie: pages and offsets within them, broadcastable to one shape [..., H, M]; one offset for all."""

    page: torch.Tensor
    offset: torch.Tensor | int


def split_slots(slots: torch.Tensor | int, block_size: int) -> tuple[torch.Tensor | int, torch.Tensor | int]:
    """Columns of the block table and offsets within the blocks."""
    return (slots, 0) if block_size == 1 else (slots // block_size, slots % block_size)


def take(pages: torch.Tensor, columns: torch.Tensor | int) -> torch.Tensor:
    """Pages [l, N, H, M] in columns int64 [l or 1, N, H or 1, M], or in one column, of int64 [l, N, H, W]."""
    if isinstance(columns, int):
        return pages[..., columns, None]
    return pages.gather(-1, columns.expand(*pages.shape[:-1], -1))


class PagedValues:
    """One value a slot, [L, num_blocks, H, B]."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_heads: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.grid = PageGrid.dense(num_layers, num_blocks, num_heads, block_size, device)
        self._pages = torch.zeros(num_layers, num_blocks, num_heads, block_size, dtype=dtype, device=device)
        self._flat = self._pages.view(-1, block_size)

    def write(self, slot_mapping: torch.Tensor, values: torch.Tensor) -> None:
        """Set physical slots int64 [n] of all layers and heads to values [n] (or one value [1])."""
        blocks, offsets = slot_mapping // self.grid.block_size, slot_mapping % self.grid.block_size
        self._pages[:, blocks, :, offsets] = values.to(self._pages.dtype)[:, None, None]

    def put(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Set the slots int64 [L, n, H] of n tokens, counted over all pages, to values [n]."""
        self._flat.view(-1)[slots] = values.to(self._flat.dtype)[:, None]

    def read(self, pages: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """[..., T] of the first T slots of pages int64 [..., W]."""
        return self._flat.index_select(0, pages.flatten()).view(*pages.shape[:-1], -1)[..., :num_tokens]

    def at(self, slots: SlotAddress) -> torch.Tensor:
        """[..., M] of single slots."""
        return self._flat[slots.page, slots.offset]

    def store(self, pages: torch.Tensor, values: torch.Tensor) -> None:
        """Set the first T slots of pages int64 [..., W] to [..., T]; the rest of the last page becomes 0."""
        self._flat[pages] = self._split(pages, values)

    def add(self, pages: torch.Tensor, increments: torch.Tensor) -> None:
        """Add [..., T] to the first T slots of pages int64 [..., W]."""
        self._flat[pages] += self._split(pages, increments)  # no page is shared, so nothing has to be accumulated

    def move(self, source: SlotAddress, target: SlotAddress) -> None:
        """Follow tokens that moved; all sources are read before the first target is written."""
        self._flat[target.page, target.offset] = self._flat[source.page, source.offset]

    def copy_pages(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """As `move`, for whole pages int64 [..., M]."""
        self._flat[target] = self._flat[source]

    def _split(self, pages: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[..., T] -> [..., W, B]."""
        missing = pages.shape[-1] * self.grid.block_size - values.shape[-1]
        padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
        return padded.unflatten(-1, (-1, self.grid.block_size))
