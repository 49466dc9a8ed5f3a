"""What a run's policy means to keep of each prompt."""

from collections.abc import Callable
from dataclasses import dataclass

from harness.budget import is_share
from harness.config import HarnessConfig
from harness.engines.kvpress.presses import PREFIX
from policies import Phase, Policy, build_policy
from policies.prompt_share import for_model, tokens_of_share


@dataclass(frozen=True)
class PromptPlan:
    """Tokens of one prompt, per layer and KV head, on average where these keep unequally many.

    Attributes:
        budget_tokens: `policy.budget`, in tokens where it is a share.
        planned_tokens: those that are left once the prompt was evicted from.
    """

    budget_tokens: int
    planned_tokens: int


def configured_policy(config: HarnessConfig) -> Policy:
    """The policy of a run.

    Raises:
        ValueError: see `policies.build_policy`.
    """
    policy, block_size = config.policy, config.engine.block_size or 0
    return build_policy(policy.name, budget=policy.budget, block_size=block_size, options=policy.options)


def prompt_plans(config: HarnessConfig) -> Callable[[int], PromptPlan] | None:
    """Length of a prompt -> what is planned for it; None for a policy without a budget.

    The policy is asked, and not the budget: where some heads keep everything, a prompt that is longer may stay whole. A
    press keeps its budget.
    """
    budget, block_size = config.policy.budget, config.engine.block_size or 0
    if budget is None:
        return None
    if config.policy.name.startswith(PREFIX):

        def of_press(num_tokens: int) -> PromptPlan:
            tokens = tokens_of_share(budget, num_tokens, block_size) if is_share(budget) else budget
            return PromptPlan(tokens, min(num_tokens, tokens))

        return of_press
    policy = for_model(configured_policy(config), config.model.num_layers, config.model.num_kv_heads)

    def of_policy(num_tokens: int) -> PromptPlan:
        own = policy.for_prompt(num_tokens)
        return PromptPlan(own.budget, own.plan(Phase.PREFILL_END, num_tokens, num_tokens))

    return of_policy
