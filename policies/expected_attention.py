"""Expected Attention (Devoto et al., arXiv 2510.00636): attention from future queries, if they are Gaussian."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from policies.adaptive import AdaptiveHeads
from policies.base import Ranking, Signal, Unit, View
from policies.options import check_range


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(AdaptiveHeads):
    """Score S_i = (mean over the group of softmax_i(z) + epsilon) * ||V_i||_2.

    z_i = m.K_i / sqrt(D) + K_i' C K_i / (2 D): m and C are mean and covariance of the prompt's queries before rotation,
    per query head, turned by the average rotation matrix of the next `num_future` positions.

    Source: paper, its closed form; formula as in kvpress, by the same authors. Needs query moments, keys and values;
    costs Q n D^2 per prompt for the covariance, and as much again for the score.

    As in kvpress, the `protect_first` sinks are left out of the moments and of the softmax. One choice per KV head.
    All heads keep equally many tokens, or with `head_adaptive` share their layer's budget as in Ada-KV; so does the
    entry in kvpress's leaderboard, with `epsilon=0.01` (preset `expected_attention_adaptive`). Acts once, when the
    prompt was attended, so C + generated tokens are resident; the moments are those of the whole prompt, hence no
    `prefill=chunked`. Has no `value_weighted`: the norm of the values is part of it. Rotary embeddings that also scale
    (YaRN) are treated as plain ones.

    Attributes:
        num_future: positions averaged over.
        epsilon: floor of the attention, so that the norm of the values decides among tokens that get next to none; 0 in
            kvpress's class, 0.01 in its leaderboard entry (`policy=expected_attention_floor` here). Attention is about
            1 / T, so that 0.01 outweighs it from some hundred tokens on: half of the kept tokens are others.
        use_covariance: False drops the quadratic term.
        protect_first: sinks.
        head_adaptive: budgets of heads by their scores, in whole pages; a layer's total is H C.
        floor, floor_rule: see `AdaptiveHeads`; they matter with `head_adaptive` only.
    """

    name: ClassVar[str] = "expected_attention"
    layers_together: ClassVar[bool] = True
    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.QUERY_MOMENTS, Signal.KEYS, Signal.VALUES})
    per_head: ClassVar[bool] = True
    modes: ClassVar[tuple[str, ...]] = ("after",)

    protect_first: int = 4
    num_future: int = 512
    epsilon: float = 0.0
    use_covariance: bool = True
    head_adaptive: bool = False
    floor_rule: Literal["blend", "minimum"] = "minimum"

    def __post_init__(self) -> None:
        """Check this policy's own options, then the common ones."""
        check_range("policy.options.num_future", self.num_future, 1)
        check_range("policy.options.epsilon", self.epsilon, 0)
        super().__post_init__()

    @property
    def allocation(self) -> Literal["equal", "ragged"]:
        """Ragged with `head_adaptive`."""
        return "ragged" if self.head_adaptive else "equal"

    def split(self, ranking: Ranking) -> torch.Tensor:
        """Pages by each head's part in its layer's best tokens, int64 [L, N, H]."""
        return self.split_heads(ranking)

    @property
    def decode_unit(self) -> Unit:
        """Nothing is evicted while decoding."""
        return Unit.NONE

    def score(self, view: View) -> torch.Tensor:
        """Expected attention times ||V||, float32 [N, H, T]."""
        keys = view.keys.float()
        num_heads, head_size = keys.shape[1], keys.shape[-1]
        rotation = _mean_rotation(view.num_seen, view.inv_freq, self.num_future)
        mean = (rotation @ view.query_mean.transpose(-1, -2)).transpose(-1, -2).unflatten(1, (num_heads, -1))
        logits = mean @ keys.transpose(-1, -2) / head_size**0.5
        if self.use_covariance:
            cov = rotation[:, None] @ view.query_cov @ rotation[:, None].transpose(-1, -2)
            # One member of the group at a time: all at once would hold G float32 copies of the keys.
            members = cov.unflatten(1, (num_heads, -1)).unbind(dim=2)
            quadratic = [((keys @ member) * keys).sum(dim=-1) for member in members]
            logits = logits + torch.stack(quadratic, dim=2) / (2 * head_size)
        sinks = (view.positions < self.protect_first).unsqueeze(2)
        attention = logits.masked_fill(sinks, torch.finfo(logits.dtype).min).softmax(dim=-1).mean(dim=2)
        return (attention + self.epsilon) * view.values.float().norm(dim=-1)


def _mean_rotation(num_seen: torch.Tensor, inv_freq: torch.Tensor, num_future: int) -> torch.Tensor:
    """Mean of the rotary matrices (halves layout) at the `num_future` positions from `num_seen` on: [N, D, D]."""
    positions = num_seen[:, None] + torch.arange(num_future, device=num_seen.device)
    angles = positions[..., None].float() * inv_freq.float()
    cos, sin = (torch.diag_embed(turn.mean(dim=1)) for turn in (angles.cos(), angles.sin()))
    return torch.cat([torch.cat([cos, -sin], dim=-1), torch.cat([sin, cos], dim=-1)], dim=-2)
