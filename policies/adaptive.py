"""Budgets that follow the scores: Ada-KV's between the heads of a layer, PyramidKV's by depth.

Letters as in `policies.base`.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from policies.base import Policy, Ranking, check_choice
from policies.options import check_range
from policies.shares import best_tokens, mean_tokens, split_by_wishes


@dataclass(frozen=True, kw_only=True)
class AdaptiveHeads(Policy):
    """Options of a policy whose heads share a layer's budget by where its best tokens are (Ada-KV).

    Attributes:
        floor: share of the budget that every head gets however its tokens compare.
        floor_rule: "blend" gives `floor` of the mean plus 1 - `floor` of the head's count among the layer's best tokens
            (Ada-KV's authors); "minimum" counts so many best tokens of each head among the layer's best (kvpress).
    """

    floor: float = 0.2
    floor_rule: Literal["blend", "minimum"] = "blend"

    def __post_init__(self) -> None:
        """Check these options, then the others."""
        check_range("policy.options.floor", self.floor, 0, 1)
        check_choice("policy.options.floor_rule", self.floor_rule, ("blend", "minimum"))
        super().__post_init__()

    def wishes(self, ranking: Ranking, means: torch.Tensor | int) -> torch.Tensor:
        """Tokens that each head should keep: float64 [L, N, H].

        Args:
            ranking: the candidates.
            means: tokens that a head keeps on average, one number or float64 [L, 1, 1].
        """
        num_heads = ranking.scores.shape[2]
        if not isinstance(means, torch.Tensor):
            means = torch.full((1, 1, 1), means, dtype=torch.float64, device=ranking.scores.device)
        totals = (means * num_heads).round().long().flatten(1)
        if self.floor_rule == "minimum":
            return best_tokens(ranking, totals, at_least=(self.floor * means).floor()).double()
        return (1 - self.floor) * best_tokens(ranking, totals).double() + self.floor * means

    def split_heads(self, ranking: Ranking) -> torch.Tensor:
        """`Policy.split` where all layers keep equally many tokens."""
        return split_by_wishes(ranking, self.wishes(ranking, mean_tokens(ranking)), over_layers=False)


def pyramid(ranking: Ranking, window: int, beta: float) -> torch.Tensor:
    """Tokens that a head keeps on average by layer, falling linearly with depth: float64 [L, 1, 1].

    Beside the window, the last layer gets 1 / `beta` of the mean, and the first as much more as the last gets less. A
    first layer that would get more than there is keeps everything, and the slope is flatter.
    """
    num_layers, _, _, num_tokens = ranking.scores.shape
    mean = mean_tokens(ranking) - window
    high = min(2 * mean - mean / beta, num_tokens - window)
    low = 2 * mean - high
    depth = torch.arange(num_layers, dtype=torch.float64, device=ranking.scores.device)
    if num_layers == 1:
        depth = depth + 0.5
    return (window + high - (high - low) * depth / max(num_layers - 1, 1)).reshape(-1, 1, 1)
