"""Tables of scores: a row a run, a column an average or a task."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.benchmarks.longbench.aggregates import Average
from harness.benchmarks.scoring import TaskScore
from harness.benchmarks.task import CATEGORIES, OWN
from harness.benchmarks.tasks import TASKS
from harness.report.conditions import (
    BUDGET_MEANING,
    INTERVAL_MEANING,
    key_cells,
    key_columns,
    key_record,
    parameters,
    setting,
    warnings,
)
from harness.report.grid import NO_VALUE, Cell, Column, Table, format_number, mark_best
from harness.report.runs import FULL_CACHE_POLICY, Group, Run
from harness.report.writers import select_columns

AVERAGES = "averages"
MEANING = (
    "Scores 0 to 100; an average is the mean of its task scores. n/N: samples scored of those the task has. "
    f"{BUDGET_MEANING}. {INTERVAL_MEANING}."
)
MARKS = (
    "Bold: the best of a budget, the full cache and unfinished runs apart; ≈: inside the 95 % interval of the best; "
    "†: unfinished."
)


def accuracy_table(group: Group) -> Table:
    """All averages and tasks of a group: LongBench's categories and order, then own tasks, 0 to 100."""
    keys = key_columns(group)
    tasks = _tasks(group)
    scores = {task: [run.scores.get(task) for run in group.runs] for task in tasks}
    averages = list(zip(*(run.averages for run in group.runs), strict=True))
    averages = [column for column in averages if any(one.num_tasks for one in column)]
    columns = [*keys]
    cells = [list(column) for column in zip(*(key_cells(run, group) for run in group.runs), strict=True)]
    for column in averages:
        count = _shared_count(group, [_tasks_of(one) for one in column])
        columns.append(Column(column[0].name, count))
        cells.append(_marked(group, [_average_cell(one, count) for one in column]))
    for task, column in scores.items():
        count = _shared_count(group, [_count(one) for one in column])
        columns.append(Column(task, ", ".join(filter(None, [TASKS[task].metric, count]))))
        cells.append(_marked(group, [_task_cell(one, count) for one in column]))
    return Table(
        name=f"accuracy-{group.name}",
        title=f"Accuracy, {group.title}",
        caption=" ".join([setting(group), MEANING, MARKS, parameters(group)]),
        columns=columns,
        rows=[list(row) for row in zip(*cells, strict=True)],
        num_keys=len(keys),
        notes=warnings(group),
        records=accuracy_records(group),
    )


def by_category(table: Table) -> list[Table]:
    """The wide table cut for paper: the averages, then a table a category, and own tasks, with tasks and average."""
    titles = {column.title for column in table.columns}
    parts = {AVERAGES: [title for title in titles if title not in TASKS]}
    for category in (*CATEGORIES, OWN):
        names = [name for name in titles if name in TASKS and TASKS[name].category == category]
        if names:
            parts[category] = [category, *names]
    narrow = []
    for part, wanted in parts.items():
        slug = part.lower().replace(" ", "_")
        records = [record for record in table.records if record["name"] in wanted]
        cut = select_columns(table, f"{table.name}-{slug}", f"{table.title}: {part}", wanted)
        narrow.append(replace(cut, records=records))
    return narrow


def accuracy_records(group: Group) -> list[dict[str, Any]]:
    """One record a run and average or task, with n, interval and metric."""
    return [record for run in group.runs for record in (*_average_records(run), *_task_records(run))]


def _tasks(group: Group) -> list[str]:
    present = {task for run in group.runs for task in run.scores}
    return [task for task in TASKS if task in present]


def _marked(group: Group, cells: list[Cell]) -> list[Cell]:
    """Mark the best of every budget among the finished runs; the full cache is the reference, not a rival."""
    for budget in {run.budget for run in group.runs}:
        rivals = [run.budget == budget and run.is_finished and run.policy != FULL_CACHE_POLICY for run in group.runs]
        cells = mark_best(cells, rivals)
    return cells


def _task_cell(score: TaskScore | None, shared_count: str) -> Cell:
    if score is None:
        return Cell(NO_VALUE)
    return _score_cell(score.score, score.ci_low, score.ci_high, _own_count(_count(score), shared_count))


def _average_cell(one: Average, shared_count: str) -> Cell:
    return _score_cell(one.score, one.ci_low, one.ci_high, _own_count(_tasks_of(one), shared_count))


def _own_count(count: str, shared_count: str) -> str:
    return "" if count == shared_count else f" ({count})"


def _score_cell(score: float | None, low: float | None, high: float | None, count: str) -> Cell:
    if score is None:
        return Cell(NO_VALUE)
    half = "" if low is None or high is None else f" ± {format_number((high - low) / 2, 2)}"
    return Cell(f"{format_number(score, 2)}{half}{count}", score, low, high)


def _count(score: TaskScore | None) -> str:
    return "" if score is None else f"{score.n}/{score.expected}"


def _tasks_of(one: Average) -> str:
    return f"{one.num_tasks}/{one.expected_tasks} tasks, {one.n}/{one.expected}"


def _shared_count(group: Group, counts: Sequence[str]) -> str:
    """The count that all finished runs have, for the heading; "" if they differ."""
    finished = {count for run, count in zip(group.runs, counts, strict=True) if run.is_finished}
    return finished.pop() if len(finished) == 1 else ""


def _task_records(run: Run) -> list[dict[str, Any]]:
    return [
        key_record(run)
        | {
            "level": "task",
            "name": task,
            "metric": TASKS[task].metric,
            "score": score.score,
            "ci_low": score.ci_low,
            "ci_high": score.ci_high,
            "n": score.n,
            "expected": score.expected,
            "num_tasks": 1,
            "expected_tasks": 1,
            "partial": score.n < score.expected or not run.is_finished,
        }
        for task, score in run.scores.items()
    ]


def _average_records(run: Run) -> list[dict[str, Any]]:
    return [
        key_record(run)
        | {
            "level": "average",
            "name": one.name,
            "metric": "mean of task scores",
            "score": one.score,
            "ci_low": one.ci_low,
            "ci_high": one.ci_high,
            "n": one.n,
            "expected": one.expected,
            "num_tasks": one.num_tasks,
            "expected_tasks": one.expected_tasks,
            "partial": one.partial or not run.is_finished,
        }
        for one in run.averages
        if one.num_tasks
    ]
