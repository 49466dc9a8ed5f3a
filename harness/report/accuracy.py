"""Tables of scores: a row a run, a column an average or a task."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.longbench.aggregates import Average
from harness.longbench.scoring import TaskScore
from harness.longbench.tasks import CATEGORIES, TASKS
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
COUNTS = "n/N: samples scored of those the task has; an average is the mean of its task scores."
MARKS = (
    "Bold: the best of a budget, the full cache and unfinished runs apart; ≈: inside the 95 % interval of the best; "
    "†: unfinished."
)


def accuracy_table(group: Group) -> Table:
    """All averages and tasks of a group: LongBench's categories and order, 0 to 100."""
    keys = key_columns(group)
    tasks = _tasks(group)
    scores = {task: [run.scores.get(task) for run in group.runs] for task in tasks}
    averages = list(zip(*(run.averages for run in group.runs), strict=True))
    averages = [column for column in averages if any(one.num_tasks for one in column)]
    columns = [*keys]
    cells = [list(column) for column in zip(*(key_cells(run, group) for run in group.runs), strict=True)]
    for column in averages:
        columns.append(Column(column[0].name, _shared_note([_tasks_of(one) for one in column])))
        cells.append(_marked(group, [_average_cell(one, columns[-1]) for one in column]))
    for task, column in scores.items():
        count = _shared_note([_count(one) for one in column])
        columns.append(Column(task, f"{TASKS[task].metric}{count and ', '}{count}"))
        cells.append(_marked(group, [_task_cell(one, not count) for one in column]))
    return Table(
        name=f"accuracy-{group.name}",
        title=f"Accuracy, {group.title}",
        caption=" ".join([setting(group), f"Scores 0 to 100. {COUNTS} {BUDGET_MEANING}. {INTERVAL_MEANING}.", MARKS]),
        columns=columns,
        rows=[list(row) for row in zip(*cells, strict=True)],
        num_keys=len(keys),
        notes=[*warnings(group), parameters(group)],
        records=accuracy_records(group),
    )


def by_category(table: Table) -> list[Table]:
    """The wide table cut for paper: the averages, then one table a category with its tasks and its average."""
    titles = {column.title for column in table.columns}
    parts = {AVERAGES: [title for title in titles if title not in TASKS]}
    for category in CATEGORIES:
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


def _task_cell(score: TaskScore | None, with_count: bool) -> Cell:
    if score is None:
        return Cell(NO_VALUE)
    count = f" ({_count(score)})" if with_count else ""
    return _score_cell(score.score, score.ci_low, score.ci_high, count)


def _average_cell(one: Average, column: Column) -> Cell:
    count = "" if column.note else f" ({_tasks_of(one)})"
    return _score_cell(one.score, one.ci_low, one.ci_high, count)


def _score_cell(score: float | None, low: float | None, high: float | None, count: str) -> Cell:
    if score is None:
        return Cell(NO_VALUE)
    half = "" if low is None or high is None else f" ± {format_number((high - low) / 2, 2)}"
    return Cell(f"{format_number(score, 2)}{half}{count}", score, low, high)


def _count(score: TaskScore | None) -> str:
    return "" if score is None else f"{score.n}/{score.expected}"


def _tasks_of(one: Average) -> str:
    return f"{one.num_tasks}/{one.expected_tasks} tasks, {one.n}/{one.expected}"


def _shared_note(notes: Sequence[str]) -> str:
    """The note that all have, "" if they differ."""
    return notes[0] if len(set(notes)) == 1 else ""


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
