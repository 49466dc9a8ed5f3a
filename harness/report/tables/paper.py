"""Paper versus measured: `results/paper/*.csv` beside what the runs and load tests found under the same conditions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from harness.benchmarks.tasks import TASKS
from harness.budget import budget_text
from harness.errors import UserError
from harness.report.reading.load_tests import BenchRow, BenchSetting, settings
from harness.report.reading.runs import MINI, Run
from harness.report.tables.conditions import assignments
from harness.report.tables.grid import NO_VALUE, Cell, Column, Table, format_number, number_cell, text_cell

NUMBERS = {"budget": "Int64", "page_size": "Int64", "value": float, "value_max": float}
COLUMNS = (
    *("model", "dataset", "metric", "method", "budget", "page_size", "baseline"),
    *("value", "value_max", "unit", "read_from", "source", "note"),
)
FORMS = {"paged_eviction": ("paged_eviction", "paged_eviction_literal")}  # of the paper: its code's, and its text's
ENGINE = "vllm"
READ_FROM = {"plot": "plot, read off by the source", "text": "text of the paper, as the source quotes it"}
GAINS = {"throughput gain": ("total_tok_s", 1), "latency reduction": ("e2e_p50", -1)}
CAPTION = (
    "Values known from PagedEviction (arXiv 2509.04377), none of them read in the paper itself: each as its source "
    "(results/paper/README.md) has it from the place under Read from; ~: read off a plot. "
    "Measured: our runs of the same model, method and budget on vLLM, with our "
    "prompts and hardware; a row for every variant of them, whose options and conditions stand under Measured from. "
    "n/N: samples scored of those the task has."
)

Known = Any
"""A row of the paper's numbers, with `COLUMNS` as attributes; empty text and None: not stated."""


@dataclass(frozen=True)
class Measured:
    """Our value in the paper's unit, as shown, what it is of, and under which further conditions.

    `page_size` is None where it does not decide: of scores, whose conditions name it.
    """

    metric: str
    model: str
    dataset: str
    method: str
    budget: float | None
    page_size: int | None
    baseline: str
    conditions: str
    value: float
    text: str
    origin: str


def read_paper(folder: Path) -> list[Known]:
    """Every row of the folder's CSV files; their columns: results/paper/README.md.

    Raises:
        UserError: no files there, or one with other columns or contents.
    """
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise UserError(f"{folder} holds no CSV file. Give the folder of the paper's numbers with --paper.")
    return [known for path in paths for known in _read_file(path).itertuples(index=False, name="Known")]


def paper_tables(known: Sequence[Known], runs: Sequence[Run], bench: Sequence[BenchRow]) -> list[Table]:
    """The paper's numbers beside ours; none where no run or load test of ours fits any of them."""
    table = paper_table(known, runs, bench)
    return [table] if any(record["measured"] is not None for record in table.records) else []


def paper_table(known: Sequence[Known], runs: Sequence[Run], bench: Sequence[BenchRow]) -> Table:
    """Every number of the paper, with ours where runs or load tests fit its conditions: a row for each variant."""
    texts = (
        "What",
        "Model",
        "Data or load",
        "Method",
        "Against",
        "Unit",
        "Measured from",
        "Read from",
        "Source",
        "Note",
    )
    unprinted = ("Measured from", "Read from", "Note")
    columns = [Column(title, is_text=True, in_print=title not in unprinted) for title in texts]
    columns[4:4] = [Column("Budget", "tokens")]
    columns[7:7] = [Column("Paper"), Column("Measured")]
    ours = [*_of_runs(runs), *_of_load_tests(settings(bench))]
    pairs = [(one, found) for one in known for found in [each for each in ours if _fits(one, each)] or [None]]
    rows = [_row(one, found) for one, found in pairs]
    records = [
        one._asdict() | {"measured": found and found.value, "measured_from": found and _source(found)}
        for one, found in pairs
    ]
    return Table("paper", "Paper versus measured", CAPTION, columns, rows, 1, records=records)


def _read_file(path: Path) -> pd.DataFrame:
    texts = {key: str for key in COLUMNS if key not in NUMBERS}
    try:
        frame = pd.read_csv(path, dtype=texts | NUMBERS, keep_default_na=False, na_values=dict.fromkeys(NUMBERS, ""))
    except ValueError as error:
        raise UserError(f"{path} cannot be read ({error}). Budgets and values are plain numbers, or empty.") from None
    if tuple(frame.columns) != COLUMNS:
        raise UserError(f"{path} has the columns {', '.join(frame.columns)}. It must have {', '.join(COLUMNS)}.")
    if unknown := sorted(set(frame["read_from"]) - set(READ_FROM)):
        raise UserError(f"{path} has read_from={', '.join(unknown)}. It must be {' or '.join(READ_FROM)}.")
    frame = frame.assign(read_from=frame["read_from"].map(READ_FROM), file=path.stem).astype(object)
    return frame.where(frame.notna(), None)


def _of_runs(runs: Sequence[Run]) -> list[Measured]:
    """One a task, budget and variant, from its run with the most samples."""
    best: dict[tuple[Any, ...], tuple[int, Measured]] = {}
    for run in filter(_is_of_published_data, runs):
        model = run.manifest.config["model"]
        conditions = (
            f"{run.policy} ({assignments(run) or 'no options'}), prompts up to {model['max_model_len']} tokens, "
            f"{model['dtype']}, block {run.block_size}"
        )
        for task, score in run.scores.items():
            if score.score is None:
                continue
            key = (TASKS[task].metric, run.model, task, run.policy, run.budget, None, "", conditions)
            if key not in best or best[key][0] < score.n:
                text = f"{format_number(score.score, 2)} ({score.n}/{score.expected})"
                best[key] = score.n, Measured(*key, score.score, text, run.manifest.run_id)
    return [measured for _, measured in best.values()]


def _is_of_published_data(run: Run) -> bool:
    """Whether the run read LongBench itself, of any number of rows, and no choice of them by length."""
    benchmark = run.manifest.config["benchmark"]
    chosen = (benchmark["min_prompt_tokens"], benchmark["max_prompt_tokens"]) != (None, None)
    is_longbench = benchmark["source"] != MINI and not benchmark["longbench_e"] and not chosen
    return run.is_finished and run.engine == ENGINE and is_longbench


def _of_load_tests(bench: Sequence[BenchSetting]) -> Iterator[Measured]:
    """Tokens a second of every setting, and what it gains on every other one of its load test that it may beat."""
    for one in bench:
        row = one.rows[0]
        about = (row.model, row.load, row.policy, row.budget, row.block_size)
        budget = "" if row.budget is None else f" @ {budget_text(row.budget)}"
        conditions = (
            f"{row.series}{budget}, {row.load or 'load not recorded'}, block {row.block_size}, "
            f"{row.device or 'device not recorded'}"
        )
        ours, origin = one.median("total_tok_s"), f"load test {row.load_test}"
        yield Measured("throughput", *about, "", conditions, ours, format_number(ours, 0), origin)
        for other in bench:
            rival = other.rows[0]
            if other is one or rival.shared != row.shared or rival.budget not in (None, row.budget):
                continue
            for metric, (field, sign) in GAINS.items():
                if ratios := BenchSetting(one.rows, other.rows).ratios(field):
                    gain = sign * 100 * (median(ratios) - 1)
                    yield Measured(
                        metric, *about, rival.policy, conditions, gain, format_number(gain, 1, sign=True), origin
                    )


def _fits(known: Known, ours: Measured) -> bool:
    """Whether ours has all conditions that the paper states."""
    return (
        (known.metric, known.model, known.baseline) == (ours.metric, ours.model, ours.baseline)
        and ours.method in FORMS.get(known.method, (known.method,))
        and known.dataset in ("", ours.dataset)
        and known.budget in (None, ours.budget)
        and (ours.page_size is None or known.page_size in (None, ours.page_size))
    )


def _source(ours: Measured) -> str:
    return f"{ours.origin}: {ours.conditions}"


def _row(known: Known, ours: Measured | None) -> list[Cell]:
    return [
        text_cell(known.metric),
        text_cell(known.model or None),
        text_cell(known.dataset or None),
        text_cell(known.method),
        number_cell(known.budget),
        text_cell(known.baseline or None),
        text_cell(known.unit),
        Cell(_paper_text(known), known.value_max if known.value is None else known.value),
        Cell("not measured") if ours is None else Cell(ours.text, ours.value),
        Cell(NO_VALUE) if ours is None else text_cell(_source(ours)),
        text_cell(known.read_from),
        text_cell(known.source),
        text_cell(known.note or None),
    ]


def _paper_text(known: Known) -> str:
    if known.value is None:
        return f"up to {known.value_max:g}"
    about = "~" if known.read_from == READ_FROM["plot"] else ""
    return f"{about}{known.value:g}" + ("" if known.value_max is None else f" to {known.value_max:g}")
