"""Figures of scores: the answer, accuracy against budget, against the length of prompts, and against block size."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness.benchmarks.longbench.aggregates import OVERALL, Average
from harness.benchmarks.longbench.tasks import PUBLISHED
from harness.benchmarks.scoring import TaskScore
from harness.benchmarks.tasks import TASKS
from harness.by_length import ALL_TASKS, length_axis, order
from harness.report.figures.figure import Figure, Look, Skipped
from harness.report.figures.marks import Axes, budget_unit, in_plane, over_budgets, point, with_budget
from harness.report.reading.runs import Group, Run, budget_text
from harness.report.tables.answer import Answer
from harness.report.tables.conditions import BUDGET_MEANING, setting, source_of_blocks, warnings
from harness.report.tables.grid import interval_text, range_text

MEMORY_PANEL, TIME_PANEL = "KV memory of a request, % of full cache", "Time a sample, % of full cache"
BARS = "Bars: 95 % intervals; dotted: that of the full cache."
MIN_LENGTHS = 2

Score = TaskScore | Average
Looks = Mapping[str, Look]


def answer_figure(group: Group, answers: Sequence[Answer], looks: Looks) -> Figure | Skipped:
    """Score kept against memory and against time, both in percent of the full cache."""
    name = f"answer-{group.name}"
    rows = []
    for panel, share in ((MEMORY_PANEL, "memory"), (TIME_PANEL, "time")):
        for one in answers:
            x = getattr(one, share)
            if x is None or one.kept is None:
                continue
            tip = f"{one.run.label}: {one.kept:.0f} % of the score {interval_text(one.kept_low, one.kept_high, 0)}"
            tip = f"{tip.strip()}, {x:.0f} % of the {share}"
            rows.append(point(panel, one.run.series, round(x, 3), (one.kept, one.kept_low, one.kept_high), tip))
    if len({row["series"] for row in rows}) < 2:
        return Skipped(name, "no finished run beside a full cache that recorded block usage")
    names = [row["series"] for row in rows]
    unit = in_plane(names, looks, Axes(None, "Score kept, % of full cache", zero=False))
    caption = (
        f"{setting(group)} {source_of_blocks(group)} Up and to the left is better. One point a budget; memory: blocks "
        "of a running request, mean over time; bars: 95 % intervals of the paired difference."
    )
    panels = [panel for panel in (MEMORY_PANEL, TIME_PANEL) if any(row["panel"] == panel for row in rows)]
    title = f"Score kept against memory and time, {group.title}"
    return Figure(name, title, caption, unit, rows, panels, group=group.name, size=(300, 240))


def accuracy_figure(group: Group, looks: Looks) -> Figure | Skipped:
    """Score against budget: a panel for the mean of tasks, then one a task; bars where there is one budget."""
    name = f"accuracy-vs-budget-{group.name}"
    if not any(run.budget is not None for run in group.finished):
        return Skipped(name, "no finished run with a budget")
    tasks = [task for task in TASKS if any(task in run.scores for run in group.finished)]
    readers: dict[str, Callable[[Run], Score | None]] = {}
    if len(tasks) > 1:
        readers[_overall_title(group)] = lambda run: run.averages[0]
    readers |= {f"{task} ({TASKS[task].metric})": _score_of(task) for task in tasks}
    rows = [
        _score_point(run, panel, score)
        for panel, read in readers.items()
        for run in group.finished
        if (score := read(run)) is not None and score.score is not None
    ]
    unit = budget_unit(rows, looks, (run.budget for run in group.finished), Axes(None, "Score", zero=False))
    caption = f"{_conditions(group)} {BARS} {BUDGET_MEANING}."
    title = f"Accuracy against budget, {group.title}"
    return Figure(name, title, caption, unit, rows, list(readers), group=group.name)


def length_figure(group: Group, looks: Looks) -> Figure | Skipped:
    """Mean of tasks by length of the prompt, see `harness.by_length`."""
    name = f"accuracy-by-length-{group.name}"
    rows = [
        _length_point(run, found)
        for run in group.finished
        for found in run.metrics["by_length"]
        if found["task"] == ALL_TASKS
    ]
    lengths = sorted({row["x"] for row in rows}, key=order)
    if len(lengths) < MIN_LENGTHS:
        return Skipped(name, "all prompts are about as long")
    axis = length_axis(group.runs[0].manifest)
    unit = over_budgets([row["series"] for row in rows], looks, lengths, Axes(axis, "Score", zero=False))
    caption = f"{_conditions(group)} Mean of the tasks, of the samples of one length; bars: 95 % intervals."
    return Figure(name, f"Accuracy by length of the prompt, {group.title}", caption, unit, rows, group=group.name)


def block_size_rows(group: Group) -> list[dict[str, Any]]:
    """Mean of tasks by block size, none with fewer than two block sizes."""
    runs = [run for run in group.finished if run.averages[0].score is not None]
    if len({run.block_size for run in runs}) < MIN_LENGTHS:
        return []
    panel = f"{group.title}: score"
    return [
        _score_point(run, panel, run.averages[0], str(run.block_size), with_budget(run.policy, run.budget))
        for run in runs
    ]


def _score_point(run: Run, panel: str, score: Score, x: str | None = None, series: str | None = None) -> dict[str, Any]:
    ends = score.score, score.ci_low, score.ci_high
    tip = f"{run.label}: {range_text(*ends)}, n = {score.n}/{score.expected}"
    return point(panel, series or run.series, x or budget_text(run.budget) or None, ends, tip)


def _length_point(run: Run, found: Mapping[str, Any]) -> dict[str, Any]:
    ends = found["score"], found["ci_low"], found["ci_high"]
    tip = f"{run.label}, {found['length']}: {range_text(*ends)}, n = {found['num_samples']}"
    return point("", run.label, str(found["length"]), ends, tip)


def _overall_title(group: Group) -> str:
    counts = {run.averages[0].num_tasks for run in group.finished}
    if counts == {len(PUBLISHED)}:
        return f"mean of {OVERALL}"
    return f"mean of {'/'.join(str(count) for count in sorted(counts))} tasks"


def _score_of(task: str) -> Callable[[Run], TaskScore | None]:
    return lambda run: run.scores.get(task)


def _conditions(group: Group) -> str:
    return " ".join([setting(group), *warnings(group)])
