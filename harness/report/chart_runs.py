"""Charts of LongBench runs: accuracy against budget and memory, blocks over time."""

from collections.abc import Callable, Iterable, Sequence

from harness.benchmarks.longbench.aggregates import OVERALL, Average
from harness.benchmarks.longbench.tasks import PUBLISHED
from harness.benchmarks.scoring import TaskScore
from harness.benchmarks.tasks import TASKS
from harness.engines.contract import BlockUsageSample
from harness.report.charts import Chart, Panel, Point, Series, Skipped
from harness.report.conditions import BUDGET_MEANING, setting, source_of_blocks, warnings
from harness.report.costs import request_kv_mib
from harness.report.runs import Group, Run
from harness.report.usage import read_usage

MAX_STEPS = 300
BUDGET_AXIS = "Budget (tokens per layer and KV head)"
SCORE_AXIS = "Score"
BLOCK_AXIS = "Block size (tokens)"
MEMORY_AXIS = "KV memory of a running request, mean (MiB)"
ACCURACY = "accuracy-vs-budget"
PARETO = "accuracy-vs-memory"
USAGE = "blocks-over-time"


def accuracy_chart(group: Group) -> Chart | Skipped:
    """Score against budget: a panel for the mean of tasks, then one a task; the full cache as a level."""
    name = f"{ACCURACY}-{group.name}"
    if not any(run.budget is not None for run in group.finished):
        return Skipped(name, "no finished run with a budget")
    tasks = [task for task in TASKS if any(task in run.scores for run in group.finished)]
    panels = [_accuracy_panel(group, _overall_title(group), _overall)]
    panels += [_accuracy_panel(group, f"{task} ({TASKS[task].metric})", _score_of(task)) for task in tasks]
    caption = f"{_conditions(group)} Bands: 95 % intervals. {BUDGET_MEANING}."
    return Chart(name, f"Accuracy against budget, {group.title}", caption, panels)


def pareto_chart(group: Group) -> Chart | Skipped:
    """Mean of tasks against the KV memory of a running request."""
    name = f"{PARETO}-{group.name}"
    series = []
    for key, runs in _by_series(group.finished).items():
        points = [
            Point(memory, score.score, score.ci_low, score.ci_high, run.label)
            for run in runs
            if (memory := request_kv_mib(run)) is not None and (score := _overall(run)).score is not None
        ]
        if points:
            series.append(Series(key, points))
    if not series:
        return Skipped(name, "no finished run recorded block usage")
    panel = Panel(_overall_title(group), MEMORY_AXIS, SCORE_AXIS, series)
    meaning = (
        "One point a budget. Memory: blocks of a running request, mean over engine steps, so that it does not depend "
        "on how many ran at once. Bands and bars: 95 % intervals."
    )
    caption = f"{_conditions(group)} {source_of_blocks(group)} {meaning}"
    return Chart(name, f"Accuracy against KV memory, {group.title}", caption, [panel])


def usage_chart(group: Group) -> Chart | Skipped:
    """KV blocks in use after every engine step, a series a run."""
    name = f"{USAGE}-{group.name}"
    recorded = [(run, read_usage(run)) for run in group.runs]
    series = [Series(run.label, _thinned(usage), "steps") for run, usage in recorded if usage]
    if not series:
        return Skipped(name, "no run recorded block usage")
    panel = Panel(group.title, "Time since the first engine step (s)", "KV blocks in use", series)
    blocks = ", ".join(sorted({str(run.block_size) for run in group.runs}))
    caption = f"{_conditions(group)} Blocks of {blocks} tokens. {source_of_blocks(group)}"
    return Chart(name, f"KV blocks over time, {group.title}", caption, [panel])


def page_size_panel(group: Group) -> Panel | None:
    """Mean of tasks against block size, None with fewer than two block sizes."""
    runs = [run for run in group.finished if _overall(run).score is not None]
    if len({run.block_size for run in runs}) < 2:
        return None
    named: dict[str, list[Run]] = {}
    for run in runs:
        named.setdefault(run.policy if run.budget is None else f"{run.policy} @ {run.budget}", []).append(run)
    series = [
        Series(name, [_point(run.block_size, _overall(run), run.label) for run in sorted(members, key=_block_size)])
        for name, members in named.items()
    ]
    return Panel(group.title, BLOCK_AXIS, f"{SCORE_AXIS}, mean of tasks", series, log_x=True)


def _accuracy_panel(group: Group, title: str, score_of: Callable[[Run], TaskScore | Average | None]) -> Panel:
    series = []
    for key, runs in _by_series(group.finished).items():
        scored = [(run, score) for run in runs if (score := score_of(run)) is not None and score.score is not None]
        points = [_point(run.budget or 0, score, f"n = {score.n}/{score.expected}") for run, score in scored]
        if points:
            series.append(Series(key, points, "reference" if runs[0].budget is None else "line"))
    return Panel(title, BUDGET_AXIS, SCORE_AXIS, series, log_x=True)


def _point(x: float, score: TaskScore | Average, label: str) -> Point:
    return Point(x, score.score or 0.0, score.ci_low, score.ci_high, label)


def _by_series(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs that differ in budget only, by name, the budgets ascending."""
    named: dict[str, list[Run]] = {}
    for run in runs:
        named.setdefault(run.series, []).append(run)
    return named


def _overall(run: Run) -> Average:
    return run.averages[0]


def _overall_title(group: Group) -> str:
    counts = {_overall(run).num_tasks for run in group.finished}
    return (
        f"mean of {OVERALL}"
        if counts == {len(PUBLISHED)}
        else f"mean of {'/'.join(str(count) for count in sorted(counts))} tasks"
    )


def _score_of(task: str) -> Callable[[Run], TaskScore | None]:
    return lambda run: run.scores.get(task)


def _block_size(run: Run) -> int:
    return run.block_size


def _conditions(group: Group) -> str:
    return " ".join([setting(group), *warnings(group)])


def _thinned(usage: Sequence[BlockUsageSample]) -> list[Point]:
    """At most `MAX_STEPS` points; of the steps that share one, that with the most blocks, so that peaks stay."""
    size = -(-len(usage) // MAX_STEPS)
    chosen = [max(usage[start : start + size], key=_blocks) for start in range(0, len(usage), size)]
    return [Point(step.t_s, step.blocks, label=f"{step.running} running") for step in chosen]


def _blocks(step: BlockUsageSample) -> int:
    return step.blocks
