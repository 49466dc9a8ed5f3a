"""What several policies share: granularity of eviction, and protection that a policy sets by its own rule."""

import math
from dataclasses import dataclass
from typing import Literal

from policies.base import Policy, Unit, check_choice


@dataclass(frozen=True, kw_only=True)
class Granular(Policy):
    """A policy that evicts single tokens or, by option, whole blocks.

    In token form every KV head keeps its own tokens, unless the policy sets `per_head`. A block is one page of all
    heads of a layer, so in block form they share one choice, by the mean of their scores and of a block's tokens.

    Attributes:
        granularity: "token", or "block" in prefill and in decode.
    """

    granularity: Literal["token", "block"] = "token"

    def __post_init__(self) -> None:
        """Check the granularity, then the common options."""
        check_choice("policy.options.granularity", self.granularity, ("token", "block"))
        super().__post_init__()

    @property
    def per_head(self) -> bool:
        """True in token form."""
        return self.granularity == "token"

    @property
    def prefill_unit(self) -> Unit:
        """As `granularity` says."""
        return Unit(self.granularity)

    @property
    def decode_unit(self) -> Unit:
        """As `granularity` says."""
        return Unit(self.granularity)


class WholePages:
    """What comes before `Policy` where whole pages leave, in prefill and in decode."""

    @property
    def prefill_unit(self) -> Unit:
        """Whole pages."""
        return Unit.BLOCK

    @property
    def decode_unit(self) -> Unit:
        """Whole pages."""
        return Unit.BLOCK


def keep_last(policy: Policy, num_last: int, option: str) -> None:
    """Set `protect_last` by the policy's own rule, before the common checks.

    Raises:
        ValueError: the user set `protect_last` to something else.
    """
    if policy.protect_last not in (0, num_last):
        raise ValueError(
            f"policy.options.protect_last={policy.protect_last} contradicts policy={policy.name}, which keeps the last "
            f"{num_last} tokens by {option}. Remove it or change {option}."
        )
    object.__setattr__(policy, "protect_last", num_last)


def check_range(option: str, value: float, low: float, high: float = math.inf, limit: str = "") -> None:
    """Raise ValueError unless `low` <= `value` <= `high`; `limit` names the setting that `high` comes from."""
    if value < low:
        raise ValueError(f"{option}={value} is too small. Use {low} or more.")
    if value > high:
        cause, remedy = (f" for {limit}", f", or raise {limit.partition('=')[0]}") if limit else ("", "")
        raise ValueError(f"{option}={value} is too large{cause}. Use {high} or less{remedy}.")
