"""Small ragged policies whose shares are easy to foresee, and a place to register them for a test."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from policies import registry
from policies.base import Ranking, View
from policies.h2o import H2O
from policies.paged_eviction import PagedEviction
from policies.random import Random
from policies.shares import split_by_wishes
from policies.snapkv import SnapKV


class EqualShares:
    """Every layer and head keeps the mean."""

    allocation: ClassVar[Literal["ragged"]] = "ragged"
    per_head: ClassVar[bool] = True

    def split(self, ranking: Ranking) -> torch.Tensor:
        """See `Policy.split`."""
        return torch.full_like(ranking.lengths, ranking.mean_pages)


class RandomShares:
    """Shares that differ from request to request and eviction to eviction, over all layers and heads."""

    allocation: ClassVar[Literal["ragged"]] = "ragged"
    per_head: ClassVar[bool] = True

    def split(self, ranking: Ranking) -> torch.Tensor:
        """See `Policy.split`."""
        rows = torch.arange(ranking.lengths.shape[0] * ranking.lengths.shape[2]).view(-1, 1, ranking.lengths.shape[2])
        noise = ((rows + 1) * 7919 + ranking.num_seen[:, None] * 104729) % 1009 / 1009
        wishes = noise.double() ** 2 * 3 * ranking.mean_pages * ranking.block_size
        return split_by_wishes(ranking, wishes, over_layers=True)


@dataclass(frozen=True, kw_only=True)
class EqualSnapKV(EqualShares, SnapKV):
    """SnapKV through the ragged path."""

    name: ClassVar[str] = "equal_snapkv"


@dataclass(frozen=True, kw_only=True)
class EqualH2O(EqualShares, H2O):
    """H2O through the ragged path: attention mass follows the pages."""

    name: ClassVar[str] = "equal_h2o"


@dataclass(frozen=True, kw_only=True)
class EqualRandom(EqualShares, Random):
    """Random tokens through the ragged path."""

    name: ClassVar[str] = "equal_random"


@dataclass(frozen=True, kw_only=True)
class RaggedSnapKV(RandomShares, SnapKV):
    """SnapKV's tokens, random shares, evicts after the prompt."""

    name: ClassVar[str] = "ragged_snapkv"


@dataclass(frozen=True, kw_only=True)
class RaggedRandom(RandomShares, Random):
    """Random tokens and shares, again and again; each head draws its own."""

    name: ClassVar[str] = "ragged_random"

    def score(self, view: View) -> torch.Tensor:
        """A hash of layer and position, float32 [N, H, T]."""
        return ((view.positions * 7919 + view.layer * 104729) % 10007).float()


@dataclass(frozen=True, kw_only=True)
class RaggedPaged(RandomShares, PagedEviction):
    """Value over key norm, kept beside the cache; a page a layer and head leaves, on average, while decoding."""

    name: ClassVar[str] = "ragged_paged"


@dataclass(frozen=True, kw_only=True)
class RaggedH2O(RandomShares, H2O):
    """Attention mass and random shares."""

    name: ClassVar[str] = "ragged_h2o"


POLICIES = [EqualSnapKV, EqualH2O, EqualRandom, RaggedSnapKV, RaggedRandom, RaggedPaged, RaggedH2O]


@contextmanager
def registered() -> Iterator[None]:
    """Inside, these policies can be named."""
    before = dict(registry.BUILT_IN)
    registry.BUILT_IN.update({cls.name: f"{__name__}:{cls.__name__}" for cls in POLICIES})
    try:
        yield
    finally:
        registry.BUILT_IN.clear()
        registry.BUILT_IN.update(before)
