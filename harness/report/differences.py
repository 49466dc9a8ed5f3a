"""Tables of paired differences: every run against the full cache on the very same samples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.benchmarks.tasks import TASKS
from harness.compare import averaged_tasks, compare_mean, figures, pair_runs
from harness.errors import UserError
from harness.report.conditions import key_cells, key_columns, key_record, setting, warnings
from harness.report.grid import MINUS, NO_VALUE, Cell, Column, Table, number_cell, text_cell
from harness.report.runs import FULL_CACHE_POLICY, Group, Run
from harness.statistics.paired import MAX_EXACT_CLUSTERS, NUM_FLIPS, Comparison, compare_tasks, holm
from harness.statistics.stats import MIN_CLUSTERS
from harness.statistics.text_table import format_interval

SIGNIFICANT = 0.05
SMALLEST_SHOWN = 0.0001
STAR = "*"
MEANING = (
    "Difference: policy minus full cache on the same samples, in points; interval: 95 %, cluster bootstrap over "
    f"contexts; p: two-sided sign flips, all of them with up to {MAX_EXACT_CLUSTERS} contexts, {NUM_FLIPS} drawn with "
    f"more; neither with fewer than {MIN_CLUSTERS} contexts in a task; Holm: p adjusted over all tests of this table "
    f"({{num_tests}}); {STAR}: p (Holm) below {SIGNIFICANT}."
)


@dataclass(frozen=True)
class Difference:
    """A run against the full cache, on one task or on the mean of all.

    Attributes:
        score_full, score: as in the table of accuracy, 0 to 100 with two decimals.
    """

    run: Run
    baseline: Run
    comparison: Comparison
    score_full: float | None
    score: float | None


def difference_tables(group: Group) -> list[Table]:
    """The means of tasks, then the tasks; none if the group has no finished full-cache run with a rival."""
    overall: list[Difference] = []
    tasks: list[Difference] = []
    notes = []
    for run in group.finished:
        baseline = group.baseline(run)
        if run.policy == FULL_CACHE_POLICY or baseline is None:
            continue
        try:
            pairs = pair_runs(_by_id(baseline), _by_id(run))
        except UserError as error:
            notes.append(f"{run.label} is not compared: {error}")
            continue
        if baseline.engine != run.engine:
            notes.append(f"{run.label} is held against the full cache of engine={baseline.engine}, its own has none.")
        tasks += [_of_task(run, baseline, one) for one in compare_tasks(pairs)]
        mean = compare_mean(averaged_tasks(pairs))
        overall.append(Difference(run, baseline, mean, baseline.averages[0].score, run.averages[0].score))
    if not overall and not notes:
        return []
    order = list(TASKS)
    tasks.sort(key=lambda one: order.index(one.comparison.name))
    return [
        _table(group, "averages", "mean of tasks", _adjusted(overall), notes),
        _table(group, "tasks", "every task", _adjusted(tasks), notes),
    ]


def _of_task(run: Run, baseline: Run, one: Comparison) -> Difference:
    return Difference(run, baseline, one, baseline.scores[one.name].score, run.scores[one.name].score)


def _by_id(run: Run) -> dict[str, Any]:
    return {sample.sample_id: sample for sample in run.predictions}


def _adjusted(differences: Sequence[Difference]) -> list[Difference]:
    """Holm's adjustment over all runs and tasks of a table, not within one run only."""
    p_values = {str(n): one.comparison.p_value for n, one in enumerate(differences)}
    adjusted = holm({name: p for name, p in p_values.items() if p is not None})
    return [
        replace(one, comparison=replace(one.comparison, p_holm=adjusted.get(str(n))))
        for n, one in enumerate(differences)
    ]


def _table(group: Group, part: str, title: str, differences: Sequence[Difference], notes: Sequence[str]) -> Table:
    keys = [Column("Task", is_text=True), *key_columns(group)]
    columns = [
        *keys,
        Column("n"),
        Column("Full cache"),
        Column("Policy's score"),
        Column("Difference", "points"),
        Column("95 % interval", is_text=True),
        Column("p"),
        Column("p (Holm)"),
        Column("Worse / same / better", "% of samples"),
    ]
    tested = [one.comparison for one in differences if one.comparison.p_value is not None]
    return Table(
        name=f"difference-{group.name}-{part}",
        title=f"Difference to the full cache, {group.title}: {title}",
        caption=f"{setting(group)} {MEANING.format(num_tests=len(tested))}",
        columns=columns,
        rows=[_row(group, one) for one in differences],
        num_keys=len(keys),
        notes=[*warnings(group), *notes, *_power(tested)],
        records=[_record(one) for one in differences],
    )


def _power(tested: Sequence[Comparison]) -> list[str]:
    """Says so if even the smallest p that any of the tests can give would not be significant after Holm."""
    if not tested:
        return []
    smallest = min(one.smallest_p for one in tested)
    if smallest * len(tested) < SIGNIFICANT:
        return []
    n, count = max(one.num_pairs for one in tested), len(tested)
    return [
        f"With n = {n} and {count} tests no difference can be significant: the smallest p that a test can give is "
        f"{smallest:.2g}, times {count} {smallest * count:.2g}."
    ]


def _row(group: Group, one: Difference) -> list[Cell]:
    line = one.comparison
    low, high = line.interval or (None, None)
    shares = (line.share_worse, line.share_same, line.share_better)
    difference = number_cell(line.difference, 2, sign=True)
    if line.p_holm is not None and line.p_holm < SIGNIFICANT:
        difference = replace(difference, text=f"{difference.text} {STAR}")
    return [
        text_cell(line.name),
        *key_cells(one.run, group),
        number_cell(line.num_pairs),
        number_cell(one.score_full, 2),
        number_cell(one.score, 2),
        difference,
        Cell(format_interval(low, high).replace("-", MINUS) if line.interval else NO_VALUE, low),
        _p_cell(line.p_value),
        _p_cell(line.p_holm),
        Cell(" / ".join(f"{100 * share:.0f}" for share in shares), line.share_worse),
    ]


def _p_cell(p: float | None) -> Cell:
    if p is not None and p < SMALLEST_SHOWN:
        return Cell(f"< {SMALLEST_SHOWN:.4f}", p)
    return number_cell(p, 4)


def _record(one: Difference) -> dict[str, Any]:
    names = {"baseline_run_id": one.baseline.manifest.run_id, "name": one.comparison.name}
    own = {key: value for key, value in figures(one.comparison).items() if key not in ("score_a", "score_b")}
    return key_record(one.run) | names | {"score_full": one.score_full, "score": one.score} | own
