"""TOVA (Oren et al., arXiv 2401.06104): keep what the newest query attends to."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from policies.attention import AttentionPolicy
from policies.base import Signal, View
from policies.options import Granular


@dataclass(frozen=True, kw_only=True)
class TOVA(Granular, AttentionPolicy):
    """Score = attention from the newest query, mean over all query heads; all heads of a layer share the choice.

    Source: paper, the section on the policy; authors' code. The last prompt query prunes the prompt to C at once;
    afterwards the token that the newest query attends to least leaves, at every step. Needs the attention of the newest
    query; costs one more query row of attention a step.

    No sink and no recent window, and the newest token itself is a candidate, as in the authors' code (kvpress keeps
    it: `protect_last=1`). With `prefill=chunked` the last query of each chunk prunes.

    Attributes:
        granularity: "block" evicts the block with the lowest mean score; not in the paper.
        value_weighted: VATP, per KV head, before the mean over heads.
    """

    name: ClassVar[str] = "tova"
    layers_together: ClassVar[bool] = True
    attention_signals: ClassVar[frozenset[Signal]] = frozenset({Signal.NEWEST_ATTENTION})
    per_head: ClassVar[bool] = False

    def score(self, view: View) -> torch.Tensor:
        """Attention from the newest query, mean over the group; float32 [N, H, T]."""
        return self.weigh(view.newest_attention.mean(dim=2), view)
