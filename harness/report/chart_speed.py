"""Charts of speed: throughput and latency against budget, and against block size."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.report.bench_runs import FILE_NAME, BenchRow, BenchSetting, has_several, settings
from harness.report.chart_runs import BLOCK_AXIS, BUDGET_AXIS, page_size_panel
from harness.report.charts import Chart, Panel, Point, Series, Skipped
from harness.report.conditions import setting, speed_warnings
from harness.report.runs import Group, Run
from harness.report.usage import e2e, total_tokens_per_s, tpot, ttft

THROUGHPUT = "throughput-vs-budget"
LATENCY = "latency-vs-budget"
PAGE_SIZE = "page-size"
OUTPUT_AXIS = "Output tokens/s"
TOTAL_AXIS = "Prompt and output tokens/s"
LATENCIES = {"ttft": ("TTFT (s)", ttft), "tpot": ("TPOT (s)", tpot), "e2e": ("End to end (s)", e2e)}
NO_BENCH = f"no load test ({FILE_NAME}) was found"
NO_TIMES = "no finished run recorded times"
BENCH_CAPTION = "Load tests. Points: median over repeats; bands and bars: smallest to largest."
RUN_CAPTION = "All samples were sent at once; one run a point, no repeats."
LATENCY_CAPTION = "Points: median; bands and bars end at the 99th percentile."


@dataclass(frozen=True)
class Speed:
    """One measurement; without a budget it is a level for the others and `point.x` means nothing."""

    series: str
    budget: int | None
    point: Point


def throughput_charts(groups: Sequence[Group], bench: Sequence[BenchRow]) -> list[Chart | Skipped]:
    """Tokens a second against budget: of load tests, and of every group of LongBench runs."""
    panels = [
        _panel(title, axis, [_of_bench(one, field, field) for one in members])
        for title, members in _by_load(bench).items()
        for field, axis in (("output_tok_s", OUTPUT_AXIS), ("total_tok_s", TOTAL_AXIS))
    ]
    charts = [_chart(f"{THROUGHPUT}-bench", "Throughput against budget, load tests", BENCH_CAPTION, panels, NO_BENCH)]
    for group in groups:
        output = [_of_run(run, run.metrics["speed"]["output_tokens_per_s"]) for run in group.finished]
        total = [_of_run(run, total_tokens_per_s(run)) for run in group.finished]
        panels = [_panel(group.title, OUTPUT_AXIS, output), _panel(group.title, TOTAL_AXIS, total)]
        title = f"Throughput against budget, {group.title}"
        charts.append(_chart(f"{THROUGHPUT}-{group.name}", title, _run_caption(group), panels, NO_TIMES))
    return charts


def latency_charts(groups: Sequence[Group], bench: Sequence[BenchRow]) -> list[Chart | Skipped]:
    """Time to first token, time a token, whole time against budget: median and 99th percentile."""
    panels = [
        _panel(title, axis, [_of_bench(one, f"{key}_p50", f"{key}_p99") for one in members])
        for title, members in _by_load(bench).items()
        for key, (axis, _) in LATENCIES.items()
    ]
    charts = [
        _chart(
            f"{LATENCY}-bench", "Latency against budget, load tests", f"Load tests. {LATENCY_CAPTION}", panels, NO_BENCH
        )
    ]
    for group in groups:
        panels = []
        for axis, of in LATENCIES.values():
            found = [(run, of(run.predictions)) for run in group.finished]
            speeds = [_of_run(run, times and times.p50, times and times.p99) for run, times in found]
            panels.append(_panel(group.title, axis, speeds))
        caption = f"{_run_caption(group)} {LATENCY_CAPTION}"
        charts.append(
            _chart(f"{LATENCY}-{group.name}", f"Latency against budget, {group.title}", caption, panels, NO_TIMES)
        )
    return charts


def page_size_chart(groups: Sequence[Group], bench: Sequence[BenchRow]) -> Chart | Skipped:
    """Throughput and accuracy against block size, where more than one was tried."""
    panels: list[Panel | None] = [page_size_panel(group) for group in groups]
    by_load: dict[str, dict[str, list[Point]]] = {}
    for one in settings(bench):
        row = one.rows[0]
        name = row.series if row.budget is None else f"{row.series} @ {row.budget}"
        title = _title(row, (row.model, row.load, row.device), bench)
        by_load.setdefault(title, {}).setdefault(name, []).append(_spread(one, row.block_size, "total_tok_s"))
    for title, named in by_load.items():
        if len({point.x for points in named.values() for point in points}) > 1:
            series = [Series(name, points) for name, points in named.items()]
            panels.append(Panel(title, BLOCK_AXIS, TOTAL_AXIS, series, log_x=True))
    found = [panel for panel in panels if panel is not None]
    if not found:
        return Skipped(PAGE_SIZE, "all runs of a group have one block size")
    return Chart(
        PAGE_SIZE,
        "Block size",
        "Points of load tests: median over repeats; bands and bars: smallest to largest.",
        found,
    )


def _chart(name: str, title: str, caption: str, panels: Sequence[Panel | None], reason: str) -> Chart | Skipped:
    found = [panel for panel in panels if panel is not None]
    return Chart(name, title, caption, found) if found else Skipped(name, reason)


def _panel(title: str, axis: str, speeds: Sequence[Speed | None]) -> Panel | None:
    named: dict[str, list[Speed]] = {}
    for speed in speeds:
        if speed is not None:
            named.setdefault(speed.series, []).append(speed)
    series = [
        Series(name, [one.point for one in members], "reference" if members[0].budget is None else "line")
        for name, members in named.items()
    ]
    return Panel(title, BUDGET_AXIS, axis, series, log_x=True) if series else None


def _of_run(run: Run, value: float | None, high: float | None = None) -> Speed | None:
    if value is None:
        return None
    point = Point(run.budget or 0, value, None if high is None else value, high)
    return Speed(run.series, run.budget, point)


def _of_bench(one: BenchSetting, field: str, high_field: str) -> Speed | None:
    row = one.rows[0]
    if one.median(field) is None:
        return None
    x = row.budget or 0
    spread = _spread(one, x, field)
    point = spread if field == high_field else Point(x, spread.y, spread.y, one.median(high_field), spread.label)
    return Speed(row.series, row.budget, point)


def _spread(one: BenchSetting, x: float, field: str) -> Point:
    values = [getattr(row, field) for row in one.rows if getattr(row, field) is not None]
    return Point(x, one.median(field) or 0.0, min(values), max(values), f"{len(values)} repeats")


def _by_load(bench: Sequence[BenchRow]) -> dict[str, list[BenchSetting]]:
    """Settings that differ in policy and budget only, by what they share."""
    shared: dict[str, list[BenchSetting]] = {}
    for one in settings(bench):
        row = one.rows[0]
        title = _title(row, (row.model, row.load, f"block {row.block_size}", row.device), bench)
        shared.setdefault(title, []).append(one)
    return shared


def _title(row: BenchRow, parts: Sequence[str], bench: Sequence[BenchRow]) -> str:
    """What the rows of a panel have in common; the load test's name where a report holds several."""
    return ", ".join(part for part in ((row.load_test if has_several(bench) else ""), *parts) if part)


def _run_caption(group: Group) -> str:
    return " ".join([setting(group), RUN_CAPTION, *speed_warnings(group)])
