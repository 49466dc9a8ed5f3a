"""Tables of paired differences: every run against the full cache on the very same samples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.compare import pair_runs
from harness.errors import UserError
from harness.longbench.paired import Comparison, compare_average, compare_tasks, holm
from harness.longbench.stats import MIN_CLUSTERS
from harness.longbench.tasks import TASKS
from harness.longbench.text_table import format_interval
from harness.report.conditions import key_cells, key_columns, key_record, setting, warnings
from harness.report.grid import MINUS, NO_VALUE, Cell, Column, Table, number_cell, text_cell
from harness.report.runs import FULL_CACHE_POLICY, Group, Run

SIGNIFICANT = 0.05
STAR = "*"
MEANING = (
    "Difference: policy minus full cache on the same samples, in points; interval: 95 %, cluster bootstrap over "
    f"contexts; p: two-sided sign flips; neither with fewer than {MIN_CLUSTERS} contexts in a task; Holm: p adjusted "
    f"over all tests of this table ({{num_tests}}); {STAR}: p (Holm) below {SIGNIFICANT}."
)


@dataclass(frozen=True)
class Difference:
    """A run against the full cache, on one task or on the mean of all."""

    run: Run
    baseline: Run
    comparison: Comparison


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
        tasks += [Difference(run, baseline, one) for one in compare_tasks(pairs)]
        overall.append(Difference(run, baseline, compare_average(f"mean of {len(pairs)} tasks", pairs)))
    if not overall and not notes:
        return []
    order = list(TASKS)
    tasks.sort(key=lambda one: order.index(one.comparison.name))
    return [
        _table(group, "averages", "mean of tasks", _adjusted(overall), notes),
        _table(group, "tasks", "every task", _adjusted(tasks), notes),
    ]


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
    num_tests = sum(one.comparison.p_value is not None for one in differences)
    return Table(
        name=f"difference-{group.name}-{part}",
        title=f"Difference to the full cache, {group.title}: {title}",
        caption=f"{setting(group)} {MEANING.format(num_tests=num_tests)}",
        columns=columns,
        rows=[_row(group, one) for one in differences],
        num_keys=len(keys),
        notes=[*warnings(group), *notes],
        records=[_record(one) for one in differences],
    )


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
        number_cell(line.score_a, 2),
        number_cell(line.score_b, 2),
        difference,
        Cell(format_interval(low, high).replace("-", MINUS) if line.interval else NO_VALUE, low),
        number_cell(line.p_value, 4),
        number_cell(line.p_holm, 4),
        Cell(" / ".join(f"{100 * share:.0f}" for share in shares), line.share_worse),
    ]


def _record(one: Difference) -> dict[str, Any]:
    line = one.comparison
    low, high = line.interval or (None, None)
    return key_record(one.run) | {
        "baseline_run_id": one.baseline.manifest.run_id,
        "name": line.name,
        "n": line.num_pairs,
        "score_full": line.score_a,
        "score": line.score_b,
        "difference": line.difference,
        "ci_low": low,
        "ci_high": high,
        "p": line.p_value,
        "p_holm": line.p_holm,
        "share_worse": line.share_worse,
        "share_same": line.share_same,
        "share_better": line.share_better,
    }
