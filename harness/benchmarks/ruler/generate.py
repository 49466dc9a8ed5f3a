"""Rows of RULER at a length, which counts prompt, chat template and answer by the model's own tokenizer."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from harness.benchmarks.rows import Row
from harness.benchmarks.ruler.draws import Dice, Draw, make_drawer
from harness.benchmarks.ruler.local_files import essay_source, missing_file
from harness.benchmarks.ruler.tasks import QA_TASKS, TABLE
from harness.benchmarks.sizing import largest_fitting
from harness.errors import UserError

_MAX_NEW_TOKENS = {task.name: task.max_new_tokens for task in TABLE}
_ESSAY_TASKS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multiquery", "niah_multivalue")


def generate(
    task: str, length: int, num_rows: int, seed: int, count_tokens: Callable[[Row], int], folder: Path | None
) -> tuple[list[Row], list[str]]:
    """Return the first rows of a task at a length, and which had to be left out because they do not fit.

    A row depends on task, length, seed, its number and the tokenizer.

    Args:
        length: tokens of prompt and answer together.
        count_tokens: tokens of a row's whole prompt.
        folder: where essays and questions are, None for none.

    Raises:
        UserError: the length is too short for the task, or lm-eval is not the one that is pinned.
    """
    dice = Dice()
    dice.seed(f"ruler/{task}/{seed}/{length}")
    empty = _row(task, length, "", Draw("", (), ""))
    drawer = make_drawer(task, length, dice, folder, lambda text: count_tokens(replace(empty, context=text)))
    limit = length - _MAX_NEW_TOKENS[task]
    rows: list[Row] = []
    left_out: list[str] = []
    guess = drawer.smallest
    for index in range(num_rows):

        def at(size: int, index: int = index) -> Row:
            dice.seed(f"ruler/{task}/{seed}/{length}/{index}")
            return _row(task, length, f"{length}-{index}", drawer.draw(size, index))

        try:
            guess = largest_fitting(
                lambda size, at=at: count_tokens(at(size)), limit, drawer.smallest, guess, task, drawer.largest
            )
        except UserError as error:
            if task not in QA_TASKS:
                raise
            left_out.append(f"{length}-{index}: {error}")
            continue
        rows.append(at(guess))
    return rows, left_out


def origin(task: str, folder: Path | None) -> str:
    """Return where the text of a task comes from."""
    if task in QA_TASKS:
        return f"ruler: {folder}"
    return f"ruler: {essay_source(folder)}" if task in _ESSAY_TASKS else "ruler: generated"


def why_missing(task: str, folder: Path | None) -> str | None:
    """Return what a task lacks here, None if nothing."""
    name = missing_file(task, folder)
    return name and f"{task} needs {name}, published with its data set, in benchmark.path={folder or 'FOLDER'}"


def _row(task: str, length: int, row_id: str, draw: Draw) -> Row:
    return Row(
        row_id=row_id,
        task=task,
        context=draw.text,
        input="",
        answers=draw.answers,
        all_classes=None,
        length=length,
        language="en",
        where=row_id,
        depth=_depth(draw),
        answer_prefix=draw.prefix,
        needles=draw.needles,
    )


def _depth(draw: Draw) -> float | None:
    """Where the only needle lies; several have no one depth."""
    return round(draw.text.index(draw.needles[0]) / len(draw.text), 3) if len(draw.needles) == 1 else None
