"""Tables of scores: a row a run, a column an average or a task."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.benchmarks.longbench.aggregates import ENGLISH, OVERALL, Average
from harness.benchmarks.longbench.own_averages import SHORT_NAMES
from harness.benchmarks.scoring import TaskScore
from harness.benchmarks.tasks import TASKS
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

MAX_PRINTED_TASKS = 8
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
    """The mean of all tasks and of the English ones, then all tasks: LongBench's order, then own ones, 0 to 100.

    The mean of a single task is left out. LaTeX has the tasks only where there are few: for many of them papers print
    `papers_table`.
    """
    averages, tasks = _averages(group), _tasks(group)
    means = [name for name in (group.runs[0].averages[0].name, ENGLISH) if name in averages and len(tasks) > 1]
    columns = [_column(group, name, averages[name]) for name in means]
    columns += [_column(group, name, in_print=len(tasks) <= MAX_PRINTED_TASKS) for name in tasks]
    spread = [NO_SPREAD] if any(_has_no_spread(run) for run in group.runs) else []
    caption = f"{MEANING} {MARKS} {parameters(group)}"
    return _table(group, "accuracy", "Accuracy", caption, columns, notes=spread)


def papers_table(group: Group) -> Table | None:
    """The table of the papers on eviction: 16 tasks in their order and the mean; None with fewer than two."""
    averages = _averages(group)
    if len(_tasks(group)) < 2 or ENGLISH not in averages:
        return None
    present = [task for task in SHORT_NAMES if task in _tasks(group)]
    columns = [_short_column(group, SHORT_NAMES[task], _task_scores(group, task)) for task in present]
    mean, cells = _short_column(group, "Avg.", averages[ENGLISH])
    count = f"{len(present)} tasks" if len(present) == len(SHORT_NAMES) else f"{len(present)} of 16 tasks"
    caption = f"{PAPERS} {MARKS} Intervals: table of accuracy."
    columns.append((replace(mean, note=count), cells))
    return _table(group, "papers", "LongBench as papers print it", caption, columns, (*SHORT_NAMES, ENGLISH))


def own_averages_table(group: Group) -> Table | None:
    """LongBench's own averages and the mean over all tasks; None with fewer than two tasks."""
    averages = _averages(group)
    if len(_tasks(group)) < 2 or OVERALL not in averages:
        return None
    names = [name for name in averages if name != ENGLISH]
    columns = [_column(group, name, averages[name]) for name in names]
    caption = f"{OWN_AVERAGES} {INTERVAL_MEANING}. {MARKS}"
    return _table(group, "longbench", "LongBench's own averages", caption, columns, names)


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


def _task_scores(group: Group, task: str) -> list[TaskScore | None]:
    return [run.scores.get(task) for run in group.runs]


def _column(
    group: Group, name: str, averages: Sequence[Average | None] | None = None, in_print: bool = True
) -> tuple[Column, list[Cell]]:
    """The column of an average, or of a task where there is none of that name."""
    scores = averages or _task_scores(group, name)
    counts = [_count(one) for one in scores]
    shared = _shared_count(group, counts)
    note = shared if averages else ", ".join(filter(None, [TASKS[name].metric, shared]))
    cells = [_cell(one, "" if count == shared else count) for one, count in zip(scores, counts, strict=True)]
    return Column(name, note, in_print=in_print), _marked(group, cells)


def _short_column(group: Group, title: str, scores: Sequence[TaskScore | Average | None]) -> tuple[Column, list[Cell]]:
    """Without intervals; the count stays where a run is not finished."""
    counts = [_count(one) for one in scores]
    details = [f"({n})" if n and not run.is_finished else "" for n, run in zip(counts, group.runs, strict=True)]
    cells = [replace(_cell(one, ""), detail=detail) for one, detail in zip(scores, details, strict=True)]
    return Column(title, _shared_count(group, counts)), _marked(group, cells)


def _table(
    group: Group,
    part: str,
    title: str,
    caption: str,
    columns: Sequence[tuple[Column, Sequence[Cell]]],
    names: Sequence[str] | None = None,
    notes: Sequence[str] = (),
) -> Table:
    """A row a run; its records are those of `names`, or all."""
    keys = key_columns(group)
    rows = zip(group.runs, *(cells for _, cells in columns), strict=True)
    return Table(
        name=f"{part}-{group.name}",
        title=f"{title}, {group.title}",
        caption=f"{setting(group)} {caption}",
        columns=[*keys, *(column for column, _ in columns)],
        rows=[[*key_cells(run, group), *cells] for run, *cells in rows],
        num_keys=len(keys),
        notes=[*warnings(group), *notes],
        records=[one for one in accuracy_records(group) if names is None or one["name"] in names],
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


def _count(one: TaskScore | Average | None) -> str:
    if one is None:
        return ""
    tasks = f"{one.num_tasks}/{one.expected_tasks} tasks, " if isinstance(one, Average) else ""
    return f"{tasks}{one.n}/{one.expected}"


def _shared_count(group: Group, counts: Sequence[str]) -> str:
    """The count that all finished runs have, for the heading; "" if they differ."""
    finished = {count for run, count in zip(group.runs, counts, strict=True) if run.is_finished}
    return finished.pop() if len(finished) == 1 else ""


def _has_no_spread(run: Run) -> bool:
    return any(one.ci_low is not None and one.ci_low == one.ci_high for one in run.scores.values())
