"""How much text fills a prompt of so many tokens."""

from collections.abc import Callable

from harness.errors import UserError


def largest_fitting(
    count: Callable[[int], int], limit: int, smallest: int, guess: int, what: str, largest: int | None = None
) -> int:
    """Return a size at which `count` is within `limit` and one more unit would not be, to within a unit's own spread.

    Args:
        count: tokens of a prompt of a size; about linear.
        limit: tokens there is room for.
        smallest: the least size that makes sense.
        guess: where to look first.
        what: name for messages.
        largest: no size above this makes sense; None for no end.

    Raises:
        UserError: not even the smallest size fits.
    """
    low, low_count = smallest, count(smallest)
    if low_count > limit:
        raise UserError(
            f"{what} needs {low_count} prompt tokens at least, and benchmark.lengths leaves {limit}. Raise the length "
            "or leave the task out."
        )
    high = None if largest is None else largest + 1
    size = max(guess, smallest + 1) if high is None else min(max(guess, smallest + 1), largest)
    while low < size and (high is None or high - low > 1):
        tokens = count(size)
        rate = max((tokens - low_count) / (size - low), 1e-3)
        if tokens > limit:
            high = size
        else:
            low, low_count = size, tokens
            if limit - tokens < rate:
                break
        size = low + max(1, int((limit - low_count) / rate))
        if high is not None:
            size = min(size, high - 1)
    return low
