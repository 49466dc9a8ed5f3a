"""Tables of paired differences on the very same samples: every run against the full cache, and every pair of runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from harness.benchmarks.tasks import TASKS
from harness.compare import averaged_tasks, compare_mean, figures, pair_runs
from harness.errors import UserError
from harness.report.reading.runs import FULL_CACHE_POLICY, Group, Run
from harness.report.tables.conditions import key_cells, key_columns, key_record, setting, warnings
from harness.report.tables.grid import Cell, Column, Table, interval_text, number_cell, text_cell
from harness.statistics.paired import (
    MAX_EXACT_CLUSTERS,
    NUM_FLIPS,
    SIGNIFICANT,
    SMALLEST_SHOWN,
    Comparison,
    adjust,
    compare_tasks,
    power_note,
)
from harness.statistics.stats import MIN_CLUSTERS
from harness.store.predictions import Prediction

STAR = "*"
MEANING = (
    "Difference: {difference} on the same samples, in points; interval: 95 %, cluster bootstrap over "
    f"contexts; p: two-sided sign flips, all of them with up to {MAX_EXACT_CLUSTERS} contexts, {NUM_FLIPS} drawn with "
    f"more; neither with fewer than {MIN_CLUSTERS} contexts in a task; Holm: p adjusted over all tests of this table "
    f"({{num_tests}}), as harness.compare adjusts over all that it prints; {STAR}: p (Holm) below {SIGNIFICANT}."
)
TO_FULL = "policy minus full cache"
OF_PAIR = "the first minus the second"


@dataclass(frozen=True)
class Difference:
    """A run held against another one, on one task or on the mean of all.

    Attributes:
        score_other, score: as in the table of accuracy, 0 to 100 with two decimals.
    """

    run: Run
    other: Run
    comparison: Comparison
    score_other: float | None
    score: float | None


@dataclass(frozen=True)
class Differences:
    """All paired differences of a group, adjusted: on means and on tasks to the full cache, on means of any pair."""

    means: Sequence[Difference]
    tasks: Sequence[Difference]
    pairs: Sequence[Difference]
    notes: Sequence[str]

    def to_full(self, run: Run) -> Difference | None:
        """The difference of means of a run to the full cache."""
        return next((one for one in self.means if one.run is run), None)


def find_differences(group: Group) -> Differences:
    """Compare every finished run with the full cache, and the means of all pairs of runs that share a budget."""
    samples = {id(run): {sample.sample_id: sample for sample in run.predictions} for run in group.finished}
    means: list[Difference] = []
    tasks: list[Difference] = []
    notes: list[str] = []
    for run in group.finished:
        baseline = group.baseline(run)
        if run.policy == FULL_CACHE_POLICY or baseline is None:
            continue
        try:
            pairs = pair_runs(samples[id(baseline)], samples[id(run)])
        except UserError as error:
            notes.append(f"{run.label} is not compared: {error}")
            continue
        if baseline.engine != run.engine:
            notes.append(f"{run.label} is held against the full cache of engine={baseline.engine}, its own has none.")
        tasks += [_of_task(run, baseline, one) for one in compare_tasks(pairs)]
        means.append(_of_mean(run, baseline, compare_mean(averaged_tasks(pairs))))
    order = list(TASKS)
    tasks.sort(key=lambda one: order.index(one.comparison.name))
    return Differences(_adjusted(means), _adjusted(tasks), _adjusted(_pairs(group, samples)), notes)


def difference_tables(group: Group, found: Differences) -> list[Table]:
    """The means of tasks, the tasks if there are several, all pairs; those that there is nothing for are left out."""
    tables = []
    if found.means or found.notes:
        title = f"Difference to the full cache, {group.title}"
        name = f"difference-{group.name}"
        tables = [_table(group, f"{name}-averages", f"{title}: mean of tasks", found.means, found.notes)]
        if len({one.comparison.name for one in found.tasks}) != 1:
            tables.append(_table(group, f"{name}-tasks", f"{title}: every task", found.tasks, found.notes))
    if found.pairs:
        title = f"Difference of any two, {group.title}: mean of tasks"
        tables.append(_table(group, f"pairs-{group.name}", title, found.pairs, [], OF_PAIR))
    return tables


def _pairs(group: Group, samples: Mapping[int, Mapping[str, Prediction]]) -> list[Difference]:
    found = []
    for run, other in combinations([run for run in group.finished if run.policy != FULL_CACHE_POLICY], 2):
        if run.budget != other.budget or samples[id(run)].keys() != samples[id(other)].keys():
            continue
        mean = compare_mean(averaged_tasks(pair_runs(samples[id(other)], samples[id(run)])))
        found.append(_of_mean(run, other, mean))
    return found


def _of_task(run: Run, other: Run, one: Comparison) -> Difference:
    return Difference(run, other, one, other.scores[one.name].score, run.scores[one.name].score)


def _of_mean(run: Run, other: Run, one: Comparison) -> Difference:
    return Difference(run, other, one, other.averages[0].score, run.averages[0].score)


def _adjusted(differences: Sequence[Difference]) -> list[Difference]:
    """Holm's adjustment over all runs and tasks of a table, not within one run only."""
    lines = adjust([one.comparison for one in differences])
    return [replace(one, comparison=line) for one, line in zip(differences, lines, strict=True)]


def _table(
    group: Group,
    name: str,
    title: str,
    differences: Sequence[Difference],
    notes: Sequence[str],
    meaning: str = TO_FULL,
) -> Table:
    is_pair = meaning == OF_PAIR
    columns = [
        *key_columns(group),
        Column("Against" if is_pair else "Task", is_text=True),
        Column("Difference", "points"),
        Column("95 % interval"),
        Column("p"),
        Column("p (Holm)"),
        Column("Second" if is_pair else "Full cache"),
        Column("First" if is_pair else "Policy's score"),
        Column("n"),
        Column("Worse / same / better", "% of samples"),
    ]
    tested = [one.comparison for one in differences if one.comparison.p_value is not None]
    return Table(
        name=name,
        title=title,
        caption=f"{setting(group)} {MEANING.format(num_tests=len(tested), difference=meaning)}",
        columns=columns,
        rows=[_row(group, one, is_pair) for one in differences],
        num_keys=2,
        notes=[*warnings(group), *notes, *power_note(tested)],
        records=[_record(one) for one in differences],
    )


def _row(group: Group, one: Difference, is_pair: bool) -> list[Cell]:
    line = one.comparison
    low, high = line.interval or (None, None)
    shares = (line.share_worse, line.share_same, line.share_better)
    difference = number_cell(line.difference, 2, sign=True)
    if line.p_holm is not None and line.p_holm < SIGNIFICANT:
        difference = replace(difference, text=f"{difference.text} {STAR}")
    return [
        *key_cells(one.run, group),
        Cell(one.other.policy, one.other.series, one.other.variant) if is_pair else text_cell(line.name),
        difference,
        Cell(interval_text(low, high, 2) or "-", low),
        _p_cell(line.p_value),
        _p_cell(line.p_holm),
        number_cell(one.score_other, 2),
        number_cell(one.score, 2),
        number_cell(line.num_pairs),
        Cell(" / ".join(f"{100 * share:.0f}" for share in shares), line.share_worse),
    ]


def _p_cell(p: float | None) -> Cell:
    if p is not None and p < SMALLEST_SHOWN:
        return Cell(f"< {SMALLEST_SHOWN:.4f}", p)
    return number_cell(p, 4)


def _record(one: Difference) -> dict[str, Any]:
    names = {"other_run_id": one.other.manifest.run_id, "other_policy": one.other.series, "name": one.comparison.name}
    own = {key: value for key, value in figures(one.comparison).items() if key not in ("score_a", "score_b")}
    return key_record(one.run) | names | {"score_other": one.score_other, "score": one.score} | own
