"""Whether a policy did what it was there for."""

import sys
from collections.abc import Sequence

from harness.budget import budget_text
from harness.config import PolicyConfig
from harness.errors import UserError
from harness.metrics import is_full_cache_answer, over_budget, with_least_budget
from harness.store.predictions import Prediction


def check_evictions(policy: PolicyConfig, block_size: int, predictions: Sequence[Prediction]) -> None:
    """Refuse a run in which the policy had to act and never did; warn where it had nothing to do.

    Raises:
        UserError: the policy had to evict from prompts and nothing was evicted.
    """
    if policy.budget is None or not _evicts(policy.name):
        return
    budget = budget_text(policy.budget)
    if least := with_least_budget(policy.budget, block_size, predictions):
        _warn(
            f"policy.budget={budget} of {len(least)} of {len(predictions)} prompts is less than policy={policy.name} "
            f"can work with: these keep {min(p.budget_tokens for p in least)} tokens."
        )
    over = over_budget(policy.budget, predictions)
    untouched = [p.sample_id for p in over if p.num_evictions == 0 and p.num_output_tokens > 1]
    if over and (num_uncompressed := sum(is_full_cache_answer(policy.options, p) for p in over)):
        _warn(
            f"{num_uncompressed} of {len(over)} answers to prompts that policy={policy.name} cuts have one token or "
            "none: as the first token sees the whole prompt, they are those of the full cache."
        )
    if not any(p.num_evictions for p in predictions):
        if untouched:
            raise UserError(
                f"policy={policy.name} with policy.budget={budget} evicted nothing, although it had to from "
                f"{len(over)} of {len(predictions)} prompts: these are results of a full cache. The run is marked "
                f"failed; after mending the policy or the engine plugin run it again with overwrite=true."
            )
        if not over:
            _warn(f"no prompt is long enough for policy={policy.name} with policy.budget={budget} to evict anything.")
    elif untouched:
        _warn(
            f"{len(untouched)} of {len(over)} prompts that policy={policy.name} has to cut were not evicted from, for "
            f"example {untouched[0]}."
        )


def _evicts(name: str) -> bool:
    from harness.engines.kvpress.presses import PREFIX  # imports torch, before which the environment is to be set
    from policies.registry import policy_class

    return name.startswith(PREFIX) or policy_class(name).evicts


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
