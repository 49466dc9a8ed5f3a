"""What the scheduler tells the workers about evictions, once a step."""

from dataclasses import dataclass, field

from policies import Phase


@dataclass(frozen=True)
class Eviction:
    """One request's eviction: of `num_before` resident tokens `num_keep` stay.

    Attributes:
        num_seen: tokens computed so far, evicted ones included (the next position).
    """

    phase: Phase
    num_before: int
    num_keep: int
    num_seen: int


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
