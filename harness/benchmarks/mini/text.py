"""What the generators of longbench_mini share: drawing words into sentences and placing the evidence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Draft:
    """A generated row before it gets its id and length.

    Attributes:
        context, input, answers, all_classes, language: as in `Row`.
        evidence: the part of `context` (or of `input`) that decides the answer.
    """

    context: str
    input: str
    answers: tuple[str, ...]
    evidence: str
    language: str
    all_classes: tuple[str, ...] | None = None


class Scene(dict[str, str]):
    """Draws a word for every field of a sentence and keeps it, so that later sentences agree.

    The field `{trade2}` is drawn from the words of "trade", like `{trade}`, but another time.
    """

    def __init__(self, rng: Random, words: Mapping[str, Sequence[str]], **known: str) -> None:
        """Start with the words in `known` settled."""
        super().__init__(known)
        self._rng = rng
        self._words = words

    def __missing__(self, field: str) -> str:
        """Settle a field nobody asked for yet."""
        taken = set(self.values())
        options = [word for word in self._words[field.rstrip("0123456789")] if word not in taken]
        self[field] = self._rng.choice(options)
        return self[field]

    def fill(self, template: str) -> str:
        """Return the template with every field replaced."""
        return template.format_map(self)


def paragraphs(
    rng: Random,
    templates: Sequence[str],
    words: Mapping[str, Sequence[str]],
    num_chars: int,
    separator: str = " ",
    sentences: tuple[int, int] = (3, 6),
) -> list[str]:
    """Return at least two paragraphs of `num_chars` characters in all, each with its own words and order."""
    texts: list[str] = []
    while len(texts) < 2 or sum(map(len, texts)) < num_chars:
        scene = Scene(rng, words)
        chosen = rng.sample(templates, rng.randint(*sentences))
        texts.append(separator.join(scene.fill(template) for template in chosen))
    return texts


def insert_at_depth(texts: Sequence[str], evidence: str, depth: float) -> list[str]:
    """Put the evidence between the texts so that about the share `depth` of their characters comes before it."""
    wanted = depth * sum(map(len, texts))
    before = 0
    position = 0
    for text in texts:
        if before + len(text) / 2 > wanted:
            break
        before += len(text)
        position += 1
    return [*texts[:position], evidence, *texts[position:]]


def weave(texts: Sequence[str], sentence: str, depth: float, separator: str = " ") -> list[str]:
    """Append a sentence to the paragraph that lies at `depth`, so that it does not stand out."""
    index = min(int(depth * len(texts)), len(texts) - 1)
    return [*texts[:index], texts[index] + separator + sentence, *texts[index + 1 :]]
