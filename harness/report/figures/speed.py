"""Figures of memory over time and of speed: blocks in use, samples a second, latency, and speed against block size."""

from collections.abc import Mapping, Sequence
from typing import Any

from harness.engines.contract import BlockUsageSample
from harness.report.figures.figure import Figure, Look, Skipped
from harness.report.figures.marks import Axes, budget_unit, over_budgets, point, steps, with_budget
from harness.report.figures.scores import block_size_rows
from harness.report.reading.load_tests import FILE_NAME, BenchRow, BenchSetting, settings
from harness.report.reading.runs import Group, Run, budget_text
from harness.report.reading.usage import read_usage, thinned
from harness.report.tables.conditions import setting, source_of_blocks, speed_warnings, warnings
from harness.report.tables.costs import mean_answer_tokens, samples_per_s
from harness.report.tables.grid import format_number

MAX_STEPS = 200
BLOCK_AXIS = "Block size (tokens)"
OUTPUT, TOTAL = "output tokens/s", "prompt and output tokens/s"
LATENCIES = {"ttft": "TTFT (s)", "tpot": "TPOT (s)", "e2e": "end to end (s)"}
NO_BENCH = f"no load test ({FILE_NAME}) was found"
NO_TIMES = "no finished run recorded times"
BENCH_CAPTION = (
    "Load tests: every request gives the same number of tokens, so that tokens a second compare. Points: median over "
    "repeats; bars: smallest to largest."
)
RUN_CAPTION = (
    "All samples were sent at once; one run a point, no repeats. Answers differ in length (right), and nonsense seldom "
    "stops early: compare samples a second, not tokens."
)

SHARED = ("load_test", "model", "load", "block_size", "device")

Looks = Mapping[str, Look]


def usage_figure(group: Group, looks: Looks) -> Figure | Skipped:
    """KV blocks in use after every engine step: a panel a series, a line a budget."""
    name = f"blocks-over-time-{group.name}"
    rows = [row for run in group.runs if (usage := read_usage(run)) for row in _usage_rows(run, usage)]
    if not rows:
        return Skipped(name, "no run recorded block usage")
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    unit = steps([row["series"] for row in rows], looks, "Time since the first engine step (s)", "KV blocks in use")
    blocks = ", ".join(sorted({str(run.block_size) for run in group.runs}))
    about = " ".join([setting(group), *warnings(group)])
    caption = f"{about} Blocks of {blocks} tokens; all panels have the same axes. {source_of_blocks(group)}"
    title = f"KV blocks over time, {group.title}"
    return Figure(name, title, caption, unit, rows, panels, ("x", "y"), group=group.name)


def throughput_figures(groups: Sequence[Group], bench: Sequence[BenchRow], looks: Looks) -> list[Figure | Skipped]:
    """Of load tests tokens a second; of every group of benchmark runs samples a second, beside the answers' length."""
    rows = [
        _bench_row(one, f"{title}: {axis}" if title else axis, field, field)
        for title, members in _by_load(bench).items()
        for field, axis in (("output_tok_s", OUTPUT), ("total_tok_s", TOTAL))
        for one in members
        if one.median(field) is not None
    ]
    name, about = "throughput-vs-budget", _same(bench) if bench else ""
    figures = [
        _figure(f"{name}-bench", "Throughput, load tests", f"{BENCH_CAPTION} {about}", rows, looks, bench, NO_BENCH)
    ]
    for group in groups:
        readers = {"samples/s": samples_per_s, "mean answer (tokens)": mean_answer_tokens}
        timed = [run for run in group.finished if samples_per_s(run) is not None]
        rows = [_run_row(run, panel, read(run)) for panel, read in readers.items() for run in timed]
        title, caption = f"Throughput, {group.title}", " ".join([setting(group), RUN_CAPTION, *speed_warnings(group)])
        figures.append(_figure(f"{name}-{group.name}", title, caption, rows, looks, timed, NO_TIMES, group.name))
    return figures


def latency_figure(bench: Sequence[BenchRow], looks: Looks) -> Figure | Skipped:
    """Of load tests the time to the first token, a token after it, and the whole: median and 99th percentile."""
    rows = [
        _bench_row(one, f"{title}: {axis}" if title else axis, f"{key}_p50", f"{key}_p99")
        for title, members in _by_load(bench).items()
        for key, axis in LATENCIES.items()
        for one in members
        if one.median(f"{key}_p50") is not None
    ]
    caption = "Load tests. Points: median; bars end at the 99th percentile."
    return _figure("latency-vs-budget-bench", "Latency, load tests", caption, rows, looks, bench, NO_BENCH)


def block_size_figure(groups: Sequence[Group], bench: Sequence[BenchRow], looks: Looks) -> Figure | Skipped:
    """Throughput and accuracy against block size, where more than one was tried."""
    rows = [row for group in groups for row in block_size_rows(group)]
    by_load: dict[str, list[dict[str, Any]]] = {}
    for one in settings(bench):
        row = one.rows[0]
        title = ": ".join(filter(None, [_title(row, bench, [name for name in SHARED if name != "block_size"]), TOTAL]))
        named = _bench_row(one, title, "total_tok_s", "total_tok_s")
        place = {"kind": "point", "x": str(row.block_size), "series": with_budget(row.series, row.budget)}
        by_load.setdefault(title, []).append(named | place)
    rows += [row for found in by_load.values() if len({row["x"] for row in found}) > 1 for row in found]
    if not rows:
        return Skipped("block-size", "all runs of a group have one block size")
    sizes = sorted({row["x"] for row in rows}, key=int)
    unit = over_budgets([row["series"] for row in rows], looks, sizes, Axes(BLOCK_AXIS, None, zero=True))
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    caption = "Points of load tests: median over repeats; bars: smallest to largest; of runs: 95 % intervals."
    return Figure("block-size", "Block size", caption, unit, rows, panels)


def _figure(
    name: str,
    title: str,
    caption: str,
    rows: Sequence[dict[str, Any]],
    looks: Looks,
    measured: Sequence[Any],
    reason: str,
    group: str = "",
) -> Figure | Skipped:
    if not rows:
        return Skipped(name, reason)
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    axes = Axes(None, panels[0] if len(panels) == 1 else None, zero=True)
    unit = budget_unit(rows, looks, (one.budget for one in measured), axes)
    return Figure(name, title, caption, unit, rows, panels, group=group)


def _run_row(run: Run, panel: str, value: float) -> dict[str, Any]:
    tip = f"{run.label}, {panel}: {format_number(value, 3)}"
    return point(panel, run.series, budget_text(run.budget) or None, (value, None, None), tip)


def _bench_row(one: BenchSetting, panel: str, field: str, high_field: str) -> dict[str, Any]:
    row = one.rows[0]
    values = [getattr(each, field) for each in one.rows if getattr(each, field) is not None]
    middle = one.median(field) or 0.0
    low, high = (min(values), max(values)) if field == high_field else (middle, one.median(high_field))
    spread = "" if high is None else f" ({format_number(low, 3)} to {format_number(high, 3)})"
    tip = f"{with_budget(row.series, row.budget)}: {format_number(middle, 3)}{spread}, {len(values)} repeats"
    return point(panel, row.series, budget_text(row.budget) or None, (middle, low, high), tip)


def _by_load(bench: Sequence[BenchRow]) -> dict[str, list[BenchSetting]]:
    """Settings that differ in policy and budget only, by what tells them from others; "" where all share that."""
    shared: dict[str, list[BenchSetting]] = {}
    for one in settings(bench):
        shared.setdefault(_title(one.rows[0], bench, SHARED), []).append(one)
    return shared


def _title(row: BenchRow, bench: Sequence[BenchRow], fields: Sequence[str]) -> str:
    """Those of the row's settings in which the load tests of the report differ."""
    return ", ".join(_texts(row)[field] for field in fields if len({getattr(one, field) for one in bench}) > 1)


def _same(bench: Sequence[BenchRow]) -> str:
    """The settings in which they do not differ, for a caption."""
    same = [_texts(bench[0])[field] for field in SHARED if len({getattr(one, field) for one in bench}) == 1]
    return f"All: {', '.join(filter(None, same))}." if any(same) else ""


def _texts(row: BenchRow) -> dict[str, str]:
    return {field: getattr(row, field) for field in SHARED} | {"block_size": f"block {row.block_size}"}


def _usage_rows(run: Run, usage: Sequence[BlockUsageSample]) -> list[dict[str, Any]]:
    return [
        {
            "panel": run.series,
            "series": run.label,
            "x": round(step.t_s, 3),
            "y": step.blocks,
            "tip": f"{run.label}: {step.blocks} blocks after {step.t_s:.1f} s, {step.running} running",
        }
        for step in thinned(usage, MAX_STEPS)
    ]
