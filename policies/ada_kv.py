"""Ada-KV (Feng et al., arXiv 2407.11550): SnapKV whose heads share a layer's budget by where the best tokens are."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from policies.adaptive import AdaptiveHeads, pyramid
from policies.base import Ranking
from policies.options import check_range
from policies.shares import split_by_wishes
from policies.snapkv import SnapKV


@dataclass(frozen=True, kw_only=True)
class AdaKV(AdaptiveHeads, SnapKV):
    """SnapKV's scores; a head keeps as many tokens as it has among the best H (C - window) of its layer.

    Source: paper, algorithm 1 and section 4; authors' code: window 32, kernel 7, max pooling, and of the budget a share
    `floor` that is given to all heads alike (0.2, as they advise where query heads are grouped). Acts once, when the
    prompt was attended; C + generated tokens are resident on average. Costs what SnapKV costs and one sort of a layer's
    scores.

    Deviations: counts are whole pages of `block_size` tokens, by largest remainder, and sum to H C exactly, where the
    authors round each head's count. One choice per KV head over its group, as their code for grouped heads. Its
    option `normalize`, off in their scripts, is not here.

    Attributes:
        beta: budgets by depth, as `pyramid_kv`'s (Ada-PyramidKV; its authors use 20); 1 gives all layers the same.
        floor, floor_rule: see `AdaptiveHeads`.
        window, kernel, pooling, group, value_weighted: see `SnapKV`.
    """

    name: ClassVar[str] = "ada_kv"
    allocation: ClassVar[Literal["ragged"]] = "ragged"

    kernel: int = 7
    pooling: Literal["avg", "max"] = "max"
    beta: float = 1.0

    def __post_init__(self) -> None:
        """Check this policy's own options, then the others."""
        check_range("policy.options.beta", self.beta, 1)
        super().__post_init__()

    def split(self, ranking: Ranking) -> torch.Tensor:
        """Pages by each head's part in its layer's best tokens, int64 [L, N, H]."""
        if self.beta == 1:
            return self.split_heads(ranking)
        wishes = self.wishes(ranking, pyramid(ranking, self.window, self.beta))
        return split_by_wishes(ranking, wishes, over_layers=True)
