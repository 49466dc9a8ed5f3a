"""One draw of each of RULER's tasks at a given size, by lm-eval's own functions.

The size is lm-eval's: words of an essay, repeated sentences, other needles, list words, coded words or documents.
Three things differ from lm-eval: random numbers come from a seed of the row's own, sentences of an essay are found by
their punctuation (nltk's data would have to be fetched), and keys are drawn from all pairs of adjective and noun
without first sorting the six million.
"""

import functools
import math
import re
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from harness.benchmarks.ruler.local_files import essay_words, questions
from harness.benchmarks.ruler.source import dict_value, take

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_EXAMPLE_TOKENS = 500  # of variable tracking, as in lm-eval
_EXAMPLE_SHARE = 4  # of the length at most a quarter, for lengths that lm-eval does not go down to


class Dice(Random):
    """A seeded stand-in for the module `random`."""

    Random = Random


@dataclass(frozen=True)
class Draw:
    """A prompt of some size.

    Attributes:
        text: everything before the answer's prefix.
        prefix: what stands before the answer already.
        needles: the parts of `text` that hold the answers.
    """

    text: str
    answers: tuple[str, ...]
    prefix: str
    needles: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drawer:
    """A task at one length.

    Attributes:
        draw: (size, index of the row) -> prompt; random numbers come from the dice it was built with.
        smallest, largest: sizes that make sense; no `largest` means any.
    """

    draw: Callable[[int, int], Draw]
    smallest: int
    largest: int | None = None


def make_drawer(task: str, length: int, dice: Dice, folder: Path | None, count_text: Callable[[str], int]) -> Drawer:
    """Return the drawer of a task.

    Args:
        length: tokens of prompt and answer together.
        folder: where local files are, see `harness.benchmarks.ruler.local_files`.
        count_text: tokens of a text.
    """
    if task.startswith("niah"):
        return _niah(task, length, dice, folder)
    if task == "ruler_vt":
        return _variable_tracking(length, dice, count_text)
    if task == "ruler_cwe":
        return _common_words(length, dice)
    if task == "ruler_fwe":
        return _frequent_words(length, dice)
    return _questions(task, dice, folder)


class _Pairs(Sequence[str]):
    """All "adjective-noun" by number."""

    def __init__(self) -> None:
        categories = _word_categories()
        self._first, self._second = categories["adjectives"], categories["nouns"]

    def __len__(self) -> int:
        return len(self._first) * len(self._second)

    def __getitem__(self, number: int) -> str:
        first, second = divmod(number, len(self._second))
        return f"{self._first[first]}-{self._second[second]}"


@functools.cache
def _word_categories() -> dict[str, list[str]]:
    import wonderwords

    return wonderwords.RandomWord()._categories


def _niah(task: str, length: int, dice: Dice, folder: Path | None) -> Drawer:
    settings = _niah_settings(task)
    module = take(
        "prepare_niah.py",
        ["RANDOM_SEED", "DEPTHS", "NEEDLE", "generate_random", "generate_random_number", "generate_random_word",
         "generate_random_uuid", "generate_input_output"],
        random=dice, np=np, uuid=uuid, WORDS=_Pairs(), cached_sent_tokenize=_SENTENCE_END.split,
    )  # fmt: skip
    prefix = dict_value("prepare_niah.py", "generate_samples", "gen_prefix")
    haystack = _haystack(settings["type_haystack"], 2 * length, folder)
    num_queries, num_values = settings.pop("num_needle_q", 1), settings.pop("num_needle_v", 1)
    num_keys = max(settings.pop("num_needle_k", 1), num_queries)
    head = module["NEEDLE"].split("{")[0]

    def draw(size: int, index: int) -> Draw:
        text, answers, query = module["generate_input_output"](
            size, haystack, num_needle_k=num_keys, num_needle_v=num_values, num_needle_q=num_queries, **settings
        )
        words = {"query": query, "num_needle_q": num_queries, "num_needle_v": num_values}
        before = prefix(type_needle_v=settings["type_needle_v"], **words)
        return Draw(text, tuple(answers), before, tuple(_sentence_with(text, head, answer) for answer in answers))

    return Drawer(draw, smallest=num_keys * num_values)


def _niah_settings(task: str) -> dict[str, Any]:
    """What lm-eval's function of the task hands to its generator."""
    return take(
        "niah_utils.py",
        ["TEMPLATE", task],
        DEFAULT_SEQ_LENGTHS=(0,),
        get_tokenizer=lambda name: None,
        resolve_tokenizer_name=lambda settings: None,
        get_haystack=lambda type_haystack: None,
        generate_samples=lambda haystack, TOKENIZER, max_seq_length, num_samples, **settings: settings,
        download_dataset=next,
    )[task]()


def _haystack(kind: str, num_words: int, folder: Path | None) -> list[str] | str:
    if kind == "essay":
        return essay_words(folder, num_words)
    supplied = {"cache": lambda function: function, "Literal": {("essay", "repeat", "needle"): None}}
    return take("prepare_niah.py", ["get_haystack"], **supplied)["get_haystack"](type_haystack=kind)


def _sentence_with(text: str, head: str, answer: str) -> str:
    end = text.index(f"{answer}.") + len(answer) + 1
    return text[text.rindex(head, 0, end) : end]


def _variable_tracking(length: int, dice: Dice, count_text: Callable[[str], int]) -> Drawer:
    module = take(
        "vt_utils.py",
        ["CONFIG", "TEMPLATE", "generate_chains", "generate_input_output", "randomize_icl"],
        random=dice,
        np=SimpleNamespace(random=SimpleNamespace(randint=dice.randrange)),
        string=string,
    )
    make = module["generate_input_output"]
    head = module["CONFIG"]["variable_tracking"]["answer_prefix"].split("{")[0]

    def example(limit: int) -> str:
        text, size = "", 1
        while not text or count_text(text) < limit:
            chosen, (shown, answers) = text, make(size, 1, 4, is_icl=True)
            text = f"{shown} {' '.join(answers)}\n\n"
            size += 1
        return chosen or text

    shown = example(min(_EXAMPLE_TOKENS, length // _EXAMPLE_SHARE))

    def draw(size: int, index: int) -> Draw:
        text, answers = make(size, 1, 4)
        asked = text.rindex(head)
        before = f"{module['randomize_icl'](shown)}\n\n"
        chain = [re.search(rf"VAR {name} = (?:VAR )?\w+", text)[0] for name in answers]
        return Draw(before + text[:asked], tuple(answers), text[asked:].strip(), tuple(chain))

    return Drawer(draw, smallest=1)


def _common_words(length: int, dice: Dice) -> Drawer:
    module = take(
        "cwe_utils.py",
        ["CONFIG", "TEMPLATE", "r", "WORDS", "get_example", "generate_input_output"],
        random=dice,
        RNG=dice,
        wonderwords=SimpleNamespace(RandomWord=lambda: SimpleNamespace(_categories=_word_categories())),
    )

    def draw(size: int, index: int) -> Draw:
        _, text, answers = module["generate_input_output"](size, length)
        return _draw_of(text, answers, module["CONFIG"]["answer_prefix"])

    return Drawer(draw, smallest=11, largest=len(module["WORDS"]))


def _frequent_words(length: int, dice: Dice) -> Drawer:
    from scipy.special import zeta

    module = take(
        "fwe_utils.py",
        ["CONFIG", "SEED", "TEMPLATE", "generate_input_output"],
        random=dice,
        np=np,
        zeta=zeta,
        string=string,
    )

    def draw(size: int, index: int) -> Draw:
        text, answers, _ = module["generate_input_output"](
            math.inf, lambda text: SimpleNamespace(input_ids=()), num_words=size, vocab_size=length // 50
        )
        return _draw_of(text, answers, module["CONFIG"]["answer_prefix"])

    return Drawer(draw, smallest=60)


def _questions(task: str, dice: Dice, folder: Path) -> Drawer:
    asked, documents = questions(task, folder)
    names = ["CONFIG", "SEED", "TEMPLATE", "DOCUMENT_PROMPT", "generate_input_output"]
    module = take("qa_utils.py", names, random=dice)
    prefix = dict_value("qa_utils.py", "generate_samples", "gen_prefix")()

    def draw(size: int, index: int) -> Draw:
        index %= len(asked)
        size = max(size, len(asked[index]["context"]))
        text, answers = module["generate_input_output"](index, size, qas=asked, docs=documents)
        return Draw(text, tuple(answers), prefix)

    return Drawer(draw, smallest=1, largest=len(documents))


def _draw_of(text: str, answers: Sequence[str], prefix: str) -> Draw:
    return Draw(text[: text.rindex(prefix)].strip(), tuple(answers), prefix.strip())
