"""Directions of keys, kept beside the cache for policies that compare each key with the mean direction.

A key never changes, and one token comes and one goes in a step: its length is computed once, and the sum over all
tokens follows by addition and subtraction. That saves reading the keys where products with them do without
(`key_products.py`); where they are read anyhow, both are computed anew, which takes fewer kernels.

Letters: L layers, l of them at once, N requests, H KV heads, T resident tokens, D head size.
"""

from collections.abc import Sequence

import torch

from harness.engines.vllm.groups import Part
from harness.engines.vllm.layout import CacheLayout
from harness.engines.vllm.paged import PagedValues, SlotAddress, split_slots, take
from policies.views import inverse_norms

SUM_TYPE = torch.float64  # holds sums of float32 numbers that come and go, without drift


class KeyDirections:
    """1 / ||K|| of every slot, and of each request the sum of K / ||K|| over its resident tokens."""

    def __init__(self, layout: CacheLayout) -> None:
        grid = layout.grid
        self._layout = layout
        self.inverse = PagedValues(
            grid.num_layers, grid.num_blocks, grid.num_heads, grid.block_size, torch.float32, grid.device
        )
        self._known: dict[str, tuple[int, torch.Tensor]] = {}  # tokens in the sum [L, H, D]
        self._sums = torch.empty(0)

    def num_known(self, request_id: str) -> int:
        """Leading tokens of the request that are in its sum."""
        return self._known[request_id][0] if request_id in self._known else 0

    def begin(self, request_ids: Sequence[str]) -> None:
        """Take up the sums of requests that all have the same number of known tokens."""
        grid = self._layout.grid
        if self.num_known(request_ids[0]):
            self._sums = torch.stack([self._known[request_id][1] for request_id in request_ids], dim=1)
        else:
            shape = (grid.num_layers, len(request_ids), grid.num_heads, self._layout.head_size)
            self._sums = torch.zeros(shape, dtype=SUM_TYPE, device=grid.device)

    def add_new(self, part: Part, num_known: int) -> None:
        """Add the tokens behind the first `num_known` of these requests and layers."""
        block_size, num_tokens = self.inverse.grid.block_size, part.group.alike.num_before
        first = num_known // block_size
        pages = part.pages(self._layout.grid)[..., first:]
        keys = self._layout.read_keys(pages, num_tokens - first * block_size).float()
        inverse = inverse_norms(keys)
        self.inverse.store(part.pages(self.inverse.grid)[..., first:], inverse)
        new = slice(num_known - first * block_size, None)
        self._sums[part.layers] += (inverse[..., None, new] @ keys[..., new, :]).squeeze(-2)

    def fields(self, part: Part, layers: slice) -> dict[str, torch.Tensor]:
        """What a `View` shows, of some of the part's layers: [l, N, H, T] and [l, N, H, D]."""
        absolute = slice(part.layers.start + layers.start, part.layers.start + layers.stop)
        pages = part.pages(self.inverse.grid)[layers]
        return {
            "inverse_norms": self.inverse.read(pages, part.group.alike.num_before),
            "direction_sum": self._sums[absolute].float(),
        }

    def drop(self, part: Part, leaving: torch.Tensor) -> None:
        """Subtract the tokens in slots int64 [l, N, H, 1], before others are moved there."""
        columns, offsets = split_slots(leaving, self.inverse.grid.block_size)
        keys, inverse = (
            holder(SlotAddress(take(part.pages(grid), columns), offsets))
            for holder, grid in ((self._layout.keys_at, self._layout.grid), (self.inverse.at, self.inverse.grid))
        )
        self._sums[part.layers] -= (keys.float() * inverse[..., None]).squeeze(-2)

    def end(self, request_ids: Sequence[str], num_keep: int) -> None:
        """The sums are those of the first `num_keep` tokens, which were kept."""
        for request_id, total in zip(request_ids, self._sums.unbind(dim=1), strict=True):
            self._known[request_id] = (num_keep, total)

    def forget(self, request_id: str) -> None:
        """The sum is no longer that of the request's tokens."""
        self._known.pop(request_id, None)
