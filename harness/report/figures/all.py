"""All figures of a report, from run folders alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.report.figures.figure import Figure, Look, Skipped, make_looks, save
from harness.report.figures.marks import with_budget
from harness.report.figures.needles import needle_figures
from harness.report.figures.retention import heads_figure, retention_figures
from harness.report.figures.scores import accuracy_figure, answer_figure, length_figure
from harness.report.figures.speed import block_size_figure, latency_figure, throughput_figures, usage_figure
from harness.report.reading.load_tests import BenchRow
from harness.report.reading.runs import Group
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
        latency_figure(bench, looks),
        block_size_figure(groups, bench, looks),
        *(usage_figure(group, looks) for group in groups),
        *(heads_figure(group) for group in groups),
        *(figure for group in groups for figure in (*needle_figures(group), *retention_figures(group))),
    ]


def report_looks(groups: Sequence[Group], bench: Sequence[BenchRow]) -> dict[str, Look]:
    """One look a name for the whole report: of series, and apart from them of series with their budgets."""
    series = [run.series for group in groups for run in group.runs] + [row.series for row in bench]
    single = [run.label for group in groups for run in group.runs]
    single += [with_budget(run.policy, run.budget) for group in groups for run in group.runs]
    single += [with_budget(row.series, row.budget) for row in bench]
    return make_looks([name for name in single if name not in series]) | make_looks(series)


def write_figures(folder: Path, figures: Sequence[Figure | Skipped]) -> None:
    """Draw everything into `folder`, making it."""
    folder.mkdir(parents=True, exist_ok=True)
    for figure in figures:
        if isinstance(figure, Figure):
            save(figure, folder)
