"""H2O (Zhang et al., arXiv 2306.14048): heavy hitters, by accumulated attention, and a recent window."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from policies.attention import AttentionPolicy
from policies.base import Signal, View
from policies.options import Granular, check_range, keep_last


@dataclass(frozen=True, kw_only=True)
class H2O(Granular, AttentionPolicy):
    """Score S_i = sum over all queries t >= i so far of softmax attention a_ti; half the budget for the highest S.

    Source: paper, section 4 (algorithm 1); the other half is the most recent tokens, as in the authors' code. Prompt
    and every decode step count; an evicted token loses its sum, and one token leaves after each step, so that C tokens
    are resident. Needs the attention column sums, which an observer computes beside the kernel: about one more
    attention pass over the prompt, and one query row a step.

    Budgets of the authors' simulation are shares of the prompt: `policy.budget=20%`. Deviations: one choice per KV
    head: the sum over its group of query heads (the authors have no grouped heads). Sums are not divided by the number
    of queries that saw the token (kvpress, OpenVINO do): the bias to early tokens is the method's own. With
    `prefill=chunked` a token's sum holds the queries of the chunks during which it was resident.

    Attributes:
        heavy_ratio: share of the budget for heavy hitters; the rest protects the most recent tokens.
        granularity: "block" evicts whole blocks by the mean sum of their tokens, one choice for all heads of a layer.
        value_weighted: VATP; its authors also set protect_first=20.
    """

    name: ClassVar[str] = "h2o"
    layers_together: ClassVar[bool] = True
    attention_signals: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION_MASS})

    heavy_ratio: float = 0.5

    def __post_init__(self) -> None:
        """Turn the ratio into protection of recent tokens, then check the common options."""
        check_range("policy.options.heavy_ratio", self.heavy_ratio, 0, 1)
        num_heavy = round(self.budget * self.heavy_ratio)
        if self.granularity == "block" and num_heavy < self.block_size:
            raise ValueError(
                f"policy.options.heavy_ratio={self.heavy_ratio} leaves {num_heavy} heavy hitters, less than one block "
                f"of {self.block_size}. Use {self.block_size / self.budget} or more, or granularity=token."
            )
        keep_last(self, self.budget - num_heavy, "policy.options.heavy_ratio")
        super().__post_init__()

    def score(self, view: View) -> torch.Tensor:
        """The accumulated attention, float32 [N, H, T]."""
        return self.weigh(view.attention_mass, view)
