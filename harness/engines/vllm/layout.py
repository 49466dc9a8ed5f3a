"""Reading and moving tokens in vLLM's paged KV cache, whatever its memory layout.

vLLM 0.32 hands every attention layer one tensor of the logical shape [num_blocks, H, B, 2 D]. On CUDA the last axis
holds the key and then the value of a token (only strides differ between backends). The CPU backend reads the same
memory as [num_blocks, H, 2 B, D] and cuts it in two: a key region, which its kernels want transposed ([D, B]), and a
value region ([B, D]).

Letters: N requests, H KV heads, T tokens, M moves, B slots a block, D head size.
"""

from typing import Protocol

import torch

from harness.engines.vllm.paged import SlotAddress


class CacheLayout(Protocol):
    """One layer's cache as tokens."""

    num_heads: int
    block_size: int

    def read(self, block_table: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [N, H, T, D] of the first `num_tokens` slots of each request."""
        ...

    def move(self, source: SlotAddress, target: SlotAddress) -> None:
        """Copy tokens; all sources are read before the first target is written."""
        ...

    def copy_blocks(self, source: SlotAddress, target: SlotAddress) -> None:
        """Copy the whole blocks in which these slots lie, which is quicker than token by token."""
        ...

    def write_keys(self, block_table: torch.Tensor, keys: torch.Tensor) -> None:
        """Replace the keys [N, H, T, D] of the first T slots; the rest of the last block is undefined afterwards."""
        ...


class InterleavedLayout:
    """Key and value side by side in the last axis: every CUDA backend."""

    def __init__(self, kv_cache: torch.Tensor) -> None:
        """`kv_cache`: [num_blocks, H, B, 2 D], any strides."""
        self._cache = kv_cache
        _, self.num_heads, self.block_size, _ = kv_cache.shape
        self._heads = torch.arange(self.num_heads, device=kv_cache.device)[:, None]

    def read(self, block_table: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CacheLayout.read`."""
        tokens = self._cache[block_table[:, None], self._heads].flatten(2, 3)[:, :, :num_tokens]
        return tokens.chunk(2, dim=-1)

    def move(self, source: SlotAddress, target: SlotAddress) -> None:
        """See `CacheLayout.move`."""
        moved = self._cache[source.block, source.head, source.offset]
        self._cache[target.block, target.head, target.offset] = moved

    def copy_blocks(self, source: SlotAddress, target: SlotAddress) -> None:
        """See `CacheLayout.copy_blocks`."""
        self._cache[target.block, target.head] = self._cache[source.block, source.head]

    def write_keys(self, block_table: torch.Tensor, keys: torch.Tensor) -> None:
        """See `CacheLayout.write_keys`."""
        pages = _pages(keys, self.block_size)
        self._cache[..., : keys.shape[-1]][block_table[:, : pages.shape[1]]] = pages


class CpuLayout:
    """Key region transposed, value region plain: vLLM's CPU backend with its `vec` kernels."""

    def __init__(self, kv_cache: torch.Tensor) -> None:
        """`kv_cache`: [num_blocks, H, B, 2 D], contiguous."""
        num_blocks, self.num_heads, self.block_size, width = kv_cache.shape
        head_size = width // 2
        regions = kv_cache.view(num_blocks, self.num_heads, 2, self.block_size * head_size)
        self._keys = regions[:, :, 0].view(num_blocks, self.num_heads, head_size, self.block_size)
        self._values = regions[:, :, 1].view(num_blocks, self.num_heads, self.block_size, head_size)
        self._blocks = kv_cache

    def read(self, block_table: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CacheLayout.read`."""
        keys = self._keys[block_table].permute(0, 2, 1, 4, 3).flatten(2, 3)
        values = self._values[block_table].transpose(1, 2).flatten(2, 3)
        return keys[:, :, :num_tokens], values[:, :, :num_tokens]

    def move(self, source: SlotAddress, target: SlotAddress) -> None:
        """See `CacheLayout.move`."""
        keys = self._keys[source.block, source.head, :, source.offset]
        values = self._values[source.block, source.head, source.offset]
        self._keys[target.block, target.head, :, target.offset] = keys
        self._values[target.block, target.head, target.offset] = values

    def copy_blocks(self, source: SlotAddress, target: SlotAddress) -> None:
        """See `CacheLayout.copy_blocks`."""
        self._blocks[target.block, target.head] = self._blocks[source.block, source.head]

    def write_keys(self, block_table: torch.Tensor, keys: torch.Tensor) -> None:
        """See `CacheLayout.write_keys`."""
        pages = _pages(keys, self.block_size)
        self._keys[block_table[:, : pages.shape[1]]] = pages.transpose(-1, -2)


def _pages(tokens: torch.Tensor, block_size: int) -> torch.Tensor:
    """[N, H, T, D] -> [N, blocks, H, B, D], zeros after the last token."""
    padded = torch.nn.functional.pad(tokens, (0, 0, 0, -tokens.shape[2] % block_size))
    return padded.unflatten(2, (-1, block_size)).transpose(1, 2)
