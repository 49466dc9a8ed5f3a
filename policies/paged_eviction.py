"""PagedEviction (Chitty-Venkata et al., arXiv 2509.04377): whole pages leave, by the ratio of value to key norm."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from policies.base import Policy, Signal, Unit, View, check_choice


@dataclass(frozen=True, kw_only=True)
class PagedEviction(Policy):
    """Score S_i = ||V_i||_2 / ||K_i||_2; prune the prompt to C tokens, then evict one page whenever the newest fills.

    Source: paper, section 4 (score; prefill before paging; one page per B generated tokens); motivation of the key
    norm: Devoto et al. 2024. Needs keys and values, no attention. Costs one norm of each resident token per eviction.

    What the paper leaves open, and what we do: the score of a token is the mean over KV heads of the per-head ratios,
    the score of a page the mean of its tokens; each layer decides for itself; the prompt is attended in full before it
    is pruned; the resident length triggers decode eviction (the logical one drifts out of phase with the pages unless
    the prompt length is a multiple of B); the newest page is never a candidate.

    Attributes:
        decode_scope: "layer", or "global" for one choice by the layer-averaged score, as in the authors' vLLM fork.
        protect_first, protect_last: 0 is the paper; both published code bases protect the first and the last page.
            Attention sinks have small values, so the score alone drops them, and a small model's text falls apart.
        eps: added to the key norm.
    """

    name: ClassVar[str] = "paged_eviction"
    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.KEYS, Signal.VALUES})
    scores_stay: ClassVar[bool] = True

    decode_scope: Literal["layer", "global"] = "layer"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        """Check this policy's own options, then the common ones."""
        check_choice("policy.options.decode_scope", self.decode_scope, ("layer", "global"))
        super().__post_init__()

    @property
    def decode_unit(self) -> Unit:
        """One page each time."""
        return Unit.BLOCK

    @property
    def shared_by_layers(self) -> bool:
        """`decode_scope=global`."""
        return self.decode_scope == "global"

    def score(self, view: View) -> torch.Tensor:
        """||V|| / (||K|| + eps), float32 [N, H, T]."""
        return view.values.float().norm(dim=-1) / (view.keys.float().norm(dim=-1) + self.eps)
