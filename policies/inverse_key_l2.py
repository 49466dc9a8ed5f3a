"""Inverse key L2 norm (Devoto et al., arXiv 2406.11430; the paper's baseline): keys of low norm draw attention."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from policies.base import Signal, View
from policies.options import Granular


@dataclass(frozen=True, kw_only=True)
class InverseKeyL2(Granular):
    """Score S_i = -||K_i||_2 of each KV head.

    Source: paper and the authors' code (l2compress); the same score as kvpress's Knorm. Rotation keeps the norm, so
    rotated keys serve. Needs keys, no attention. Costs one norm of each resident token per eviction.

    Deviations: the budget is absolute, where the authors keep a share of the context. No layer is skipped, where they
    leave the first two whole: one block table serves all layers, so all layers keep equally many tokens. Evicted tokens
    leave their pages, where the fork of PagedEviction's authors zeroes keys and frees nothing.

    Nothing is protected: sinks stay because their norm is low, and a token can leave in the step that made it.
    `protect_first` and `protect_last` change that.
    """

    name: ClassVar[str] = "inverse_key_l2"
    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.KEYS})
    scores_stay: ClassVar[bool] = True

    def score(self, view: View) -> torch.Tensor:
        """-||K||, float32 [N, H, T]."""
        return -view.keys.float().norm(dim=-1)
