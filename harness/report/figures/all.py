"""All figures of a report, from run folders alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.report.figures.figure import Figure, Look, Skipped, make_looks, save
from harness.report.figures.needles import needle_figures
from harness.report.figures.retention import retention_figures
from harness.report.figures.scores import accuracy_figure, answer_figure, length_figure
from harness.report.figures.speed import block_size_figure, latency_figures, throughput_figures, usage_figure
from harness.report.reading.load_tests import BenchRow
from harness.report.reading.runs import Group, budget_text
from harness.report.tables.answer import Answer


def make_figures(
    groups: Sequence[Group], bench: Sequence[BenchRow], answers: Mapping[str, Sequence[Answer]]
) -> list[Figure | Skipped]:
    """Every figure there is data for, and the reason for every other.

    Args:
        answers: by name of the group.
    """
    looks = report_looks(groups, bench)
    return [
        *(answer_figure(group, answers[group.name], looks) for group in groups),
        *(accuracy_figure(group, looks) for group in groups),
        *(length_figure(group, looks) for group in groups),
        *throughput_figures(groups, bench, looks),
        *latency_figures(groups, bench, looks),
        block_size_figure(groups, bench, looks),
        *(usage_figure(group, looks) for group in groups),
        *(figure for group in groups for figure in (*needle_figures(group), *retention_figures(group))),
    ]


def report_looks(groups: Sequence[Group], bench: Sequence[BenchRow]) -> dict[str, Look]:
    """One look a name for the whole report: of series, and apart from them of series with their budgets."""
    series = [run.series for group in groups for run in group.runs] + [row.series for row in bench]
    single = [run.label for group in groups for run in group.runs]
    for run in (run for group in groups for run in group.runs):
        single.append(f"{run.policy} @ {budget_text(run.budget)}")
    for row in bench:
        single.append(f"{row.series} @ {budget_text(row.budget)}")
    return make_looks([name for name in single if name not in series]) | make_looks(series)


def write_figures(folder: Path, figures: Sequence[Figure | Skipped]) -> None:
    """Draw everything into `folder`, making it."""
    folder.mkdir(parents=True, exist_ok=True)
    for figure in figures:
        if isinstance(figure, Figure):
            save(figure, folder)
