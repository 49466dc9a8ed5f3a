"""LagKV (Liang et al., arXiv 2504.04704): tokens that stand out against the range of the text that follows them."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from policies.attention import by_position, to_slots
from policies.base import Policy, Signal, Unit, View
from policies.options import check_range, keep_last


@dataclass(frozen=True, kw_only=True)
class LagKV(Policy):
    """Score = softmax over a lag of std_channels((x - min) / (max - min)), for keys plus for values.

    After the `protect_first` sinks the prompt is cut into lags of `lag` tokens; min and max of each channel are those
    of the next lag. Source: paper, its method section; formula as in kvpress. Needs keys and values, no attention;
    costs a few passes over them per prompt.

    The sinks, the last full lag and what follows it (`lag` to 2 lag - 1 tokens) have no lag to compare with and stay.
    Of each other lag equally many tokens stay, as in the paper: the score is the rank within the lag, divided by its
    length. Budget and lag rarely divide, so that the last place in a lag goes to the later lags first, and exactly C
    tokens stay. A budget too small for the unscored tail keeps its most recent part, but the last `lag` always. So at C
    = 256 only 0 to 124 tokens are chosen by score; runs warn where it is less than half of the budget.

    Deviations: one budget in place of a share per lag. Acts once, when the prompt was attended, so C +
    generated tokens are resident; the paper goes on to compress each new lag by its share, which would have no bound.
    For the same reason there is no `prefill=chunked`.

    Attributes:
        lag: tokens a lag.
        protect_first: sinks.
    """

    name: ClassVar[str] = "lagkv"
    layers_together: ClassVar[bool] = True
    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.KEYS, Signal.VALUES})
    per_head: ClassVar[bool] = True
    modes: ClassVar[tuple[str, ...]] = ("after",)

    protect_first: int = 4
    lag: int = 128

    def __post_init__(self) -> None:
        """Check this policy's own options, protect the last lag, then check the common options."""
        num_scored = self.budget - self.protect_first
        check_range("policy.options.lag", self.lag, 2, num_scored, limit=f"policy.budget={self.budget}")
        keep_last(self, self.lag, "policy.options.lag")
        super().__post_init__()

    @property
    def decode_unit(self) -> Unit:
        """Nothing is evicted while decoding."""
        return Unit.NONE

    def score(self, view: View) -> torch.Tensor:
        """Rank within the lag in [0, 1), and 1 for the sinks and the tail; float32 [N, H, T]."""
        num_scored = ((view.keys.shape[2] - self.protect_first) // self.lag - 1) * self.lag
        scores = torch.ones(view.keys.shape[:3], device=view.keys.device)
        if num_scored <= 0:
            return scores
        lags = slice(self.protect_first, self.protect_first + num_scored + self.lag)
        standing = sum(self._standing(states, view.positions, lags) for states in (view.keys, view.values))
        ranks = standing.argsort(dim=-1, stable=True).argsort(dim=-1)
        scores[..., lags.start : lags.stop - self.lag] = ranks.flatten(2) / self.lag
        return to_slots(scores, view.positions.argsort(dim=-1).expand_as(scores))

    def _standing(self, states: torch.Tensor, positions: torch.Tensor, lags: slice) -> torch.Tensor:
        """[N, H, T, D] -> softmax of the spread of each token relative to the next lag, [N, H, lags - 1, lag]."""
        ordered, _ = by_position(states.float().transpose(-1, -2), positions)
        parts = ordered[..., lags].unflatten(-1, (-1, self.lag))
        low, high = parts[..., 1:, :].aminmax(dim=-1, keepdim=True)
        relative = (parts[..., :-1, :] - low) / (high - low).clamp_min(1e-6)
        return relative.std(dim=2).softmax(dim=-1)
