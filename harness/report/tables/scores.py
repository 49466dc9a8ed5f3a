"""Tables of scores: a row a run, a column an average or a task."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.benchmarks.longbench.aggregates import ENGLISH, OVERALL, Average
from harness.benchmarks.longbench.own_averages import LANGUAGES, SHORT_NAMES
from harness.benchmarks.scoring import TaskScore
from harness.benchmarks.task import OWN
from harness.benchmarks.tasks import ALL_CATEGORIES, TASKS
from harness.report.reading.runs import FULL_CACHE_POLICY, Group, Run
from harness.report.tables.conditions import (
    BUDGET_MEANING,
    INTERVAL_MEANING,
    key_cells,
    key_columns,
    key_record,
    parameters,
    setting,
    warnings,
)
from harness.report.tables.grid import NO_VALUE, Cell, Column, Table, format_number, interval_text, mark_best

AVERAGES = "averages"
MEANING = (
    "Scores 0 to 100; an average is the mean of its task scores. n/N: samples scored of those the task has. "
    f"{BUDGET_MEANING}. {INTERVAL_MEANING}."
)
MARKS = (
    "Bold: the best of a budget, the full cache and unfinished runs apart; ≈: inside the 95 % interval of the best; "
    "†: unfinished."
)
NO_SPREAD = (
    "Where all samples of a task have one score the interval is a single point: the bootstrap cannot tell how far "
    "such a score would move with other samples."
)
PAPERS = (
    "The 16 English and code tasks in the order of the papers on H2O, SnapKV and PyramidKV, and their mean. "
    "Metrics: F1, Rouge-L, accuracy (TREC, PCount, PRe) and edit similarity (Lcc, RB-P)."
)
OWN_AVERAGES = (
    "LongBench's own averages: of each category, English and Chinese apart, and the mean of the six categories "
    "(code counts in both languages). Beside them the mean over all tasks."
)


def accuracy_table(group: Group) -> Table:
    """All averages and tasks of a group: LongBench's categories and order, then own tasks, 0 to 100."""
    averages = _averages(group)
    names = [*averages, *_tasks(group)]
    columns, cells = zip(*[_column(group, name, averages.get(name)) for name in names], strict=True)
    keys = key_columns(group)
    spread = [NO_SPREAD] if any(_has_no_spread(run) for run in group.runs) else []
    return Table(
        name=f"accuracy-{group.name}",
        title=f"Accuracy, {group.title}",
        caption=" ".join([setting(group), MEANING, MARKS, parameters(group)]),
        columns=[*keys, *columns],
        rows=_rows(group, cells),
        num_keys=len(keys),
        notes=[*warnings(group), *spread],
        records=accuracy_records(group),
    )


def by_category(table: Table) -> list[Table]:
    """The wide table cut for paper: the averages, then a table a category, and own tasks, with tasks and average."""
    titles = [column.title for column in table.columns]
    parts = {AVERAGES: [title for title in titles if title in (OVERALL, ENGLISH, OWN, *LANGUAGES)]}
    for category in ALL_CATEGORIES:
        names = [name for name in titles if name in TASKS and TASKS[name].category == category]
        if names:
            parts[category] = [category, *(f"{category}{ending}" for ending in LANGUAGES.values()), *names]
    return [_part(table, part, wanted) for part, wanted in parts.items()]


def papers_table(group: Group) -> Table | None:
    """The table of the papers on eviction: 16 tasks in their order and the mean; None without one of the tasks."""
    averages = _averages(group)
    if ENGLISH not in averages:
        return None
    present = [task for task in SHORT_NAMES if task in _tasks(group)]
    keys = key_columns(group)
    columns = [Column(SHORT_NAMES[task], _shared_count(group, _counts(group, task))) for task in present]
    cells = [_marked(group, [_short(run.scores.get(task), run) for run in group.runs]) for task in present]
    means = averages[ENGLISH]
    cells.append(_marked(group, [_short(mean, run) for mean, run in zip(means, group.runs, strict=True)]))
    count = f"{len(present)} tasks" if len(present) == len(SHORT_NAMES) else f"{len(present)} of 16 tasks"
    return Table(
        name=f"papers-{group.name}",
        title=f"LongBench as papers print it, {group.title}",
        caption=f"{setting(group)} {PAPERS} {MARKS} Intervals: table of accuracy.",
        columns=[*keys, *columns, Column("Avg.", count)],
        rows=_rows(group, cells),
        num_keys=len(keys),
        notes=warnings(group),
        records=[one for one in accuracy_records(group) if one["name"] in (*SHORT_NAMES, ENGLISH)],
    )


def own_averages_table(group: Group) -> Table | None:
    """LongBench's own averages and the mean over all tasks; None without a task of LongBench."""
    averages = _averages(group)
    if OVERALL not in averages:
        return None
    names = [name for name in averages if name != ENGLISH]
    columns, cells = zip(*[_column(group, name, averages[name]) for name in names], strict=True)
    keys = key_columns(group)
    return Table(
        name=f"longbench-{group.name}",
        title=f"LongBench's own averages, {group.title}",
        caption=f"{setting(group)} {OWN_AVERAGES} {INTERVAL_MEANING}. {MARKS}",
        columns=[*keys, *columns],
        rows=_rows(group, cells),
        num_keys=len(keys),
        notes=warnings(group),
        records=[one for one in accuracy_records(group) if one["name"] in names],
    )


def accuracy_records(group: Group) -> list[dict[str, Any]]:
    """One record a run and average or task, with n, interval and metric."""
    found = []
    for run in group.runs:
        lines: list[tuple[str, str, str, Average | TaskScore]] = [
            *(("average", one.name, "mean of task scores", one) for one in run.averages if one.num_tasks),
            *(("task", task, TASKS[task].metric, score) for task, score in run.scores.items()),
        ]
        for level, name, metric, one in lines:
            is_average = isinstance(one, Average)
            found.append(
                key_record(run)
                | {"level": level, "name": name, "metric": metric}
                | {key: getattr(one, key) for key in ("score", "ci_low", "ci_high", "n", "expected")}
                | {
                    "num_tasks": one.num_tasks if is_average else 1,
                    "expected_tasks": one.expected_tasks if is_average else 1,
                    "partial": (one.partial if is_average else one.n < one.expected) or not run.is_finished,
                }
            )
    return found


def _tasks(group: Group) -> list[str]:
    present = {task for run in group.runs for task in run.scores}
    return [task for task in TASKS if task in present]


def _averages(group: Group) -> dict[str, list[Average | None]]:
    """The averages that any of the runs has, by name, one a run."""
    of_run = [{one.name: one for one in run.averages if one.num_tasks} for run in group.runs]
    names = dict.fromkeys(one.name for run in group.runs for one in run.averages)
    found = {name: [averages.get(name) for averages in of_run] for name in names}
    return {name: column for name, column in found.items() if any(column)}


def _column(group: Group, name: str, averages: Sequence[Average | None] | None) -> tuple[Column, list[Cell]]:
    """The column of an average, or of a task where there is none of that name."""
    scores = averages or [run.scores.get(name) for run in group.runs]
    counts = [_count(one) for one in scores]
    shared = _shared_count(group, counts)
    note = shared if averages else ", ".join(filter(None, [TASKS[name].metric, shared]))
    cells = [_cell(one, "" if count == shared else count) for one, count in zip(scores, counts, strict=True)]
    return Column(name, note), _marked(group, cells)


def _rows(group: Group, columns: Sequence[Sequence[Cell]]) -> list[list[Cell]]:
    keys = [key_cells(run, group) for run in group.runs]
    return [[*key, *cells] for key, *cells in zip(keys, *columns, strict=True)]


def _part(table: Table, part: str, wanted: Sequence[str]) -> Table:
    chosen = [n for n, column in enumerate(table.columns) if n < table.num_keys or column.title in wanted]
    return replace(
        table,
        name=f"{table.name}-{part.lower().replace(' ', '_')}",
        title=f"{table.title}: {part}",
        columns=[table.columns[index] for index in chosen],
        rows=[[row[index] for index in chosen] for row in table.rows],
        records=[record for record in table.records if record["name"] in wanted],
    )


def _marked(group: Group, cells: list[Cell]) -> list[Cell]:
    """Mark the best of every budget among the finished runs; the full cache is the reference, not a rival."""
    for budget in {run.budget for run in group.runs}:
        rivals = [run.budget == budget and run.is_finished and run.policy != FULL_CACHE_POLICY for run in group.runs]
        cells = mark_best(cells, rivals)
    return cells


def _cell(one: TaskScore | Average | None, count: str) -> Cell:
    if one is None or one.score is None:
        return Cell(NO_VALUE)
    detail = " ".join(filter(None, [interval_text(one.ci_low, one.ci_high), count and f"({count})"]))
    return Cell(format_number(one.score, 2), one.score, detail, one.ci_low, one.ci_high)


def _short(one: TaskScore | Average | None, run: Run) -> Cell:
    """A cell without its interval; the count stays where the run is not finished."""
    return replace(_cell(one, ""), detail="" if one is None or run.is_finished else f"({_count(one)})")


def _count(one: TaskScore | Average | None) -> str:
    if one is None:
        return ""
    tasks = f"{one.num_tasks}/{one.expected_tasks} tasks, " if isinstance(one, Average) else ""
    return f"{tasks}{one.n}/{one.expected}"


def _counts(group: Group, task: str) -> list[str]:
    return [_count(run.scores.get(task)) for run in group.runs]


def _shared_count(group: Group, counts: Sequence[str]) -> str:
    """The count that all finished runs have, for the heading; "" if they differ."""
    finished = {count for run, count in zip(group.runs, counts, strict=True) if run.is_finished}
    return finished.pop() if len(finished) == 1 else ""


def _has_no_spread(run: Run) -> bool:
    return any(one.ci_low is not None and one.ci_low == one.ci_high for one in run.scores.values())
