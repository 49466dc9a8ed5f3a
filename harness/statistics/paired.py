"""Two runs over the same samples, compared sample by sample.

The pairing removes what makes samples hard or easy for both runs, so far smaller differences show than between two
unpaired means (Miller 2024, arXiv 2411.00640, section 4.2).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.errors import UserError
from harness.statistics.stats import (
    MIN_CLUSTERS,
    average_draws,
    bootstrap_means,
    cluster_totals,
    interval,
    seeded_generator,
)

SIGNIFICANT = 0.05
"""A difference is said to be one where its adjusted p is below."""
SMALLEST_SHOWN = 0.0001
NUM_FLIPS = 100_000
"""So many that Holm's adjustment over thousands of tests leaves something to be found."""
MAX_EXACT_CLUSTERS = 16
FLIPS_PER_BYTE = 8
SAME_SCORE = 1e-9
MAX_NAMED_IDS = 10


@dataclass(frozen=True)
class PairedTask:
    """Scores (0 to 100) of two runs on one task; position i is the same sample everywhere."""

    task: str
    scores_a: Sequence[float]
    scores_b: Sequence[float]
    clusters: Sequence[str]

    @property
    def differences(self) -> list[float]:
        """B - A per sample."""
        return [b - a for a, b in zip(self.scores_a, self.scores_b, strict=True)]


@dataclass(frozen=True)
class Comparison:
    """One line of a comparison.

    Attributes:
        name: task, or the name of the average.
        num_pairs: samples compared.
        score_a, score_b: mean scores, 0 to 100.
        difference: score_b - score_a.
        interval: 95 % bootstrap interval of the difference, None with fewer than 10 contexts.
        p_value: two-sided sign-flip test of "no difference", None with fewer than 10 contexts.
        smallest_p: the least that the test can give with so many contexts, None without a p-value.
        p_holm: `p_value` adjusted for the number of tests shown together (Holm), None before and where it is None.
        share_worse, share_same, share_better: shares of samples (0 to 1) where B scores lower, equal, higher.
    """

    name: str
    num_pairs: int
    score_a: float
    score_b: float
    difference: float
    interval: tuple[float, float] | None
    p_value: float | None
    smallest_p: float | None
    p_holm: float | None
    share_worse: float
    share_same: float
    share_better: float


def check_same_samples(ids_a: set[str], ids_b: set[str]) -> None:
    """Raise UserError naming the samples that only one of two runs has."""
    complaints = [
        f"{len(ids)} only in {run}: {_name_some(ids)}"
        for run, ids in (("A", ids_a - ids_b), ("B", ids_b - ids_a))
        if ids
    ]
    if complaints:
        raise UserError(
            f"the runs hold different samples ({'; '.join(complaints)}), so they are not paired. "
            "Finish both runs, or run both with the same tasks and limit."
        )


def compare_tasks(tasks: Sequence[PairedTask], num_flips: int = NUM_FLIPS) -> list[Comparison]:
    """Return one comparison per task; `adjust` them over everything that is shown together.

    Args:
        tasks: what to compare.
        num_flips: sign flips drawn for a task with more than 16 contexts; below, all there are are used.
    """
    return [_comparison(task.task, [task], num_flips) for task in tasks]


def adjust(lines: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons with their p-values adjusted by Holm's method over all of them: those of one table.

    A table of tasks and one of means are two families: they answer two questions.
    """
    p_values = {str(index): line.p_value for index, line in enumerate(lines)}
    adjusted = holm({name: p for name, p in p_values.items() if p is not None})
    return [replace(line, p_holm=adjusted.get(str(index))) for index, line in enumerate(lines)]


def power_note(tested: Sequence[Comparison]) -> list[str]:
    """Say so if even the smallest p that any of the tests of a table can give would not be significant after Holm."""
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


def compare_average(name: str, tasks: Sequence[PairedTask], num_flips: int = NUM_FLIPS) -> Comparison:
    """Return the comparison of the means of task means: intervals and test drawn task by task (stratified)."""
    return _comparison(name, tasks, num_flips)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return the p-values adjusted by Holm's step-down method (family-wise error), by the same names."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return adjusted


def _comparison(name: str, tasks: Sequence[PairedTask], num_flips: int) -> Comparison:
    p_value, smallest_p = _p_value(tasks, num_flips) or (None, None)
    score_a = math.fsum(_mean(task.scores_a) for task in tasks) / len(tasks)
    score_b = math.fsum(_mean(task.scores_b) for task in tasks) / len(tasks)
    differences = np.array([difference for task in tasks for difference in task.differences])
    return Comparison(
        name=name,
        num_pairs=len(differences),
        score_a=score_a,
        score_b=score_b,
        difference=score_b - score_a,
        interval=_difference_interval(tasks),
        p_value=p_value,
        smallest_p=smallest_p,
        p_holm=None,
        share_worse=float(np.mean(differences < -SAME_SCORE)),
        share_same=float(np.mean(np.abs(differences) <= SAME_SCORE)),
        share_better=float(np.mean(differences > SAME_SCORE)),
    )


def _difference_interval(tasks: Sequence[PairedTask]) -> tuple[float, float] | None:
    return interval(average_draws([bootstrap_means(task.differences, task.clusters, task.task) for task in tasks]))


def _p_value(tasks: Sequence[PairedTask], num_flips: int) -> tuple[float, float] | None:
    """Return the share of sign flips with a mean difference at least as large as the one seen, and its least value.

    With few clusters over all tasks every flip is looked at. Otherwise flips are drawn, and the one seen counts as one
    of them (Phipson and Smyth 2010).
    """
    totals = [cluster_totals(task.differences, task.clusters) for task in tasks]
    if min(len(sums) for sums, _ in totals) < MIN_CLUSTERS:
        return None
    shares = [sums / sizes.sum() for sums, sizes in totals]
    together = np.concatenate(shares)
    seen = abs(math.fsum(together)) - SAME_SCORE
    least = 2.0 ** (1 - len(together))
    if len(together) <= MAX_EXACT_CLUSTERS:
        return float(np.mean(np.abs(_signed_sums(together)) >= seen)), least
    flipped = np.zeros(num_flips)
    for task, share in zip(tasks, shares, strict=True):
        flipped += _drawn_sums(share, seeded_generator(task.task), num_flips)
    return float((1 + np.count_nonzero(np.abs(flipped) >= seen)) / (1 + num_flips)), max(least, 1 / (1 + num_flips))


def _signed_sums(values: np.ndarray) -> np.ndarray:
    """Return the sums of `values` [n] under all 2^n choices of signs."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums - value, sums + value])
    return sums


def _drawn_sums(values: np.ndarray, generator: np.random.Generator, num_flips: int) -> np.ndarray:
    """Return the sums of `values` [n] under `num_flips` random choices of signs; a byte chooses eight of them."""
    parts = [values[start : start + FLIPS_PER_BYTE] for start in range(0, len(values), FLIPS_PER_BYTE)]
    drawn = np.zeros(num_flips)
    for part in parts:
        drawn += _signed_sums(part)[generator.integers(0, 2 ** len(part), size=num_flips, dtype=np.uint8)]
    return drawn


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _name_some(ids: set[str]) -> str:
    named = ", ".join(sorted(ids)[:MAX_NAMED_IDS])
    return named if len(ids) <= MAX_NAMED_IDS else f"{named} and {len(ids) - MAX_NAMED_IDS} more"
