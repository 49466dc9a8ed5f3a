"""What the scheduler tells the workers about evictions, once a step."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from policies import Phase, Policy, Unit

MOST_ANSWERS = 1 << 16


class Eviction(NamedTuple):
    """One request's eviction: of `num_before` resident tokens `num_keep` stay.

    Attributes:
        num_seen: tokens computed so far, evicted ones included (the next position).
        spare_block: the block after those of its tokens stays too: the next token will need it at once.
        copies: block ids that take the place of others, by index. What the others hold is copied first; they are
            shared, or remembered for a prefix, and may not be rewritten.
        budget: of the policy that decides; requests have their own where it is a share of their prompts.
    """

    phase: Phase
    num_before: int
    num_keep: int
    num_seen: int
    spare_block: bool = False
    copies: dict[int, int] | None = None
    budget: int = 0


@dataclass(frozen=True)
class StepPlan:
    """Travels with the scheduler output; the workers carry it out before they write anything new.

    Attributes:
        evictions: request id -> eviction to perform before this step.
        num_evicted: request id -> tokens evicted so far, this step's evictions included; requests without any are
            left out.
        prefilling: requests that attend prompt tokens in this step (after a preemption: their output so far, too);
            where only prompts are watched, those alone that will be evicted from.
    """

    evictions: dict[str, Eviction] = field(default_factory=dict)
    num_evicted: dict[str, int] = field(default_factory=dict)
    prefilling: frozenset[str] = frozenset()


def most_after_eviction(policy: Policy, num_seen: int) -> int:
    """The most tokens that an eviction leaves of a request that saw at most `num_seen`."""
    return num_seen if policy.measured else max(policy.budget, policy.plan(Phase.PREFILL_END, num_seen, num_seen))


def peak_resident_tokens(policy: Policy, num_prefill: int, num_prompt: int, num_total: int) -> int:
    """The most tokens of one request and layer that are resident at once.

    Args:
        policy: decides what stays.
        num_prefill: tokens still to be attended as a prompt, 0 once that is done.
        num_prompt: tokens of the prompt (and output so far).
        num_total: the most tokens that the request can reach.
    """
    if not policy.evicts:
        return num_total
    prefill = num_prefill
    if policy.prefill == "chunked":
        prefill = min(num_prefill, most_after_eviction(policy, num_prefill) + policy.prefill_chunk)
    after_prefill = num_prompt if policy.measured else policy.plan(Phase.PREFILL_END, num_prompt)
    growth = num_total - num_prompt
    if policy.decode_unit is Unit.NONE:
        return max(prefill, after_prefill + growth)
    most, slack = most_after_eviction(policy, num_total), 1
    if policy.decode_unit is Unit.BLOCK:  # whole blocks stay while decoding, where a prompt may end within one
        most, slack = -(-most // policy.block_size) * policy.block_size, policy.block_size
    return max(prefill, min(after_prefill + growth, most + slack))


def plan_of_lengths(policy: Policy) -> Callable[[int, Phase, int, int], int]:
    """`Policy.plan` for a budget, asked for every request in every step.

    Answers are remembered where they follow from resident tokens alone.
    """

    def plan(budget: int, phase: Phase, *lengths: int) -> int:
        return policy.for_budget(budget).plan(phase, *lengths)

    if policy.by_page:
        return plan
    known = functools.lru_cache(MOST_ANSWERS)(plan)
    return lambda budget, phase, num_resident, num_seen: known(budget, phase, num_resident)
