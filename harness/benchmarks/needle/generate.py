"""Rows of the needle grid: a seven-digit number in filler, at every length and depth."""

from collections.abc import Callable, Sequence
from random import Random

from harness.benchmarks.filler import sentences
from harness.benchmarks.mini.words import WORDS
from harness.benchmarks.needle.tasks import TABLE
from harness.benchmarks.rows import Row
from harness.benchmarks.sizing import largest_fitting

_TASK = TABLE[0]


def depths(number: int) -> list[float]:
    """Return so many depths from 0 (before all filler) to 1 (after it), at equal distances."""
    return [round(index / (number - 1), 4) for index in range(number)] if number > 1 else [0.5]


def generate(
    lengths: Sequence[int],
    num_depths: int,
    num_rows: int,
    seed: int,
    haystack: str,
    count_tokens: Callable[[Row], int],
) -> list[Row]:
    """Return `num_rows` rows for every length and depth; a row depends on its cell, its number, seed and tokenizer.

    Args:
        lengths: tokens of prompt, chat template and answer together; as many whole sentences as fit.
        haystack: "repeat" or "prose", see `harness.benchmarks.filler`.
        count_tokens: tokens of a row's whole prompt.

    Raises:
        UserError: a length is too short.
    """
    rows = []
    for length in lengths:
        guess = 1
        for number, depth in enumerate(depths(num_depths)):
            for index in range(num_rows):
                row_id = f"{length}-{number}-{index}"

                def at(size: int, row_id: str = row_id, length: int = length, depth: float = depth) -> Row:
                    return _row(row_id, length, depth, size, Random(f"needle/{seed}/{row_id}"), haystack)

                guess = largest_fitting(
                    lambda size, at=at: count_tokens(at(size)), length - _TASK.max_new_tokens, 1, guess, _TASK.name
                )
                rows.append(at(guess))
    return rows


def _row(row_id: str, length: int, depth: float, size: int, rng: Random, haystack: str) -> Row:
    key, number = rng.choice(WORDS["town"]), str(rng.randint(1_000_000, 9_999_999))
    needle = f"The secret number of {key} is {number}."
    texts = sentences(haystack, size, rng)
    texts.insert(round(depth * size), needle)
    return Row(
        row_id=row_id,
        task=_TASK.name,
        context=" ".join(texts),
        input=f"What is the secret number of {key}?",
        answers=(number,),
        all_classes=None,
        length=length,
        language="en",
        where=row_id,
        depth=depth,
        answer_prefix=f"The secret number of {key} is",
        needles=(needle,),
    )
