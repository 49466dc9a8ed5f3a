"""A budget that is a share of each prompt, as kvpress's compression ratio and the paper of H2O have it.

The share s of a prompt of n tokens is C = B * ceil(s * n / B) tokens: whole blocks, as memory is given in blocks, and
never less than was asked for. C is not less than the policy's own least budget either: two blocks, and what its window
or its protected tokens need. C stays that of the prompt while the answer grows.

kvpress keeps int(n * (1 - ratio)) tokens of a prompt: at most a block less than C with s = 1 - ratio.
"""

import functools
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policies.base import Policy

LEAST_BLOCKS = 2
MOST_BLOCKS = 1 << 16  # of a policy that is asked only what does not depend on its budget


def tokens_of_share(share: float, num_prompt_tokens: int, block_size: int) -> int:
    """Tokens in the fewest whole blocks that hold this share of a prompt, two at least.

    The share is taken as it is written: 0.07 of 100 tokens are 7, whatever the product of the floats is.
    """
    num_blocks = -(-Fraction(str(share)) * num_prompt_tokens // block_size)
    return max(LEAST_BLOCKS, int(num_blocks)) * block_size


@dataclass(frozen=True)
class PromptShare:
    """Makes the policy of each prompt.

    Attributes:
        share: above 0, up to 1.
        block_size: B.
        build: tokens -> policy; ValueError where its options need more.
        least: tokens, the smallest budget that the policy's options allow.
    """

    share: float
    block_size: int
    build: Callable[[int], "Policy"]
    least: int = field(init=False)

    def __post_init__(self) -> None:
        """Find the smallest budget.

        Raises:
            ValueError: no budget will do.
        """
        object.__setattr__(self, "build", functools.cache(self.build))
        object.__setattr__(self, "least", self._least())

    def policy(self, num_prompt_tokens: int) -> "Policy":
        """The policy for a prompt of so many tokens."""
        return self.build(max(self.least, tokens_of_share(self.share, num_prompt_tokens, self.block_size)))

    def _least(self) -> int:
        self.build(MOST_BLOCKS * self.block_size)  # says what is wrong with options that no budget can mend
        low, high = LEAST_BLOCKS - 1, MOST_BLOCKS
        middle = LEAST_BLOCKS
        while high - low > 1:
            low, high = (low, middle) if self._allows(middle) else (middle, high)
            middle = (low + high) // 2
        return high * self.block_size

    def _allows(self, num_blocks: int) -> bool:
        try:
            self.build(num_blocks * self.block_size)
        except ValueError:
            return False
        return True


def for_model(policy: "Policy", num_layers: int, num_kv_heads: int) -> "Policy":
    """`Policy.for_model` of the policy, and of those that it makes for single prompts.

    Raises:
        ValueError: an option does not fit the model.
    """
    bound, share = policy.for_model(num_layers, num_kv_heads), policy.prompt_share
    if share is None:
        return bound
    bound = copy(bound)
    of_model = replace(share, build=lambda budget: share.build(budget).for_model(num_layers, num_kv_heads))
    object.__setattr__(bound, "prompt_share", of_model)
    return bound
