"""Cascading KV cache (Willette et al., arXiv 2406.17808): sub-caches that accept ever fewer of the pushed out."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from policies.base import Policy, check_choice
from policies.options import check_range
from policies.views import Signal, View


@dataclass(frozen=True, kw_only=True)
class Cascading(Policy):
    """After the sinks, `num_caches` sub-caches of equal length S, each a queue; older text is kept ever more thinly.

    A new token enters sub-cache 0 and pushes its oldest on to sub-cache 1, which pushes its oldest on, and so on.
    Sub-cache i takes what arrives as a new entry only at every 2^i-th token of the text. At other times the newcomer
    and the newest entry there meet: `choice=position` drops the newcomer, `choice=attention` drops the one that
    received less attention. What the last sub-cache pushes out is gone. While they fill up, all accept.

    Source: paper, section 3; the rule of acceptance from the authors' code (it counts all tokens, not those pushed
    out). Acts after the prompt and at every step; C tokens are resident. Prompts longer than C go through the cascade
    as if they had come token by token. Needs positions only, or the attention sums; costs a few passes over positions.

    Deviations: the default is our position-only variant, which is free; `policy=cascading_authors` is the authors' own.
    They compare an exponential average of attention with beta = 0.9999999; ours is the sum, its
    limit (0.1 % apart for a token that was watched for 10,000 steps). Attention is that of the full prompt with
    `prefill=after`; the authors prefill in strides of 1,024 over the cut cache, which is `prefill=chunked
    prefill_chunk=1024`. Keys keep the rotation of their original position by default.

    Attributes:
        num_caches: sub-caches; 1 is StreamingLLM.
        choice: "position" is free and equal for all layers and heads; "attention" chooses per KV head.
        protect_first: sinks, 64 in the authors' scripts. What does not divide by `num_caches` goes to sub-cache 0.
        position_mode: "original", or "cache" to rotate by place in the cache as the authors do.
    """

    name: ClassVar[str] = "cascading"
    layers_together: ClassVar[bool] = True

    num_caches: int = 4
    choice: Literal["position", "attention"] = "position"
    protect_first: int = 64
    prefill_chunk: int = 1024
    position_mode: Literal["original", "cache"] = "original"

    def __post_init__(self) -> None:
        """Check this policy's own options, then the common ones."""
        check_choice("policy.options.choice", self.choice, ("position", "attention"))
        check_choice("policy.options.position_mode", self.position_mode, ("original", "cache"))
        limit = f"policy.budget={self.budget}"
        check_range("policy.options.protect_first", self.protect_first, 0, self.budget - 1, limit=limit)
        check_range("policy.options.num_caches", self.num_caches, 1, self.budget - self.protect_first, limit=limit)
        super().__post_init__()

    @property
    def signals(self) -> frozenset[Signal]:
        """The attention sums where they choose."""
        return frozenset({Signal.ATTENTION_MASS}) if self.choice == "attention" else frozenset()

    @property
    def per_head(self) -> bool:
        """True with `choice=attention`."""
        return self.choice == "attention"

    @property
    def same_in_all_layers(self) -> bool:
        """True with `choice=position`."""
        return self.choice == "position"

    @property
    def cache_positions(self) -> bool:
        """`position_mode=cache`."""
        return self.position_mode == "cache"

    def score(self, view: View) -> torch.Tensor:
        """1 for sinks and for the token that each entry holds, 0 for the others: float32 [N, H or 1, T]."""
        if view.positions.shape[-1] == self.budget + 1:
            return self._after_one_step(view)
        age_rank = view.positions.argsort(dim=-1).argsort(dim=-1) - self.protect_first
        entry = self._entries(age_rank, view.num_seen[:, None, None])
        if self.choice == "position":
            holds = _largest_in_entry(-age_rank, entry)
        else:
            best = _largest_in_entry(view.attention_mass, entry)
            holds = _largest_in_entry(age_rank.masked_fill(~best, -1 - self.protect_first), entry)
        num_entries = self.budget - self.protect_first
        return ((age_rank < 0) | (holds & (entry < num_entries))).float()

    def _after_one_step(self, view: View) -> torch.Tensor:
        """The same when one token arrived: one leaves where a sub-cache does not accept, 0, and the others stay, 1."""
        _, size, first_size = self._sizes()
        step = view.num_seen[:, None, None] - (self.protect_first + 1)
        most = 2 ** (self.num_caches - 1)
        accepting = (step & -step).clamp_max(most).log2()  # sub-caches behind the first that accept at this step
        newcomer = (self.budget - first_size - accepting * size).long()  # its place by age, behind the newest entry
        order = view.positions.argsort(dim=-1)
        places = newcomer.expand(*order.shape[:-1], 1)
        leaving = order.gather(-1, places)
        if self.choice == "attention":
            rival, mass = order.gather(-1, (places - 1).clamp_min(0)), view.attention_mass
            replaces = (mass.gather(-1, leaving) >= mass.gather(-1, rival)) & (accepting < self.num_caches - 1)
            leaving = torch.where(replaces, rival, leaving)
        return torch.ones(order.shape, device=order.device).scatter_(-1, leaving, 0)

    def _sizes(self) -> tuple[int, int, int]:
        """Entries in all, of a sub-cache, and of sub-cache 0."""
        num_entries = self.budget - self.protect_first
        size = num_entries // self.num_caches
        return num_entries, size, num_entries - (self.num_caches - 1) * size

    def _entries(self, rank: torch.Tensor, num_seen: torch.Tensor) -> torch.Tensor:
        """The entry in which each token ends, by its rank among tokens that are no sinks; C - sinks if in none.

        The first C - sinks tokens fill the caches: the newest lie in sub-cache 0, those before in sub-cache 1. The
        others arrive one a step. Entries of a sub-cache are numbered by the steps at which it accepted: 1 for the
        first, 0 for its newest before that, -1 for the one before. Entry k is pushed out at acceptance k + S.
        """
        num_entries, size, first_size = self._sizes()
        start = num_seen - self.protect_first - (rank.shape[-1] - self.budget)  # step of the first arrival
        last = num_seen - self.protect_first - 1
        age = num_entries - 1 - rank
        level = ((age - first_size).div(size, rounding_mode="floor") + 1).clamp_min(0)
        entry = torch.where(age < first_size, -age, -((age - first_size) % size))
        for i in range(self.num_caches):
            length = size if i else first_size
            moves = (level == i) & (entry <= _multiples(last, start, 2**i) - length)
            pushed_at = (-(-start // 2**i) + entry + length - 1) * 2**i
            entry = torch.where(moves, _multiples(pushed_at, start, 2 ** (i + 1)), entry)
            level = level + moves
        place = _multiples(last, start, 2**level) - entry
        place = torch.where(level > 0, first_size + (level - 1) * size + place, place)
        return place.masked_fill((level >= self.num_caches) | (rank < 0), num_entries)


def _multiples(last: torch.Tensor, start: torch.Tensor, step: torch.Tensor | int) -> torch.Tensor:
    """How many multiples of `step` lie from `start` to `last`, both included."""
    return last // step - (start - 1) // step


def _largest_in_entry(values: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
    """True where no other token of the same entry has a larger value; [N, H, T]."""
    values, entry = torch.broadcast_tensors(values, entry)
    lowest = torch.full_like(values, torch.finfo(values.dtype).min if values.is_floating_point() else -(2**62))
    largest = lowest.scatter_reduce(-1, entry, values, reduce="amax")
    return values == largest.gather(-1, entry)
