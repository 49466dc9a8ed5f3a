"""Paper versus measured: `results/paper/*.csv` beside what the runs and load tests found under the same conditions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pandas as pd

from harness.benchmarks.tasks import TASKS
from harness.errors import UserError
from harness.report.reading.load_tests import BenchRow, BenchSetting, settings
from harness.report.reading.runs import MINI, Run
from harness.report.tables.conditions import assignments
from harness.report.tables.grid import NO_VALUE, Cell, Column, Table, format_number, number_cell, text_cell

COLUMNS = (
    "model",
    "dataset",
    "metric",
    "method",
    "budget",
    "page_size",
    "baseline",
    "value",
    "value_max",
    "unit",
    "read_from",
    "source",
    "note",
)
FORMS = {"paged_eviction": ("paged_eviction", "paged_eviction_literal")}  # of the paper: its code's, and its text's
PERCENT = 100.0
ENGINE = "vllm"
READ_FROM = {"plot": "plot, read off by the source", "text": "text of the paper, as the source quotes it"}
CAPTION = (
    "Values known from PagedEviction (arXiv 2509.04377), none of them read in the paper itself: each as its source "
    "(results/paper/README.md) has it from the place under Read from; ~: read off a plot. "
    "Measured: our runs of the same model, method and budget on vLLM, with our "
    "prompts and hardware; a row for every variant of them, whose options and conditions stand under Measured from. "
    "n/N: samples scored of those the task has."
)


@dataclass(frozen=True)
class Known:
    """One row of the paper's numbers; see results/paper/README.md. Empty text and None: not stated."""

    model: str
    dataset: str
    metric: str
    method: str
    budget: int | None
    page_size: int | None
    baseline: str
    value: float | None
    value_max: float | None
    unit: str
    read_from: str
    source: str
    note: str
    file: str


def read_paper(folder: Path) -> list[Known]:
    """Every row of the folder's CSV files.

    Raises:
        UserError: no files there, or one with other columns or contents.
    """
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise UserError(f"{folder} holds no CSV file. Give the folder of the paper's numbers with --paper.")
    return [known for path in paths for known in _read_file(path)]


def paper_table(known: Sequence[Known], runs: Sequence[Run], bench: Sequence[BenchRow]) -> Table:
    """Every number of the paper, with ours where runs or load tests fit its conditions: a row for each variant."""
    columns = [
        Column("What", is_text=True),
        Column("Model", is_text=True),
        Column("Data or load", is_text=True),
        Column("Method", is_text=True),
        Column("Budget", "tokens"),
        Column("Against", is_text=True),
        Column("Unit", is_text=True),
        Column("Paper"),
        Column("Measured"),
        Column("Measured from", is_text=True, in_print=False),
        Column("Read from", is_text=True, in_print=False),
        Column("Source", is_text=True),
        Column("Note", is_text=True, in_print=False),
    ]
    found = settings(bench)
    pairs = [(one, measured) for one in known for measured in _measure(one, runs, found) or [None]]
    rows = [_row(one, measured) for one, measured in pairs]
    records = [
        vars(one) | {"measured": measured and measured.value, "measured_from": measured and measured.source}
        for one, measured in pairs
    ]
    return Table("paper", "Paper versus measured", CAPTION, columns, rows, 1, records=records)


@dataclass(frozen=True)
class Measured:
    """Our value, in the paper's unit, as shown, and where it comes from."""

    value: float
    text: str
    source: str


def _read_file(path: Path) -> list[Known]:
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    if tuple(frame.columns) != COLUMNS:
        raise UserError(f"{path} has the columns {', '.join(frame.columns)}. It must have {', '.join(COLUMNS)}.")
    return [_known(path, number, row) for number, row in enumerate(frame.to_dict("records"), start=2)]


def _known(path: Path, number: int, row: dict[str, str]) -> Known:
    try:
        return Known(
            **{key: row[key] for key in ("model", "dataset", "metric", "method", "baseline", "unit", "source", "note")},
            budget=int(row["budget"]) if row["budget"] else None,
            page_size=int(row["page_size"]) if row["page_size"] else None,
            value=float(row["value"]) if row["value"] else None,
            value_max=float(row["value_max"]) if row["value_max"] else None,
            read_from=READ_FROM[row["read_from"]],
            file=path.stem,
        )
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{path}:{number} cannot be read ({error}). Numbers are plain, read_from is plot or text."
        ) from None


def _measure(known: Known, runs: Sequence[Run], bench: Sequence[BenchSetting]) -> list[Measured]:
    """Our numbers under the row's conditions; none for claims that name no single condition."""
    if known.dataset in TASKS and known.metric == TASKS[known.dataset].metric:
        return _scores(known, runs)
    measure = _BENCH_METRICS.get(known.metric)
    if measure is None:
        return []
    found = [measure(known, one, bench) for one in bench if _fits(known, one)]
    return [measured for measured in found if measured is not None]


def _scores(known: Known, runs: Sequence[Run]) -> list[Measured]:
    """One a variant, from its run with the most samples."""
    best: dict[str, Run] = {}
    for run in runs:
        if _is_of_setting(known, run):
            variant = _variant(known, run)
            if variant not in best or best[variant].scores[known.dataset].n < run.scores[known.dataset].n:
                best[variant] = run
    measured = []
    for variant, run in best.items():
        score = run.scores[known.dataset]
        text = f"{format_number(score.score, 2)} ({score.n}/{score.expected})"
        measured.append(Measured(score.score, text, f"{run.manifest.run_id}: {variant}"))
    return measured


def _is_of_setting(known: Known, run: Run) -> bool:
    alike = (run.model, run.budget, run.engine) == (known.model, known.budget, ENGINE)
    score = run.scores.get(known.dataset) if alike and _is_method(known, run.policy) else None
    return score is not None and score.score is not None and _is_published_data(run)


def _is_method(known: Known, policy: str) -> bool:
    return policy in FORMS.get(known.method, (known.method,))


def _variant(known: Known, run: Run) -> str:
    """What the paper does not state, or states otherwise: options, longest prompt, precision, block size."""
    model = run.manifest.config["model"]
    block = [f"block {run.block_size} instead of {known.page_size}"] if run.block_size != known.page_size else []
    options = assignments(run) or "no options"
    form = [run.policy] if run.policy != known.method else []
    return ", ".join([*form, options, f"prompts up to {model['max_model_len']} tokens", model["dtype"], *block])


def _is_published_data(run: Run) -> bool:
    """Whether the run read LongBench itself, of any number of rows, and no choice of them by length."""
    benchmark = run.manifest.config["benchmark"]
    chosen = (benchmark["min_prompt_tokens"], benchmark["max_prompt_tokens"]) != (None, None)
    return run.is_finished and benchmark["source"] != MINI and not benchmark["longbench_e"] and not chosen


def _fits(known: Known, one: BenchSetting) -> bool:
    row = one.rows[0]
    budget_fits = known.budget is None or row.budget == known.budget
    page_fits = known.page_size is None or row.block_size == known.page_size
    load_fits = known.dataset in ("", row.load)
    alike = row.model == known.model and _is_method(known, row.policy)
    return alike and budget_fits and page_fits and load_fits


def _throughput(known: Known, one: BenchSetting, bench: Sequence[BenchSetting]) -> Measured:
    value = one.median("total_tok_s")
    return Measured(value, format_number(value, 0), _bench_source(one))


def _gain(known: Known, one: BenchSetting, bench: Sequence[BenchSetting]) -> Measured | None:
    return _against(known, one, bench, "total_tok_s", lambda ratio: PERCENT * (ratio - 1))


def _latency_reduction(known: Known, one: BenchSetting, bench: Sequence[BenchSetting]) -> Measured | None:
    return _against(known, one, bench, "e2e_p50", lambda ratio: PERCENT * (1 - ratio))


def _against(
    known: Known,
    one: BenchSetting,
    bench: Sequence[BenchSetting],
    field: str,
    to_percent: Callable[[float], float],
) -> Measured | None:
    """The median over repeats of what a ratio to the row's baseline in the same load test means in percent."""
    row = one.rows[0]
    for other in bench:
        rival = other.rows[0]
        if rival.policy == known.baseline and rival.shared == row.shared and rival.budget in (None, row.budget):
            ratios = BenchSetting(one.rows, other.rows).ratios(field)
            if ratios:
                value = to_percent(median(ratios))
                return Measured(value, format_number(value, 1, sign=True), _bench_source(one))
    return None


_BENCH_METRICS = {
    "throughput": _throughput,
    "throughput gain": _gain,
    "latency reduction": _latency_reduction,
}


def _bench_source(one: BenchSetting) -> str:
    row = one.rows[0]
    budget = "" if row.budget is None else f" @ {row.budget}"
    return (
        f"load test {row.load_test}: {row.series}{budget}, {row.load or 'load not recorded'}, block {row.block_size}, "
        f"{row.device or 'device not recorded'}"
    )


def _row(known: Known, measured: Measured | None) -> list[Cell]:
    return [
        text_cell(known.metric),
        text_cell(known.model or None),
        text_cell(known.dataset or None),
        text_cell(known.method),
        number_cell(known.budget),
        text_cell(known.baseline or None),
        text_cell(known.unit),
        Cell(_paper_text(known), known.value_max if known.value is None else known.value),
        Cell("not measured") if measured is None else Cell(measured.text, measured.value),
        Cell(NO_VALUE) if measured is None else text_cell(measured.source),
        text_cell(known.read_from),
        text_cell(known.source),
        text_cell(known.note or None),
    ]


def _paper_text(known: Known) -> str:
    if known.value is None:
        return f"up to {known.value_max:g}"
    about = "~" if known.read_from == READ_FROM["plot"] else ""
    return f"{about}{known.value:g}" + ("" if known.value_max is None else f" to {known.value_max:g}")
