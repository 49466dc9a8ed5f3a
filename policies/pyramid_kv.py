"""PyramidKV (Cai et al., arXiv 2406.02069): SnapKV with budgets that fall linearly with depth."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from policies.adaptive import pyramid
from policies.base import Ranking
from policies.options import check_range
from policies.shares import split_by_wishes
from policies.snapkv import SnapKV


@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """SnapKV's scores; beside the window the last layer keeps (C - window) / beta, the first 2 (C - window) less that.

    Source: paper, section 4.2; authors' code (KVCache-Factory): beta 20, in its LongBench script window 8, kernel 7,
    max pooling; a first layer that would keep more than the prompt keeps the prompt, and the slope is flatter. Acts
    once, when the prompt was attended; C + generated tokens are resident on average. Costs what SnapKV costs.

    Deviations: counts are whole pages of `block_size` tokens, and their sum is L H C exactly, where the authors'
    integer steps change it; heads of a layer may differ by a page that is left over. Per KV head, as in `SnapKV`. With
    Ada-KV's heads: `ada_kv` with `beta=20`.

    Attributes:
        beta: steepness; 1 gives all layers the same.
        window, kernel, pooling, group, value_weighted: see `SnapKV`.
    """

    name: ClassVar[str] = "pyramid_kv"
    allocation: ClassVar[Literal["ragged"]] = "ragged"

    window: int = 8
    kernel: int = 7
    pooling: Literal["avg", "max"] = "max"
    beta: float = 20.0

    def __post_init__(self) -> None:
        """Check this policy's own options, then the others."""
        check_range("policy.options.beta", self.beta, 1)
        super().__post_init__()

    def split(self, ranking: Ranking) -> torch.Tensor:
        """Pages by depth, int64 [L, N, H]."""
        wishes = pyramid(ranking, self.window, self.beta).expand_as(ranking.lengths)
        return split_by_wishes(ranking, wishes, over_layers=True)
