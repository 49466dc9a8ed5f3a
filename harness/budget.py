"""A policy's budget: what it may be, and when it has no effect."""

import sys

from harness.errors import UserError

FULL_CACHE_POLICY = "full"


def check_budget(policy: str, budget: int | None, block: int) -> None:
    """Refuse a budget that no policy can keep in whole blocks.

    Raises:
        UserError: less than two blocks, or not a multiple of a block.
    """
    if policy == FULL_CACHE_POLICY or budget is None:  # the policy itself says whether it needs one
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


def warn_of_idle_policy(policy: str, budget: int | None, max_model_len: int) -> None:
    """Say so where no prompt of the model can exceed the budget."""
    if budget is not None and budget >= max_model_len:
        print(
            f"warning: policy.budget={budget} holds all of model.max_model_len={max_model_len} tokens: "
            f"policy={policy} never evicts.",
            file=sys.stderr,
        )
