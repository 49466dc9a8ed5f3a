"""Figures of scores: the answer, accuracy against budget, against the length of prompts, and against block size."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness.benchmarks.longbench.aggregates import BUCKETS, OVERALL, Average, bucket_of
from harness.benchmarks.longbench.tasks import PUBLISHED
from harness.benchmarks.scoring import TaskScore
from harness.benchmarks.tasks import TASKS
from harness.report.figures.figure import Figure, Look, Skipped
from harness.report.figures.marks import Axes, bars, in_plane, over_budgets
from harness.report.reading.runs import Group, Run, budget_text
from harness.report.tables.answer import Answer
from harness.report.tables.conditions import BUDGET_MEANING, setting, source_of_blocks, warnings
from harness.report.tables.grid import format_number, interval_text
from harness.statistics.stats import bootstrap_means, interval
from harness.store.predictions import Prediction

BUDGET_AXIS = "Budget (tokens per layer and KV head)"
MEMORY_PANEL, TIME_PANEL = "KV memory of a request, % of full cache", "Time a sample, % of full cache"
BARS = "Bars: 95 % intervals; dotted: that of the full cache."
MIN_LENGTHS, MAX_LENGTHS = 2, 12
SMALLEST_LENGTH = 512
LONGBENCH_E_AXIS = "Length of the row (LongBench-E: words)"
TOKENS_AXIS = "Prompt tokens"

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
            row = {"x": x, "y": one.kept, "low": one.kept_low, "high": one.kept_high}
            tip = f"{tip.strip()}, {x:.0f} % of the {share}"
            rows.append({"panel": panel, "series": one.run.series, **_rounded(row), "tip": tip})
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
    readers: dict[str, Callable[[Run], Score | None]] = {_overall_title(group): lambda run: run.averages[0]}
    readers |= {f"{task} ({TASKS[task].metric})": _score_of(task) for task in tasks}
    rows = [
        _score_row(run, panel, score)
        for panel, read in readers.items()
        for run in group.finished
        if (score := read(run)) is not None and score.score is not None
    ]
    unit = budget_unit(rows, looks, group.finished, y_title="Score", zero=False)
    caption = f"{_conditions(group)} {BARS} {BUDGET_MEANING}."
    title = f"Accuracy against budget, {group.title}"
    return Figure(name, title, caption, unit, rows, list(readers), group=group.name)


def length_figure(group: Group, looks: Looks) -> Figure | Skipped:
    """Mean score by length of the prompt: LongBench-E's buckets, the lengths a benchmark sets, else powers of two."""
    name = f"accuracy-by-length-{group.name}"
    axis, length_of = _lengths(group)
    found = {length for run in group.finished for one in run.predictions if (length := length_of(one))}
    order = sorted(found, key=lambda text: BUCKETS.index(text) if text in BUCKETS else int(text.split(" ")[-1]))
    if len(order) < MIN_LENGTHS:
        return Skipped(name, "all prompts are about as long")
    rows = []
    for run in group.finished:
        for length in order:
            samples = [one for one in run.predictions if length_of(one) == length]
            if samples:
                rows.append(_length_row(run, length, samples))
    unit = over_budgets([row["series"] for row in rows], looks, order, Axes(axis, "Score", zero=False))
    caption = (
        f"{_conditions(group)} Mean of the task means of the samples of one length, whatever their task; "
        "bars: 95 % intervals over samples."
    )
    title = f"Accuracy by length of the prompt, {group.title}"
    return Figure(name, title, caption, unit, rows, group=group.name)


def block_size_rows(group: Group) -> list[dict[str, Any]]:
    """Mean of tasks by block size, none with fewer than two block sizes."""
    runs = [run for run in group.finished if run.averages[0].score is not None]
    if len({run.block_size for run in runs}) < MIN_LENGTHS:
        return []
    rows = [_score_row(run, f"{group.title}: score", run.averages[0]) for run in runs]
    for row, run in zip(rows, runs, strict=True):
        row |= {"series": _with_budget(run.policy, run.budget), "x": str(run.block_size), "kind": "point"}
    return rows


def budget_unit(
    rows: Sequence[Mapping[str, Any]], looks: Looks, runs: Sequence[Any], y_title: str | None, zero: bool
) -> dict[str, Any]:
    """The declaration of rows over budgets: bars where there is one budget at most, else lines."""
    names = [row["series"] for row in rows]
    budgets = sorted({run.budget for run in runs if run.budget is not None})
    if len(budgets) < MIN_LENGTHS:
        return bars(names, looks, y_title)
    texts = [budget_text(budget) for budget in budgets]
    return over_budgets(names, looks, texts, Axes(BUDGET_AXIS, y_title, zero))


def _score_row(run: Run, panel: str, score: Score) -> dict[str, Any]:
    tip = f"{run.label}: {format_number(score.score, 2)} {interval_text(score.ci_low, score.ci_high)}".strip()
    row = {"y": score.score, "low": score.ci_low, "high": score.ci_high}
    place = {"kind": "level"} if run.budget is None else {"kind": "point", "x": budget_text(run.budget)}
    return {"panel": panel, "series": run.series, **place, **row, "tip": f"{tip}, n = {score.n}/{score.expected}"}


def _length_row(run: Run, length: str, samples: Sequence[Prediction]) -> dict[str, Any]:
    by_task: dict[str, list[float]] = {}
    for one in samples:
        by_task.setdefault(one.task, []).append(100 * one.score)
    score = sum(sum(scores) / len(scores) for scores in by_task.values()) / len(by_task)
    flat = [100 * one.score for one in samples]
    low, high = interval(bootstrap_means(flat, [one.context_sha256 for one in samples])) or (None, None)
    tip = f"{run.label}, {length}: {score:.1f} {interval_text(low, high)}".strip() + f", n = {len(samples)}"
    row = _rounded({"y": score, "low": low, "high": high})
    return {"panel": "", "series": run.label, "x": length, "kind": "point", **row, "tip": tip}


def _lengths(group: Group) -> tuple[str, Callable[[Prediction], str]]:
    benchmark = group.runs[0].manifest.config["benchmark"]
    if benchmark["longbench_e"]:
        return LONGBENCH_E_AXIS, lambda one: bucket_of(one.length)
    lengths = {one.length for run in group.runs for one in run.predictions}
    if len(lengths) <= MAX_LENGTHS and all(task not in PUBLISHED for run in group.runs for task in run.scores):
        return "Length set by the benchmark (tokens)", lambda one: str(one.length)
    return TOKENS_AXIS, _power_of_two


def _power_of_two(one: Prediction) -> str:
    """The power of two that the prompt is not longer than, at least `SMALLEST_LENGTH`."""
    return f"up to {max(SMALLEST_LENGTH, 1 << (one.num_prompt_tokens - 1).bit_length())}"


def _overall_title(group: Group) -> str:
    counts = {run.averages[0].num_tasks for run in group.finished}
    if counts == {len(PUBLISHED)}:
        return f"mean of {OVERALL}"
    return f"mean of {'/'.join(str(count) for count in sorted(counts))} tasks"


def _score_of(task: str) -> Callable[[Run], TaskScore | None]:
    return lambda run: run.scores.get(task)


def _with_budget(name: str, budget: float | None) -> str:
    return name if budget is None else f"{name} @ {budget_text(budget)}"


def _conditions(group: Group) -> str:
    return " ".join([setting(group), *warnings(group)])


def _rounded(row: Mapping[str, float | None]) -> dict[str, float | None]:
    return {key: None if value is None else round(value, 3) for key, value in row.items()}
