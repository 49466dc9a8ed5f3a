"""Intervals and paired comparisons."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UserError
from harness.statistics.paired import (
    NUM_FLIPS,
    PairedTask,
    adjust,
    check_same_samples,
    compare_average,
    compare_tasks,
    holm,
)
from harness.statistics.stats import average_draws, bootstrap_means, interval

VALUES = np.random.default_rng(5).beta(0.5, 0.7, size=200) * 100


def _task(scores_a, scores_b, task="qasper", clusters=None) -> PairedTask:
    return PairedTask(task, scores_a, scores_b, clusters or [f"context{i}" for i in range(len(scores_a))])


class TestInterval:
    def test_equal_scores_have_an_interval_of_no_width(self):
        assert interval(bootstrap_means([40.0] * 12)) == (40.0, 40.0)

    def test_it_agrees_with_the_central_limit_theorem(self):
        low, high = interval(bootstrap_means(VALUES))
        half_width = 1.96 * VALUES.std() / np.sqrt(len(VALUES))
        assert low == pytest.approx(VALUES.mean() - half_width, abs=0.15 * half_width)
        assert high == pytest.approx(VALUES.mean() + half_width, abs=0.15 * half_width)

    def test_asking_the_same_context_four_times_adds_no_certainty(self):
        contexts = np.repeat(np.arange(len(VALUES)), 4)
        repeated = interval(bootstrap_means(np.repeat(VALUES, 4), contexts))
        assert repeated == pytest.approx(interval(bootstrap_means(VALUES)))
        low, high = interval(bootstrap_means(np.repeat(VALUES, 4)))
        assert high - low < 0.6 * (repeated[1] - repeated[0])

    @given(st.permutations(range(30)))
    def test_the_order_of_the_samples_does_not_matter(self, order):
        clusters = [i // 3 for i in range(30)]
        shuffled = bootstrap_means([VALUES[i] for i in order], [clusters[i] for i in order])
        assert interval(shuffled) == interval(bootstrap_means(VALUES[:30], clusters))

    def test_fewer_than_ten_contexts_give_none(self):
        assert bootstrap_means(VALUES[:9]) is None
        assert bootstrap_means(VALUES[:90], [i % 9 for i in range(90)]) is None
        assert bootstrap_means(VALUES[:10]) is not None
        assert interval(None) is None

    def test_an_average_is_narrower_than_its_tasks_and_needs_all_of_them(self):
        draws = [bootstrap_means(VALUES, key=key) for key in ("one", "two", "three", "four")]
        widths = [high - low for low, high in map(interval, [*draws, average_draws(draws)])]
        assert widths[-1] == pytest.approx(np.mean(widths[:-1]) / 2, rel=0.15)
        assert average_draws([draws[0], None]) is None
        assert average_draws([]) is None


class TestPairedComparison:
    def test_a_run_against_itself_shows_no_difference(self):
        (line,) = compare_tasks([_task(VALUES, VALUES)])
        assert (line.difference, line.interval, line.p_value) == (0, (0, 0), 1)
        assert (line.share_worse, line.share_same, line.share_better) == (0, 1, 0)

    def test_a_small_steady_loss_is_seen_where_unpaired_intervals_overlap(self):
        (line,) = compare_tasks([_task(VALUES, VALUES - np.linspace(0.5, 1.5, 200))])
        assert line.difference == pytest.approx(-1)
        assert line.interval[1] < 0
        assert line.p_value == pytest.approx(1 / (NUM_FLIPS + 1))
        assert interval(bootstrap_means(VALUES))[0] < line.score_b

    def test_the_shares_count_samples_of_b_against_a(self):
        (line,) = compare_tasks([_task([0.0] * 10, [1.0] * 5 + [0.0] * 3 + [-1.0] * 2)])
        assert (line.share_worse, line.share_same, line.share_better) == (0.2, 0.3, 0.5)

    def test_the_p_value_is_that_of_all_sign_flips(self):
        differences = np.array([3.0, -1, 4, 1, -5, 9, 2, 6, -5, 3])
        flips = np.array(list(itertools.product((-1, 1), repeat=10))) @ differences
        exact = np.mean(np.abs(flips) >= abs(differences.sum()) - 1e-9)
        (line,) = compare_tasks([_task([0.0] * 10, differences)])
        assert line.p_value == pytest.approx(exact, abs=0.015)

    def test_samples_of_one_context_flip_together(self):
        clusters = [f"context{i // 10}" for i in range(100)]
        differences = np.repeat(np.array([3.0, -1, 4, 1, -5, 9, 2, 6, -5, 3]), 10)
        (clustered,) = compare_tasks([_task([0.0] * 100, differences, clusters=clusters)])
        (single,) = compare_tasks([_task([0.0] * 100, differences)])
        assert single.p_value < 0.01 < 0.1 < clustered.p_value

    def test_fewer_than_ten_contexts_give_no_interval_and_no_p(self):
        (line,) = compare_tasks([_task(VALUES[:9], VALUES[1:10])])
        assert (line.interval, line.p_value, line.p_holm) == (None, None, None)
        assert line.difference == pytest.approx(VALUES[1:10].mean() - VALUES[:9].mean())

    def test_an_average_weighs_tasks_not_samples(self):
        tasks = [_task([0.0] * 100, [10.0] * 100, "qasper"), _task([0.0] * 20, [0.0] * 20, "lcc")]
        line = compare_average("mean", tasks)
        assert (line.score_a, line.score_b, line.difference, line.num_pairs) == (0, 5, 5, 120)
        assert line.interval == (5, 5)
        assert line.p_holm is None

    def test_holm_adjusts_over_the_tasks_of_the_comparison(self):
        assert holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == pytest.approx(
            {"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02}
        )
        lines = adjust(compare_tasks([_task(VALUES, VALUES - 1, "qasper"), _task(VALUES, VALUES[::-1], "lcc")]))
        assert [line.p_holm for line in lines] == [pytest.approx(2 / (NUM_FLIPS + 1)), lines[1].p_value]

    @given(st.lists(st.floats(0, 1), max_size=8))
    def test_holm_never_lowers_and_keeps_the_order(self, p_values):
        adjusted = holm(dict(enumerate(p_values)))
        assert all(p_values[i] <= adjusted[i] <= 1 for i in adjusted)
        ordered = sorted(adjusted, key=lambda i: p_values[i])
        assert [adjusted[i] for i in ordered] == sorted(adjusted.values())

    def test_different_samples_are_not_paired_and_the_missing_are_named(self):
        check_same_samples({"qasper:1"}, {"qasper:1"})
        with pytest.raises(UserError, match=r"1 only in A: qasper:1; 2 only in B: qasper:2, qasper:3"):
            check_same_samples({"qasper:0", "qasper:1"}, {"qasper:0", "qasper:2", "qasper:3"})
        with pytest.raises(UserError, match=r"12 only in B: .* and 2 more"):
            check_same_samples(set(), {f"lcc:{i}" for i in range(12)})
