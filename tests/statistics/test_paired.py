"""The sign-flip test: exact where it can be, fine enough for many tests where it is drawn."""

import itertools

import numpy as np
import pytest

from harness.statistics.paired import MAX_EXACT_CLUSTERS, NUM_FLIPS, PairedTask, compare_average, compare_tasks

GENERATOR = np.random.default_rng(3)


def task_of(differences, name="qasper") -> PairedTask:
    return PairedTask(name, [0.0] * len(differences), list(differences), [str(n) for n in range(len(differences))])


def all_flips(differences) -> float:
    """p over all sign choices, by their definition."""
    sums = np.array(list(itertools.product((-1, 1), repeat=len(differences)))) @ np.asarray(differences)
    return float(np.mean(np.abs(sums) >= abs(sum(differences)) - 1e-9))


@pytest.mark.parametrize("num_contexts", [10, 13, MAX_EXACT_CLUSTERS])
def test_with_few_contexts_p_is_that_of_all_flips(num_contexts):
    differences = GENERATOR.integers(-3, 6, size=num_contexts).astype(float)
    (line,) = compare_tasks([task_of(differences)])
    assert line.p_value == pytest.approx(all_flips(differences), abs=1e-12)


def test_ten_contexts_that_all_lose_give_the_least_that_ten_can_give():
    (line,) = compare_tasks([task_of(range(-12, -2))])
    assert line.p_value == line.smallest_p == 2 / 2**10


def test_the_mean_of_one_small_task_is_exact_too():
    line = compare_average("mean", [task_of(range(-12, -2))])
    assert line.p_value == 2 / 2**10


def test_more_contexts_are_drawn_with_the_p_of_all_flips():
    differences = GENERATOR.integers(-3, 6, size=MAX_EXACT_CLUSTERS + 2).astype(float)
    (line,) = compare_tasks([task_of(differences)], num_flips=100_000)
    assert line.p_value == pytest.approx(all_flips(differences), abs=0.005)
    assert line.p_value != all_flips(differences)


@pytest.mark.parametrize("num_flips", [NUM_FLIPS, 100_000])
def test_more_flips_reach_a_smaller_p(num_flips):
    (line,) = compare_tasks([task_of(range(1, 201))], num_flips)
    assert line.p_value == line.smallest_p == pytest.approx(1 / (1 + num_flips))


def test_a_few_more_contexts_than_are_enumerated_cannot_give_less_than_all_their_flips():
    (line,) = compare_tasks([task_of(range(1, MAX_EXACT_CLUSTERS + 2))], num_flips=10**6)
    assert line.smallest_p == 2 / 2 ** (MAX_EXACT_CLUSTERS + 1)


def test_the_mean_of_tasks_flips_every_context_of_every_task():
    tasks = [task_of(GENERATOR.normal(0.2, 1, size=12), name) for name in ("qasper", "lcc")]
    together = [value / 12 for task in tasks for value in task.differences]
    generator = np.random.default_rng(0)
    sums = generator.choice([-1.0, 1.0], size=(200_000, 24)) @ np.array(together)
    expected = np.mean(np.abs(sums) >= abs(sum(together)))
    assert compare_average("mean", tasks, 100_000).p_value == pytest.approx(expected, abs=0.006)


def test_too_few_contexts_have_no_smallest_p():
    (line,) = compare_tasks([task_of(range(1, 10))])
    assert (line.p_value, line.smallest_p) == (None, None)
