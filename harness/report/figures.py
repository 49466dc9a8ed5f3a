"""All figures of a report, from run folders alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.report.bench_runs import BenchRow
from harness.report.chart_runs import accuracy_chart, pareto_chart, usage_chart
from harness.report.chart_speed import latency_charts, page_size_chart, throughput_charts
from harness.report.charts import Chart, Skipped
from harness.report.drawing import draw, make_styles, save
from harness.report.retention_figures import retention_figures
from harness.report.runs import Group


@dataclass(frozen=True)
class SavedFigure:
    """A figure on disk: `<name>.pdf`, `.svg`, `.png`."""

    name: str
    title: str
    caption: str


def make_charts(groups: Sequence[Group], bench: Sequence[BenchRow]) -> list[Chart | Skipped]:
    """Every chart there is data for, and the reason for every other."""
    return [
        *(accuracy_chart(group) for group in groups),
        *(pareto_chart(group) for group in groups),
        *throughput_charts(groups, bench),
        *latency_charts(groups, bench),
        page_size_chart(groups, bench),
        *(usage_chart(group) for group in groups),
    ]


def chart_styles(charts: Sequence[Chart | Skipped]) -> dict[str, dict[str, Any]]:
    """One look a name for the whole report; see `make_styles`."""
    drawn = [chart for chart in charts if isinstance(chart, Chart)]
    return make_styles([series.name for chart in drawn for panel in chart.panels for series in panel.series])


def write_figures(
    folder: Path, groups: Sequence[Group], charts: Sequence[Chart | Skipped]
) -> tuple[list[SavedFigure], list[Skipped]]:
    """Draw everything into `folder`, making it; return what was written and what was not."""
    folder.mkdir(parents=True, exist_ok=True)
    styles = chart_styles(charts)
    written: list[SavedFigure] = []
    skipped = [chart for chart in charts if isinstance(chart, Skipped)]
    for chart in charts:
        if isinstance(chart, Chart):
            save(draw(chart, styles), folder, chart.name)
            written.append(SavedFigure(chart.name, chart.title, chart.caption))
    for group in groups:
        for result in retention_figures(group):
            if isinstance(result, Skipped):
                skipped.append(result)
            else:
                name, figure = result
                save(figure, folder, name)
                title = f"Retention map, {group.title}"
                written.append(SavedFigure(name, title, "Bright: kept; dark: evicted; dotted: where the prompt ends."))
    return written, skipped
