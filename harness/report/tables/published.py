"""Ours beside published scores of LongBench: `results/paper/published/*.csv`, one row a model, method and budget."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from harness.benchmarks.longbench.aggregates import ENGLISH
from harness.benchmarks.longbench.own_averages import LANGUAGES, SHORT_NAMES
from harness.benchmarks.longbench.tasks import PUBLISHED
from harness.benchmarks.task import CATEGORIES
from harness.errors import UserError
from harness.report.reading.runs import MINI, Run, budget_text
from harness.report.tables.conditions import assignments
from harness.report.tables.grid import NO_VALUE, Cell, Column, Table, number_cell, text_cell

FOLDER = "published"
KEYS = ("source", "model", "method", "budget", "setting")
OURS = "this report"
CAPTION = (
    "Rows of other people stand beside ours to show the order of magnitude; they are no test. Read the last column "
    "before comparing two rows: models, precision, prompts cut, engines and budgets differ. Sources: "
    "results/paper/README.md."
)


@dataclass(frozen=True)
class PublishedRow:
    """Scores by name of a task or an average, 0 to 100, and where they were printed."""

    source: str
    model: str
    method: str
    budget: str
    setting: str
    scores: dict[str, float]


def read_published(folder: Path) -> list[PublishedRow]:
    """Every row of the CSV files in the folder `published`, none if it does not exist.

    Raises:
        UserError: a file without the key columns, or with a score that is no number.
    """
    return [row for path in sorted((folder / FOLDER).glob("*.csv")) for row in _read_file(path)]


def published_tables(published: Sequence[PublishedRow], runs: Sequence[Run]) -> list[Table]:
    """Tasks in the order of the papers, and LongBench's own averages; none without a run of ours on LongBench."""
    ours = [_of_run(run) for run in runs if run.is_finished and run.manifest.config["benchmark"]["source"] != MINI]
    averages = {name: name for ending in LANGUAGES.values() for name in (f"{one}{ending}" for one in CATEGORIES)}
    wanted = {
        "published-tasks": ("Tasks and their mean, ours and published", SHORT_NAMES | {ENGLISH: "Avg."}),
        "published-averages": ("LongBench's averages, ours and published", dict.fromkeys(LANGUAGES) | averages),
    }
    tables = []
    for name, (title, names) in wanted.items():
        mine = [row for row in ours if any(one in row.scores for one in names)]
        if mine:
            theirs = [row for row in published if any(one in row.scores for one in names)]
            tables.append(_table(name, title, {key: short or key for key, short in names.items()}, [*mine, *theirs]))
    return tables


def _read_file(path: Path) -> list[PublishedRow]:
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    if tuple(frame.columns[: len(KEYS)]) != KEYS:
        raise UserError(f"{path} begins with {', '.join(frame.columns[: len(KEYS)])}. It must with {', '.join(KEYS)}.")
    rows = []
    for number, row in enumerate(frame.to_dict("records"), start=2):
        try:
            scores = {name: float(value) for name, value in row.items() if name not in KEYS and value}
        except ValueError as error:
            raise UserError(f"{path}:{number} cannot be read ({error}). Scores are plain numbers.") from None
        rows.append(PublishedRow(**{key: row[key] for key in KEYS}, scores=scores))
    return rows


def _of_run(run: Run) -> PublishedRow:
    scores = {one.name: one.score for one in run.averages if one.score is not None}
    scores |= {name: one.score for name, one in run.scores.items() if one.score is not None and name in PUBLISHED}
    return PublishedRow(OURS, run.model, run.series, budget_text(run.budget), _what_differs(run), scores)


def _what_differs(run: Run) -> str:
    model, benchmark = run.manifest.config["model"], run.manifest.config["benchmark"]
    english = run.averages[1]
    limit = benchmark["limit"]
    return ", ".join(
        [
            f"{english.num_tasks} of {english.expected_tasks} English and code tasks",
            "all rows" if limit is None else f"first {limit} rows of a task",
            f"prompts up to {model['max_model_len']} tokens",
            model["dtype"],
            run.engine,
            assignments(run) or "no options",
        ]
    )


def _table(name: str, title: str, names: dict[str, str], rows: Sequence[PublishedRow]) -> Table:
    columns = [
        Column("Method", is_text=True),
        Column("Budget", "tokens"),
        Column("Model", is_text=True),
        *(Column(short) for short in names.values()),
        Column("Source", is_text=True),
        Column("What differs", is_text=True, in_print=False),
    ]
    cells = [
        [
            text_cell(row.method),
            Cell(row.budget or NO_VALUE, row.budget),
            text_cell(row.model),
            *(number_cell(row.scores.get(one), 2) for one in names),
            text_cell(row.source),
            text_cell(row.setting),
        ]
        for row in rows
    ]
    records = [vars(row) | row.scores for row in rows]
    for record in records:
        del record["scores"]
    return Table(name, title, CAPTION, columns, cells, 2, records=records)
