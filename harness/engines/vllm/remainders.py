"""What rounding to the cache's dtype leaves of keys that are turned again and again.

With `cache_positions` every eviction turns the keys that stay. Each turn of a bfloat16 key would be rounded, and the
errors add up. So what is lost is kept beside the cache, in the same dtype: together they hold a key to 16 bits.

Letters: L layers, H KV heads, W blocks of a request, T tokens, B slots a block, D head size.
"""

import torch

from harness.engines.vllm.layout import CacheLayout
from harness.engines.vllm.paged import PageGrid, SlotAddress


class KeyRemainders:
    """One vector [D] a slot, 0 for keys that were never turned."""

    def __init__(self, layout: CacheLayout) -> None:
        """Room for the keys of `layout`."""
        grid = layout.grid
        self.grid = PageGrid.dense(grid.num_layers, grid.num_blocks, grid.num_heads, grid.block_size, grid.device)
        shape = (grid.num_layers, grid.num_blocks, grid.num_heads, grid.block_size, layout.head_size)
        self._pages = torch.zeros(shape, dtype=layout.pages.dtype, device=grid.device)
        self._flat = self._pages.view(-1, *shape[-2:])

    def clear(self, slot_mapping: torch.Tensor) -> None:
        """New keys are in physical slots int64 [n]."""
        self._pages[:, slot_mapping // self.grid.block_size, :, slot_mapping % self.grid.block_size] = 0

    def read(self, pages: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """float32 [..., T, D] of the first T slots of pages int64 [..., W]."""
        return self._flat[pages].flatten(-3, -2)[..., :num_tokens, :].float()

    def store(self, pages: torch.Tensor, remainders: torch.Tensor) -> None:
        """Set the first T slots of pages int64 [..., W] to [..., T, D]; the rest of the last page becomes 0."""
        missing = pages.shape[-1] * self.grid.block_size - remainders.shape[-2]
        padded = torch.nn.functional.pad(remainders, (0, 0, 0, missing))
        self._flat[pages] = padded.unflatten(-2, (-1, self.grid.block_size)).to(self._flat.dtype)

    def move(self, source: SlotAddress, target: SlotAddress) -> None:
        """Follow tokens that moved; all sources are read before the first target is written."""
        self._flat[target.page, target.offset] = self._flat[source.page, source.offset]

    def copy_pages(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """As `move`, for whole pages int64 [..., M]."""
        self._flat[target] = self._flat[source]
