"""Task scores, averages, buckets, and the pool of scoring processes."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.benchmarks.longbench.aggregates import (
    ENGLISH,
    OVERALL,
    average,
    averages,
    bucket_averages,
    bucket_of,
    bucket_scores,
    format_figure,
)
from harness.benchmarks.longbench.tasks import LONGBENCH_E_TASKS, PUBLISHED
from harness.benchmarks.sample_score import SampleScore, score_sample
from harness.benchmarks.scoring import CHUNK_SIZE, ScoringPool, task_score
from harness.benchmarks.task import CATEGORIES
from harness.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 30


def _samples(*scores: float) -> list[SampleScore]:
    return [SampleScore(score, empty=False) for score in scores]


def _full(task: str, score: float):
    return task_score(task, _samples(*[score] * PUBLISHED[task].num_rows))


class TestTaskScore:
    def test_it_is_the_mean_in_percent_with_two_decimals(self):
        assert task_score("qasper", _samples(1, 0, 0)).score == 33.33

    @given(st.permutations([0.1, 0.2, 0.3, 1 / 3, 0.7, 1e-9, 1.0, 0.0, 0.6, 0.45, 0.9]))
    def test_the_order_of_the_samples_does_not_matter(self, scores):
        expected = task_score("qasper", _samples(*sorted(scores)))
        assert task_score("qasper", _samples(*scores)) == expected
        assert expected.ci_low < expected.score < expected.ci_high

    def test_empty_predictions_are_counted_and_stay_in_the_mean(self):
        scored = task_score("qasper", [SampleScore(0.0, empty=True), SampleScore(1.0, empty=False)])
        assert (scored.score, scored.n, scored.num_empty) == (50.0, 2, 1)

    def test_other_measures_are_averaged_under_their_own_names(self):
        samples = [SampleScore(0.0, False, {"rouge1": 0.5}), SampleScore(0.0, False, {"rouge1": 0.2})]
        assert task_score("qmsum", samples).extra == {"rouge1": 35.0}

    def test_fewer_than_ten_samples_have_no_interval(self):
        assert task_score("qasper", _samples(*[0.5] * 9)).ci_low is None
        assert task_score("qasper", _samples(*[0.5] * 10)).ci_low == 50.0

    def test_no_sample_gives_no_score(self):
        scored = task_score("qasper", [])
        assert (scored.score, scored.n, scored.expected, scored.ci_low) == (None, 0, 200, None)

    @pytest.mark.parametrize(
        ("score", "n", "expected", "text"),
        [(31.2, 127, 200, "31.20 (127/200)"), (18.99, 203, 200, "18.99 (203/200)"), (None, 0, 200, "- (0/200)")],
    )
    def test_a15_every_figure_shows_how_many_samples_it_rests_on(self, score, n, expected, text):
        assert format_figure(score, n, expected) == text


class TestAverages:
    def test_tasks_weigh_the_same_whatever_their_size(self):
        code = averages({"lcc": _full("lcc", 0.5), "repobench-p": task_score("repobench-p", _samples(0.25))})[5]
        assert (code.name, code.score, code.num_tasks, code.n, code.expected) == ("code", 37.5, 2, 501, 1000)
        assert code.partial
        assert code.ci_low is None

    def test_a_full_set_has_every_average_and_none_is_partial(self):
        lines = averages(
            {name: _full(name, 0.25 if task.language == "zh" else 0.5) for name, task in PUBLISHED.items()}
        )
        assert [line.name for line in lines] == [*CATEGORIES, OVERALL, ENGLISH]
        assert [line.expected_tasks for line in lines] == [4, 4, 4, 4, 3, 2, 21, 16]
        assert not any(line.partial for line in lines)
        assert lines[-1].score == 50.0
        assert lines[-2].score == round((16 * 50 + 5 * 25) / 21, 2)
        assert lines[-2].n == lines[-2].expected == 4750

    def test_a_missing_task_makes_an_average_partial(self):
        line = average(OVERALL, {"lcc": _full("lcc", 0.5)}, {"lcc": 500, "qasper": 200})
        assert (line.score, line.num_tasks, line.expected_tasks, line.partial) == (50.0, 1, 2, True)
        nothing = average(OVERALL, {}, {"lcc": 500})
        assert (nothing.score, nothing.partial) == (None, True)


class TestLongBenchE:
    @pytest.mark.parametrize(("length", "bucket"), [(0, "0-4k"), (3999, "0-4k"), (4000, "4-8k"), (8000, "8k+")])
    def test_buckets_end_below_4000_and_8000(self, length, bucket):
        assert bucket_of(length) == bucket

    def test_each_bucket_has_its_own_score_and_published_size(self):
        scores = bucket_scores("qasper", _samples(1, 0, 0.5), [100, 5000, 5001])
        assert [(part.score, part.n, part.expected) for part in scores.values()] == [
            (100.0, 1, 100),
            (25.0, 2, 100),
            (None, 0, 24),
        ]

    def test_averages_are_over_thirteen_tasks_per_bucket(self):
        lines = bucket_averages({task: bucket_scores(task, _samples(1), [10]) for task in LONGBENCH_E_TASKS})
        assert [(line.score, line.num_tasks, line.expected_tasks) for line in lines] == [
            (100.0, 13, 13),
            (None, 0, 13),
            (None, 0, 13),
        ]
        assert sum(line.expected for line in lines) == 3668


class TestScoringPool:
    def test_scores_are_those_of_one_process_in_order_and_start_before_all_is_submitted(self):
        cases = [("qasper", "the cat", ["cat"], None), ("vcsum", "明年的预算", ["预算通过"], None)] * CHUNK_SIZE
        with ScoringPool(num_workers=2) as pool:
            for i, case in enumerate(cases[:CHUNK_SIZE]):
                pool.submit(f"s{i}", *case)
            assert multiprocessing.active_children()
            for i, case in enumerate(cases[CHUNK_SIZE:], start=CHUNK_SIZE):
                pool.submit(f"s{i}", *case)
            results = pool.results()
            pool.submit("late", *cases[0])
            assert list(pool.results())[-1] == "late"
        assert results == {f"s{i}": score_sample(*case) for i, case in enumerate(cases)}
        assert list(results) == [f"s{i}" for i in range(len(cases))]

    def test_the_back_end_reaches_the_processes_and_a_bad_sample_is_named(self):
        line, answer = "self.assertEqual(value, 1); " * 12, "self.assertTrue(values[1]); " * 12
        with ScoringPool("levenshtein", num_workers=1) as pool:
            pool.submit("good", "lcc", line, [answer], None)
            assert pool.results()["good"].score == score_sample("lcc", line, [answer], None, "levenshtein").score
            pool.submit("qasper:17", "qasper", "text", "gold", None)
            with pytest.raises(UserError, match=r"^qasper:17: qasper: answers='gold' is not a list"):
                pool.results()

    def test_an_id_given_twice_and_an_unknown_back_end_are_refused(self):
        with ScoringPool(num_workers=1) as pool:
            pool.submit("same", "qasper", "a", ["a"], None)
            with pytest.raises(UserError, match="sample same was given to the scorer twice"):
                pool.submit("same", "qasper", "b", ["b"], None)
        with pytest.raises(UserError, match="edit_similarity='exact'"):
            ScoringPool("exact")

    @pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc to see processes")
    def test_processes_end_when_the_run_is_killed(self):
        program = (
            "import multiprocessing, time\n"
            "from harness.benchmarks.scoring import ScoringPool\n"
            "pool = ScoringPool(num_workers=1)\n"
            "pool.submit('s', 'qasper', 'a', ['a'], None)\n"
            "pool.results()\n"
            "print(multiprocessing.active_children()[0].pid, flush=True)\n"
            "time.sleep(600)\n"
        )
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT) as run:
            worker = int(run.stdout.readline())
            assert _is_running(worker)
            os.kill(run.pid, signal.SIGKILL)
        deadline = time.monotonic() + DEADLINE_S
        while _is_running(worker) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _is_running(worker)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
