"""Products of vectors with keys that stay where they lie: CPU caches of float32.

Gathering the keys of a decode step costs more than multiplying them. A page holds its keys by channel, D rows of
B floats; a product is the sum of these rows, weighted by a vector. That is what `embedding_bag` sums, straight from
the cache.

Letters: G vectors a head, W pages, B slots a page, D head size; leading dimensions (layers, requests, heads) are free.
"""

import torch
from torch.nn.functional import embedding_bag


class KeyProducts:
    """Made once for some pages, then good for any vectors, and for the same pages of every layer."""

    def __init__(self, channels: torch.Tensor, pages: torch.Tensor, head_size: int, num_vectors: int) -> None:
        """Find the rows of the keys.

        Args:
            channels: float32 [rows, B], the whole cache: of each page D rows of keys, then as many of values.
            pages: int64 [..., W].
            head_size: D.
            num_vectors: G.
        """
        self._channels = channels
        self._shape = (*pages.shape[:-1], num_vectors, pages.shape[-1])
        first = pages[..., None, :, None] * (2 * head_size)
        rows = first + torch.arange(head_size, device=pages.device)
        self._rows = rows.expand(*self._shape, head_size).flatten()
        self._starts = torch.arange(0, len(self._rows), head_size, device=pages.device)
        self._head_size = head_size

    def of(self, vectors: torch.Tensor, first_page: int = 0) -> torch.Tensor:
        """Products float32 [..., G, W * B] of float32 [..., G, D], with pages counted from `first_page`."""
        weights = vectors[..., None, :].expand(*self._shape, self._head_size).flatten()
        channels = self._channels[first_page * 2 * self._head_size :]
        sums = embedding_bag(self._rows, channels, self._starts, mode="sum", per_sample_weights=weights)
        return sums.view(*self._shape[:-1], -1)
