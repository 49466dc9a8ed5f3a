"""How long prompts and answers are."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.errors import UserError

FORMS = "Give a number, a range [low,high], or weights {length: weight, ...}."


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens: `values[i]` with the weight `weights[i]`."""

    values: Sequence[int]
    weights: Sequence[float]

    @property
    def longest(self) -> int:
        """The largest length that can come."""
        return max(self.values)

    def draw(self, generator: random.Random, count: int) -> list[int]:
        """So many lengths."""
        return generator.choices(self.values, self.weights, k=count)


def parse_lengths(key: str, value: object) -> Lengths:
    """Read a length from the configuration.

    Args:
        key: its key, for messages.
        value: 1024 (always), [256, 1024] (uniform, both ends included), or {256: 3, 1024: 1} (weights).

    Raises:
        UserError: it has another form, or a length is not positive.
    """
    lengths = _parsed(value)
    if lengths is None or not lengths.values:
        raise UserError(f"{key}={value} is no length. {FORMS}")
    if min(lengths.values) < 1 or min(lengths.weights) < 0 or sum(lengths.weights) <= 0:
        raise UserError(f"{key}={value} has a length below 1 or no positive weight. {FORMS}")
    return lengths


def _parsed(value: object) -> Lengths | None:
    if _is_count(value):
        return Lengths([value], [1.0])
    if isinstance(value, Sequence) and len(value) == 2 and all(map(_is_count, value)):
        values = range(value[0], value[1] + 1)
        return Lengths(values, [1.0] * len(values))
    if isinstance(value, Mapping) and all(map(_is_count, value)):
        weights = list(value.values())
        if all(isinstance(weight, int | float) for weight in weights):
            return Lengths(list(value), weights)
    return None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
