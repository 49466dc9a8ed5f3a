"""Least and greatest number of every key channel in every page, brought up to date as keys are written.

Letters: P pages, n new keys of one layer and any head, B slots a page, D head size.
"""

import torch

from harness.engines.vllm.layout import CacheLayout
from harness.engines.vllm.ragged.placement import NULL_PAGE


class PageBounds:
    """Bounds in the cache's own dtype, so that they are exact. Right for pages that nothing is evicted from."""

    def __init__(self, layout: CacheLayout) -> None:
        """`layout`: the caches of all layers."""
        self._block_size, self._head_size = layout.grid.block_size, layout.head_size
        # greatest keys, then greatest negative keys
        shape = (layout.grid.num_numbers, 2 * layout.head_size)
        self._values = torch.zeros(shape, dtype=layout.pages.dtype, device=layout.pages.device)

    @staticmethod
    def bytes_a_page(head_size: int, dtype: torch.dtype) -> int:
        """What is kept of a page."""
        return 2 * head_size * dtype.itemsize

    def wrote(self, slots: torch.Tensor, keys: torch.Tensor) -> None:
        """Keys [n, D] went to slots int64 [n], counted over all pages; -1 is padding. A first slot opens its page."""
        page = (slots // self._block_size).clamp_min(NULL_PAGE)
        self._values[torch.where(slots % self._block_size == 0, page, NULL_PAGE)] = float("-inf")
        both = torch.cat([keys, -keys], dim=-1)
        self._values.scatter_reduce_(0, page[:, None].expand_as(both), both, "amax")

    def read(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Least and greatest keys [..., D] of pages int64 [...]."""
        highest, negative = self._values[pages].split(self._head_size, dim=-1)
        return -negative, highest
