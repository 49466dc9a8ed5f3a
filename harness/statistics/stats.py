"""Intervals: how far a mean would move with another draw of samples; by bootstrap, and Wilson's.

Samples that share a context are not independent, so whole contexts are drawn (cluster bootstrap; Miller 2024,
arXiv 2411.00640, section 2.2). All draws are seeded: the same scores give the same interval, in whatever order.
"""

import math
import zlib
from collections.abc import Hashable, Sequence

import numpy as np

NUM_DRAWS = 2000
SEED = 20231
MIN_CLUSTERS = 10
CONFIDENCE_PERCENTS = (2.5, 97.5)
Z_95 = 1.959964


def cluster_totals(values: Sequence[float], clusters: Sequence[Hashable] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return sum and size of every cluster, ordered by value so that the order of the samples does not matter.

    Args:
        values: one figure per sample.
        clusters: the cluster of each sample, for example its context's hash; None: every sample is its own.
    """
    groups: dict[Hashable, list[float]] = {}
    for value, cluster in zip(values, range(len(values)) if clusters is None else clusters, strict=True):
        groups.setdefault(cluster, []).append(value)
    totals = sorted((math.fsum(group), len(group)) for group in groups.values())
    return np.array([total for total, _ in totals], dtype=float), np.array([size for _, size in totals], dtype=float)


def seeded_generator(key: str) -> np.random.Generator:
    """Return the random generator of `key`, so that a task's draws do not depend on the other tasks of a run."""
    return np.random.default_rng([SEED, zlib.crc32(key.encode())])


def bootstrap_means(
    values: Sequence[float], clusters: Sequence[Hashable] | None = None, key: str = ""
) -> np.ndarray | None:
    """Return `NUM_DRAWS` means of clusters drawn with replacement, in the unit of `values`.

    None with fewer than `MIN_CLUSTERS` clusters: too few to tell how they vary.
    """
    sums, sizes = cluster_totals(values, clusters)
    if len(sums) < MIN_CLUSTERS:
        return None
    drawn = seeded_generator(key).integers(0, len(sums), size=(NUM_DRAWS, len(sums)))
    return sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)


def average_draws(draws: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Return the draws of the average over tasks, each task drawn on its own (stratified); None if one has none."""
    present = [draw for draw in draws if draw is not None]
    return np.mean(present, axis=0) if present and len(present) == len(draws) else None


def interval(draws: np.ndarray | None) -> tuple[float, float] | None:
    """Return the middle 95 % of the draws as (low, high), or None without draws."""
    if draws is None:
        return None
    low, high = np.percentile(draws, CONFIDENCE_PERCENTS)
    return float(low), float(high)


def wilson(share: float, n: int) -> tuple[float, float]:
    """95 % Wilson score interval of a mean of n values from 0 to 1."""
    spread = Z_95**2 / n
    centre = (share + spread / 2) / (1 + spread)
    half = Z_95 / (1 + spread) * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    return max(0.0, centre - half), min(1.0, centre + half)
