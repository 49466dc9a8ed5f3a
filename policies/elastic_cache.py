"""Elastic Cache (Liu et al., arXiv 2407.18121): anchors, and what is evicted is averaged into the nearest one."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from policies.attention import to_slots
from policies.base import Policy
from policies.options import check_range
from policies.views import Phase, Signal, View


@dataclass(frozen=True, kw_only=True)
class ElasticCache(Policy):
    """Prompt: the tokens with most attention are anchors, and keys and values of the others are merged into them.

    Decode: the token at one fixed place, `distance` before the end of the compressed prompt, leaves at every step, so
    that the anchors before it and the newest text stay.

    Source: paper, section 3, not the authors' code, which compares `argsort(score)` with a count as if it were a rank.
    Importance is the attention summed over all queries, mean over heads: one choice for all heads of a layer, C tokens
    resident. A merged key or value is the mean, in float32, of the anchor's own and those of all tokens to which it
    is the nearest anchor by position, the earlier one if two are equally near; it keeps the anchor's position. Keys
    are averaged as they are cached, rotated by positions that differ, as in the paper. Needs the attention sums; costs
    reading and writing the prompt's keys and values once.

    The paper takes a share of the sequence; `policy.budget=20%` is one of the prompt. Deviations: the code's share
    counts generated tokens too, so that its cache grows and only some steps evict; here C is fixed and every step does.
    The code merges into anchors that scored high, never into the first and last ones; here into the nearest of all.
    Attention goes on being summed while decoding, and is not used there.

    Attributes:
        distance: tokens from the fixed place to the end of the cache, 25 in the paper.
        protect_first: anchors at the start, 4 in the authors' code.
        protect_last: anchors at the end of the prompt.
    """

    name: ClassVar[str] = "elastic_cache"
    layers_together: ClassVar[bool] = True
    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION_MASS})
    rewrite_phases: ClassVar[frozenset[Phase]] = frozenset({Phase.PREFILL_END})
    modes: ClassVar[tuple[str, ...]] = ("after",)

    protect_first: int = 4
    protect_last: int = 1
    distance: int = 25

    def __post_init__(self) -> None:
        """Check this policy's own options, then the common ones."""
        most = self.budget - self.protect_first
        check_range("policy.options.distance", self.distance, 1, most, limit=f"policy.budget={self.budget}")
        super().__post_init__()

    def score(self, view: View) -> torch.Tensor:
        """Prompt: attention received, float32 [N, H, T]. Decode: the place behind the fixed one, [N, 1, T]."""
        if view.phase is not Phase.DECODE:
            return view.attention_mass
        place = view.positions.argsort(dim=-1).argsort(dim=-1) - (self.budget - self.distance)
        return place.where(place >= 0, place.shape[-1])[:, :1].float()

    def rewrite(self, view: View, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values averaged into the nearest anchor."""
        anchor = nearest_kept(view.positions, keep)
        return averaged(view.keys, anchor), averaged(view.values, anchor)


def nearest_kept(positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Slot of the kept token that is nearest to each by position, the earlier of two; int64 [..., T]."""
    num_tokens = positions.shape[-1]
    order = positions.argsort(dim=-1)
    positions, keep = positions.gather(-1, order), keep.gather(-1, order)
    places = torch.arange(num_tokens, device=positions.device).expand_as(positions)
    before = places.where(keep, -1).cummax(dim=-1).values
    after = places.where(keep, num_tokens).flip(-1).cummin(dim=-1).values.flip(-1)
    to_before = positions - positions.gather(-1, before.clamp_min(0))
    to_after = positions.gather(-1, after.clamp_max(num_tokens - 1)) - positions
    is_before = (after == num_tokens) | ((before >= 0) & (to_before <= to_after))
    return to_slots(order.gather(-1, before.where(is_before, after)), order)


def averaged(states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Mean of all states [N, H, T, D] that go to a slot, by int64 [N, H or 1, T]; zero where none does."""
    slots = slots.expand(states.shape[:3])
    sums = torch.zeros(states.shape, dtype=torch.float32, device=states.device)
    sums.scatter_add_(2, slots[..., None].expand_as(states), states.float())
    counts = torch.zeros(slots.shape, dtype=torch.float32, device=states.device)
    counts.scatter_add_(2, slots, torch.ones_like(counts))
    return (sums / counts.clamp_min(1)[..., None]).to(states.dtype)
