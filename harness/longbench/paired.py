"""Two runs over the same samples, compared sample by sample.

The pairing removes what makes samples hard or easy for both runs, so far smaller differences show than between two
unpaired means (Miller 2024, arXiv 2411.00640, section 4.2).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.errors import UserError
from harness.longbench.stats import (
    MIN_CLUSTERS,
    average_draws,
    bootstrap_means,
    cluster_totals,
    interval,
    seeded_generator,
)

NUM_FLIPS = 10_000
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
        p_holm: `p_value` adjusted for the number of tasks compared (Holm), None for averages and where it is None.
        share_worse, share_same, share_better: shares of samples (0 to 1) where B scores lower, equal, higher.
    """

    name: str
    num_pairs: int
    score_a: float
    score_b: float
    difference: float
    interval: tuple[float, float] | None
    p_value: float | None
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


def compare_tasks(tasks: Sequence[PairedTask]) -> list[Comparison]:
    """Return one comparison per task, Holm-adjusted over all of them."""
    p_values = {task.task: _p_value([task]) for task in tasks}
    adjusted = holm({name: p for name, p in p_values.items() if p is not None})
    return [
        _comparison(
            task.task,
            [task],
            _difference_interval([task]),
            p_values[task.task],
            adjusted.get(task.task),
        )
        for task in tasks
    ]


def compare_average(name: str, tasks: Sequence[PairedTask]) -> Comparison:
    """Return the comparison of the means of task means: intervals and test drawn task by task (stratified)."""
    return _comparison(name, tasks, _difference_interval(tasks), _p_value(tasks), None)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return the p-values adjusted by Holm's step-down method (family-wise error), by the same names."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return adjusted


def _comparison(
    name: str,
    tasks: Sequence[PairedTask],
    difference_interval: tuple[float, float] | None,
    p_value: float | None,
    p_holm: float | None,
) -> Comparison:
    score_a = math.fsum(_mean(task.scores_a) for task in tasks) / len(tasks)
    score_b = math.fsum(_mean(task.scores_b) for task in tasks) / len(tasks)
    differences = np.array([difference for task in tasks for difference in task.differences])
    return Comparison(
        name=name,
        num_pairs=len(differences),
        score_a=score_a,
        score_b=score_b,
        difference=score_b - score_a,
        interval=difference_interval,
        p_value=p_value,
        p_holm=p_holm,
        share_worse=float(np.mean(differences < -SAME_SCORE)),
        share_same=float(np.mean(np.abs(differences) <= SAME_SCORE)),
        share_better=float(np.mean(differences > SAME_SCORE)),
    )


def _difference_interval(tasks: Sequence[PairedTask]) -> tuple[float, float] | None:
    return interval(average_draws([bootstrap_means(task.differences, task.clusters, task.task) for task in tasks]))


def _p_value(tasks: Sequence[PairedTask]) -> float | None:
    """Return the share of random sign flips whose mean difference is at least as large as the one seen."""
    totals = [cluster_totals(task.differences, task.clusters) for task in tasks]
    if min(len(sums) for sums, _ in totals) < MIN_CLUSTERS:
        return None
    flipped = np.zeros(NUM_FLIPS)
    for task, (sums, sizes) in zip(tasks, totals, strict=True):
        signs = 2.0 * seeded_generator(task.task).integers(0, 2, size=(NUM_FLIPS, len(sums)), dtype=np.int8) - 1.0
        flipped += signs @ sums / sizes.sum()
    seen = abs(math.fsum(sums.sum() / sizes.sum() for sums, sizes in totals))
    return float((1 + np.count_nonzero(np.abs(flipped) >= seen - SAME_SCORE)) / (1 + NUM_FLIPS))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _name_some(ids: set[str]) -> str:
    named = ", ".join(sorted(ids)[:MAX_NAMED_IDS])
    return named if len(ids) <= MAX_NAMED_IDS else f"{named} and {len(ids) - MAX_NAMED_IDS} more"
