"""A policy's budget: what it may be, how it is written, and when it has no effect."""

import contextlib
import sys
from fractions import Fraction

from harness.errors import UserError

FULL_CACHE_POLICY = "full"


def parse_budget(value: object, name: str = "policy.budget") -> int | float | None:
    """A budget as it is given: a whole number of tokens, or a share of each prompt as 0.25 or "25%".

    Args:
        value: as it was read from a command line, YAML or JSON.
        name: what messages call it.

    Returns:
        int for tokens; float above 0 and up to 1 for a share; None for none.

    Raises:
        ValueError: it is something else.
    """
    if value is None or type(value) is int:
        return value
    share = value
    if isinstance(value, str) and value.endswith("%"):
        with contextlib.suppress(ValueError, ZeroDivisionError):
            share = float(Fraction(value[:-1].strip()) / 100)
    if isinstance(share, float) and is_share(share):
        return share
    raise ValueError(
        f"{name}={value!r} is neither a whole number of tokens nor a share of each prompt, above 0 and up to 1. Use "
        "for example 512, 0.25 or 25%."
    )


def is_share(budget: float | None) -> bool:
    """Whether a budget is a share of each prompt; one token would be less than any block."""
    return budget is not None and 0 < budget <= 1


def budget_text(budget: float | None) -> str:
    """A number of tokens as it is, a share of the prompt in percent, "" for none."""
    if budget is None:
        return ""
    return f"{100 * budget:g} %" if is_share(budget) else f"{budget:g}"


def check_budget(policy: str, budget: float | None, block: int) -> None:
    """Refuse a budget that no policy can keep in whole blocks.

    Raises:
        UserError: less than two blocks, or not a multiple of a block.
    """
    if policy == FULL_CACHE_POLICY or budget is None or isinstance(budget, float):  # the policy itself has a say
        return
    if budget < 2 * block:
        raise UserError(
            f"policy.budget={budget} is less than two blocks of engine.block_size={block}. Use {2 * block} or more."
        )
    if budget % block:
        below = budget // block * block
        raise UserError(
            f"policy.budget={budget} is not a multiple of engine.block_size={block}. Use {below} or {below + block}."
        )


def warn_of_idle_policy(policy: str, budget: float | None, max_model_len: int) -> None:
    """Say so where no prompt of the model can exceed the budget."""
    if budget == 1:
        print(
            f"warning: policy.budget=100% keeps every prompt whole: policy={policy} evicts while decoding, if ever.",
            file=sys.stderr,
        )
    elif budget is not None and budget >= max_model_len:
        print(
            f"warning: policy.budget={budget} holds all of model.max_model_len={max_model_len} tokens: "
            f"policy={policy} never evicts.",
            file=sys.stderr,
        )
