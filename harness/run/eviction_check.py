"""Whether a policy did what it was there for."""

import sys
from collections.abc import Sequence

from harness.config import PolicyConfig
from harness.errors import UserError
from harness.metrics import is_full_cache_answer, over_budget
from harness.store.predictions import Prediction
from policies.registry import policy_class


def check_evictions(policy: PolicyConfig, predictions: Sequence[Prediction]) -> None:
    """Refuse a run in which the policy had to act and never did; warn where it had nothing to do.

    Raises:
        UserError: prompts exceed the budget and nothing was evicted.
    """
    if policy.budget is None or not policy_class(policy.name).evicts:
        return
    over = over_budget(policy.budget, predictions)
    untouched = [p.sample_id for p in over if p.num_evictions == 0 and p.num_output_tokens > 1]
    if over and (num_uncompressed := sum(is_full_cache_answer(policy.options, p) for p in over)):
        _warn(
            f"{num_uncompressed} of {len(over)} answers to prompts longer than policy.budget={policy.budget} have one "
            "token or none: as the first token sees the whole prompt, they are those of the full cache."
        )
    if not any(p.num_evictions for p in predictions):
        if untouched:
            raise UserError(
                f"policy={policy.name} with policy.budget={policy.budget} evicted nothing, although {len(over)} of "
                f"{len(predictions)} prompts are longer: these are results of a full cache. The run is marked failed; "
                f"after mending the policy or the engine plugin run it again with overwrite=true."
            )
        if not over:
            _warn(f"no prompt is longer than policy.budget={policy.budget}: policy={policy.name} was never active.")
    elif untouched:
        _warn(
            f"{len(untouched)} of {len(over)} prompts longer than policy.budget={policy.budget} were not evicted from, "
            f"for example {untouched[0]}."
        )


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
