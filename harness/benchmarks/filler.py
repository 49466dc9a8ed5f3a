"""Text of this project for a needle to lie in: invented prose, or a few sentences over and over."""

from random import Random

from harness.benchmarks.mini.text import Scene
from harness.benchmarks.mini.words import NEWS, REPORT, STORY, WORDS

HAYSTACKS = ("repeat", "prose")
REFRAIN = (
    "The river runs past the mill.",
    "The road climbs to the old bridge.",
    "A cart stands in the yard.",
    "Smoke rises from the roof.",
    "Nobody is in a hurry today.",
)


def sentences(haystack: str, number: int, rng: Random) -> list[str]:
    """Return so many sentences of filler, "repeat" or "prose"; prose depends on `rng`."""
    if haystack == "repeat":
        return [REFRAIN[index % len(REFRAIN)] for index in range(number)]
    templates = (*STORY, *REPORT, *NEWS)
    return [Scene(rng, WORDS).fill(rng.choice(templates)) for _ in range(number)]
