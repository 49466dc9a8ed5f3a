"""Rows of benchmark=ruler and benchmark=needle, which are made to the length of the model's tokenizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.benchmarks.filler import HAYSTACKS
from harness.benchmarks.needle import generate as needle_rows
from harness.benchmarks.needle.tasks import NEEDLE_TASKS
from harness.benchmarks.rows import LoadReport, Row, content_hash
from harness.benchmarks.ruler import generate as ruler_rows
from harness.benchmarks.ruler.local_files import OWN_FILLER
from harness.benchmarks.ruler.tasks import NUM_ROWS, RULER_TASKS
from harness.errors import UserError

TASKS_OF = {"ruler": RULER_TASKS, "needle": NEEDLE_TASKS}


@dataclass(frozen=True)
class Making:
    """How rows are made.

    Attributes:
        lengths: tokens of prompt and answer together, one set of rows each.
        limit: rows a task and length; for the needle grid rows a length and depth.
        depths: depths of the needle grid; None for RULER.
        haystack: filler of the needle grid, see `harness.benchmarks.filler`; None for RULER.
        folder: where RULER's essays and questions are; None for none.
        seed: of all rows.
    """

    lengths: Sequence[int]
    limit: int
    depths: int | None
    haystack: str | None
    folder: Path | None
    seed: int


def make_rows(
    source: str, tasks: Sequence[str] | None, making: Making, count_tokens: Callable[[Row], int]
) -> tuple[list[Row], dict[str, LoadReport], list[str]]:
    """Make the rows of some tasks, or of all of which everything is there.

    Returns:
        rows, a report a task, and what a reader of the scores must know: tasks left out, text that is not the original.

    Raises:
        UserError: settings that do not go together, a task that is not the benchmark's or lacks a file, or a length
            too short for a task.
    """
    _check(source, making)
    if source == "needle":
        if unknown := set(tasks or ()) - set(NEEDLE_TASKS):
            raise UserError(f"benchmark.tasks={sorted(unknown)}: benchmark=needle has only the task needle.")
        rows = needle_rows.generate(
            making.lengths, making.depths, making.limit, making.seed, making.haystack, count_tokens
        )
        return rows, {"needle": _report(rows, len(rows), [], f"needle: {making.haystack}")}, []
    return _ruler(tasks, making, count_tokens)


def _ruler(
    tasks: Sequence[str] | None, making: Making, count_tokens: Callable[[Row], int]
) -> tuple[list[Row], dict[str, LoadReport], list[str]]:
    if unknown := [name for name in tasks or () if name not in RULER_TASKS]:
        raise UserError(f"benchmark.tasks={unknown}: not of RULER, whose tasks are {', '.join(RULER_TASKS)}.")
    rows: list[Row] = []
    reports: dict[str, LoadReport] = {}
    notes: list[str] = []
    for name in (name for name in RULER_TASKS if tasks is None or name in tasks):
        try:
            made, skipped, too_short = _rows_of(name, making, count_tokens)
        except UserError as error:
            if tasks is not None:
                raise
            notes.append(f"left out: {error}")
            continue
        notes += [f"left out: {reason}" for reason in too_short]
        rows += made
        expected = NUM_ROWS * (len(making.lengths) - len(too_short))
        reports[name] = _report(made, expected, skipped, ruler_rows.origin(name, making.folder))
    own = [name for name, report in reports.items() if report.file.endswith(OWN_FILLER)]
    if own:
        notes.append(f"{', '.join(own)}: the haystack is {OWN_FILLER}, not essays (benchmark.path)")
    return rows, reports, notes


def _rows_of(name: str, making: Making, count_tokens: Callable[[Row], int]) -> tuple[list[Row], list[str], list[str]]:
    """The rows of a task of RULER at all lengths, rows that do not fit, and lengths that are too short.

    Raises:
        UserError: a file is missing, or every length is too short.
    """
    if missing := ruler_rows.why_missing(name, making.folder):
        raise UserError(f"{missing}. Put it there, or leave the task out of benchmark.tasks.")
    made: list[Row] = []
    skipped: list[str] = []
    too_short: list[str] = []
    for length in making.lengths:
        try:
            found, left_out = ruler_rows.generate(name, length, making.limit, making.seed, count_tokens, making.folder)
        except UserError as error:
            too_short.append(f"{name} at {length}: {error}")
            continue
        made += found
        skipped += left_out
    if not made:
        raise UserError((too_short + skipped)[0])
    return made, skipped, too_short


def _report(rows: Sequence[Row], expected: int, skipped: list[str], origin: str) -> LoadReport:
    return LoadReport(len(rows), expected, skipped, origin, content_hash(rows))


def _check(source: str, making: Making) -> None:
    if not making.lengths or min(making.lengths) < 1 or len(set(making.lengths)) < len(making.lengths):
        raise UserError(
            f"benchmark.lengths={making.lengths}: give lengths in tokens, each once, for example [512,1024]."
        )
    if making.limit is None or making.limit < 1:
        raise UserError(f"benchmark.limit={making.limit} must be at least 1: rows are made, as many as asked for.")
    if source == "ruler":
        for key in ("depths", "haystack"):
            if getattr(making, key) is not None:
                raise UserError(f"benchmark.{key}={getattr(making, key)} is for benchmark=needle only. Remove it.")
        return
    if making.depths is None or making.depths < 1:
        raise UserError(f"benchmark.depths={making.depths} must be at least 1: how many depths the grid has.")
    if making.haystack not in HAYSTACKS:
        raise UserError(f"benchmark.haystack={making.haystack} is unknown. Use {' or '.join(HAYSTACKS)}.")
    if making.folder is not None:
        raise UserError(f"benchmark.path={making.folder} has no effect with benchmark=needle. Remove it.")
