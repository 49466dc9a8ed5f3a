"""PagedEviction (Chitty-Venkata et al., arXiv 2509.04377): whole pages leave, by the ratio of value to key norm."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.linalg import vector_norm

from policies.base import Policy, Signal, Unit, View, check_choice
from policies.options import check_range


@dataclass(frozen=True, kw_only=True)
class PagedEviction(Policy):
    """Score S_i = ||V_i||_2 / ||K_i||_2; prune the prompt to C tokens, then evict one page whenever the newest fills.

    Source: paper, section 4 (score; prefill before paging; one page per B generated tokens); motivation of the key
    norm: Devoto et al. 2024. Needs keys and values, no attention. Costs one norm of each resident token per eviction.

    The first and the last page stay, as in both code bases that the authors published; the text of the paper protects
    nothing, which is `paged_eviction_literal`. Attention sinks have small values, so that the score alone drops them,
    and a small model's text falls apart. What the two pages are:

    * first page: the tokens at positions below B. In decode it is the page that holds them, since a pruned prompt is
      paged in order.
    * last page, prefill: the B newest tokens. They are the last page once the prompt is pruned, because C is a multiple
      of B. Both code bases cut the last page from the unpruned prompt: the Hugging Face code protects its last page,
      full or partial, which is part of ours; the vLLM fork the last full page and the partial one, of which ours is
      part, and it keeps C + (L mod B) tokens, where ours keeps C.
    * last page, decode: the page that just filled, never a candidate in any form.

    What the paper leaves open besides, and what we do: the score of a token is the mean over KV heads of the per-head
    ratios, the score of a page the mean of its tokens; each layer decides for itself; the prompt is attended in full
    before it is pruned; the resident length triggers decode eviction (the logical one drifts out of phase with the
    pages unless the prompt length is a multiple of B).

    Attributes:
        protect_first_pages, protect_last_pages: pages of B tokens that stay; raise `protect_first`, `protect_last`.
        decode_scope: "layer", or "global" for one choice by the layer-averaged score, as in the authors' vLLM fork.
        eps: added to the key norm.
    """

    name: ClassVar[str] = "paged_eviction"
    layers_together: ClassVar[bool] = True
    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.KEYS, Signal.VALUES})
    scores_stay: ClassVar[bool] = True

    protect_first_pages: int = 1
    protect_last_pages: int = 1
    decode_scope: Literal["layer", "global"] = "layer"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        """Check this policy's own options, turn pages into tokens, then check the common options."""
        check_choice("policy.options.decode_scope", self.decode_scope, ("layer", "global"))
        for end in ("protect_first", "protect_last"):
            num_pages = getattr(self, f"{end}_pages")
            check_range(f"policy.options.{end}_pages", num_pages, 0)
            object.__setattr__(self, end, max(getattr(self, end), num_pages * self.block_size))
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
        key_norms, value_norms = (vector_norm(x, dim=-1, dtype=torch.float32) for x in (view.keys, view.values))
        return value_norms / (key_norms + self.eps)


@dataclass(frozen=True, kw_only=True)
class PagedEvictionLiteral(PagedEviction):
    """PagedEviction as the paper's text has it: no page is protected but the newest one in decode.

    No published code runs this form. On small models it is hardly better than random eviction, for the reason above.
    """

    name: ClassVar[str] = "paged_eviction_literal"

    protect_first_pages: int = 0
    protect_last_pages: int = 0
