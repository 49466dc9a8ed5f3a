"""Reading and moving tokens in vLLM's paged KV cache, all layers at once, whatever its memory layout.

vLLM 0.32 hands every attention layer one tensor of the logical shape [num_blocks, H, B, 2 D], and all of them lie at
equal distances in one buffer. So every page (layer, block, head) is a row of one view of the buffer. On CUDA the last
axis holds the key and then the value of a token (only strides differ between backends). The CPU backend reads the same
memory as [num_blocks, H, 2 B, D] and cuts it in two: a key region, which its kernels want transposed ([D, B]), and a
value region ([B, D]).

Letters: L layers, H KV heads, W blocks of a request, T tokens, M moves, B slots a block, D head size.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from harness.engines.vllm.key_products import KeyProducts
from harness.engines.vllm.paged import PageGrid, SlotAddress
from policies.products import products


class CacheLayout(ABC):
    """The cache of all layers as pages of tokens.

    Attributes:
        grid: numbers the pages.
        pages: [page numbers, B, 2 D], a view of the buffer; only numbers that `grid` gives are pages.
        head_size: D.
    """

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        """Find the pages of these caches.

        Args:
            caches: one a layer, in model order, [num_blocks, H, B, 2 D].

        Raises:
            ValueError: they do not lie at equal distances in one buffer.
        """
        first = caches[0]
        num_blocks, num_heads, block_size, width = first.shape
        distance = _distance(caches)
        unit = math.gcd(distance, *first.stride()[:2])
        self.grid = PageGrid(
            len(caches), num_blocks, num_heads, block_size, distance // unit, first.stride(0) // unit,
            first.stride(1) // unit, first.device,
        )  # fmt: skip
        self.pages = first.as_strided((self.grid.num_numbers, block_size, width), (unit, *first.stride()[2:]))
        self.head_size = width // 2

    @property
    def is_rounded(self) -> bool:
        """Whether a number in the cache has fewer bits than float32."""
        return self.pages.dtype.itemsize < torch.float32.itemsize

    def products(self, pages: torch.Tensor, num_vectors: int) -> KeyProducts | None:
        """What multiplies G vectors with the keys in pages int64 [..., W]; None where keys are read for it."""
        return None

    def times_keys(self, vectors: torch.Tensor, pages: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Products float32 [..., G, T] of vectors [..., G, D] with the keys of the first T slots of pages [..., W]."""
        in_place = self.products(pages, vectors.shape[-2])
        if in_place is None:
            return products(vectors, self.read_keys(pages, num_tokens))
        return in_place.of(vectors.float())[..., :num_tokens]

    @property
    def multiplies_in_place(self) -> bool:
        """Whether `products` is not None."""
        return False

    @abstractmethod
    def keys_at(self, slots: SlotAddress) -> torch.Tensor:
        """Keys [..., M, D] of single slots."""

    @abstractmethod
    def read_keys(self, pages: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Keys [..., T, D] of the first T slots of pages int64 [..., W], in strides that suit the layout."""

    @abstractmethod
    def read_values(self, pages: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Values [..., T, D], as `read_keys`."""

    @staticmethod
    def _read(states: torch.Tensor, pages: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """[..., T, D] of the first T slots of pages int64 [..., W] of states [page numbers, B, D]."""
        if pages.shape[-1] == 1:
            states = states[:, :num_tokens]  # of a page with few tokens no more is read
        return states[pages].flatten(-3, -2)[..., :num_tokens, :]

    @abstractmethod
    def move(self, source: SlotAddress, target: SlotAddress) -> None:
        """Copy tokens; all sources are read before the first target is written."""

    @abstractmethod
    def write_keys(self, pages: torch.Tensor, keys: torch.Tensor) -> None:
        """Replace the keys [..., T, D] of the first T slots; the rest of the last page is undefined afterwards."""

    @abstractmethod
    def write_values(self, pages: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the values, as `write_keys`."""

    def copy_pages(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole pages int64 [..., M], which is quicker than token by token."""
        self.pages[target] = self.pages[source]


class InterleavedLayout(CacheLayout):
    """Key and value side by side in the last axis: every CUDA backend."""

    def keys_at(self, slots: SlotAddress) -> torch.Tensor:
        """See `CacheLayout.keys_at`."""
        return self.pages[..., : self.head_size][slots.page, slots.offset]

    def read_keys(self, pages: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """See `CacheLayout.read_keys`."""
        return self._read(self.pages[..., : self.head_size], pages, num_tokens)

    def read_values(self, pages: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """See `CacheLayout.read_values`."""
        return self._read(self.pages[..., self.head_size :], pages, num_tokens)

    def move(self, source: SlotAddress, target: SlotAddress) -> None:
        """See `CacheLayout.move`."""
        self.pages[target.page, target.offset] = self.pages[source.page, source.offset]

    def write_keys(self, pages: torch.Tensor, keys: torch.Tensor) -> None:
        """See `CacheLayout.write_keys`."""
        split = _split(keys, self.grid.block_size)
        self.pages[..., : self.head_size][pages[..., : split.shape[-3]]] = split

    def write_values(self, pages: torch.Tensor, values: torch.Tensor) -> None:
        """See `CacheLayout.write_values`."""
        split = _split(values, self.grid.block_size)
        self.pages[..., self.head_size :][pages[..., : split.shape[-3]]] = split


class CpuLayout(CacheLayout):
    """Key region transposed, value region plain: vLLM's CPU backend with its `vec` kernels."""

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        """See `CacheLayout`; a page must be contiguous."""
        super().__init__(caches)
        num_pages, block_size, _ = self.pages.shape
        regions = self.pages.view(num_pages, 2, block_size * self.head_size)
        self._keys = regions[:, 0].view(num_pages, self.head_size, block_size)
        self._values = regions[:, 1].view(num_pages, block_size, self.head_size)
        self._channels = self.pages.view(-1, block_size)  # a key region is D of them, a page 2 D
        self._channel = torch.arange(self.head_size, device=self.pages.device)[:, None]

    @property
    def multiplies_in_place(self) -> bool:
        """See `CacheLayout.multiplies_in_place`."""
        return self.pages.dtype == torch.float32

    def products(self, pages: torch.Tensor, num_vectors: int) -> KeyProducts | None:
        """See `CacheLayout.products`."""
        if not self.multiplies_in_place:
            return None
        return KeyProducts(self._channels, pages, self.head_size, num_vectors)

    def keys_at(self, slots: SlotAddress) -> torch.Tensor:
        """See `CacheLayout.keys_at`."""
        return self._keys[slots.page, :, slots.offset]

    def read_keys(self, pages: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """See `CacheLayout.read_keys`; the tokens of a channel lie side by side, as they do in a page."""
        if num_tokens == 1:
            return self._keys[..., 0][pages[..., :1]]
        channels = pages[..., None, :] * (2 * self.head_size) + self._channel  # [..., D, W]
        keys = self._channels.index_select(0, channels.flatten())
        return keys.view(*channels.shape[:-1], -1)[..., :num_tokens].transpose(-1, -2)

    def read_values(self, pages: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """See `CacheLayout.read_values`."""
        return self._read(self._values, pages, num_tokens)

    def move(self, source: SlotAddress, target: SlotAddress) -> None:
        """See `CacheLayout.move`."""
        keys = self._keys[source.page, :, source.offset]
        values = self._values[source.page, source.offset]
        self._keys[target.page, :, target.offset] = keys
        self._values[target.page, target.offset] = values

    def write_keys(self, pages: torch.Tensor, keys: torch.Tensor) -> None:
        """See `CacheLayout.write_keys`."""
        split = _split(keys, self.grid.block_size)
        self._keys[pages[..., : split.shape[-3]]] = split.transpose(-1, -2)

    def write_values(self, pages: torch.Tensor, values: torch.Tensor) -> None:
        """See `CacheLayout.write_values`."""
        split = _split(values, self.grid.block_size)
        self._values[pages[..., : split.shape[-3]]] = split


def _distance(caches: Sequence[torch.Tensor]) -> int:
    """Elements between the caches of neighbouring layers.

    Raises:
        ValueError: it is not the same everywhere.
    """
    first = caches[0]
    if len(caches) == 1:
        return 0
    distance = caches[1].storage_offset() - first.storage_offset()
    alike = all(
        cache.untyped_storage()._cdata == first.untyped_storage()._cdata
        and (cache.shape, cache.stride(), cache.dtype) == (first.shape, first.stride(), first.dtype)
        and cache.storage_offset() == first.storage_offset() + layer * distance
        for layer, cache in enumerate(caches)
    )
    if not alike or distance <= 0:
        raise ValueError(
            "KV eviction needs the caches of all layers at equal distances in one buffer, as vLLM 0.32.0 allocates them"
        )
    return distance


def _split(tokens: torch.Tensor, block_size: int) -> torch.Tensor:
    """[..., T, D] -> [..., W, B, D], zeros after the last token."""
    padded = torch.nn.functional.pad(tokens, (0, 0, 0, -tokens.shape[-2] % block_size))
    return padded.unflatten(-2, (-1, block_size))
