"""Averages over tasks and LongBench-E's length buckets.

An average is the mean of the task scores (not of the samples), as LongBench reports it. No figure goes without the
number of samples behind it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.benchmarks.longbench.tasks import LONGBENCH_E_TASKS, PUBLISHED
from harness.benchmarks.sample_score import SampleScore
from harness.benchmarks.scoring import TaskScore, task_score
from harness.benchmarks.task import CATEGORIES, OWN
from harness.benchmarks.tasks import TASKS
from harness.statistics.stats import average_draws, interval

OVERALL = "all tasks"
ENGLISH = "English and code tasks"

BUCKETS = ("0-4k", "4-8k", "8k+")
_BUCKET_ENDS = (4000, 8000)
_FULL_BUCKETS = (100, 100, 100)
# Rows per bucket where not 100 each (LongBench paper, arXiv 2308.14508, table of LongBench-E).
_OTHER_BUCKETS = {"qasper": (100, 100, 24), "multifieldqa_en": (67, 70, 13), "multi_news": (100, 100, 94)}


@dataclass(frozen=True)
class Average:
    """Mean of task scores.

    Attributes:
        name: what it is over.
        score: 0 to 100 with two decimals, over the tasks there are; None if there is none.
        num_tasks, expected_tasks: tasks with a score, and tasks it should be over.
        n, expected: samples scored, and samples of all expected tasks.
        ci_low, ci_high: 95 % interval, None if one of the tasks has none.
        partial: whether a task is missing or has fewer samples than published.
    """

    name: str
    score: float | None
    num_tasks: int
    expected_tasks: int
    n: int
    expected: int
    ci_low: float | None
    ci_high: float | None
    partial: bool


def format_figure(score: float | None, n: int, expected: int) -> str:
    """Return a score with the samples behind it, for example "31.20 (127/200)"; "-" stands for no score."""
    return f"{'-' if score is None else f'{score:.2f}'} ({n}/{expected})"


def averages(scores: Mapping[str, TaskScore]) -> list[Average]:
    """Return the averages of LongBench: of each category, of all tasks, and of all tasks that are not Chinese."""
    expected = {name: task.num_rows for name, task in PUBLISHED.items()}
    return [
        *(_category_average(category, scores, expected) for category in CATEGORIES),
        average(OVERALL, scores, expected),
        average(ENGLISH, scores, {name: rows for name, rows in expected.items() if PUBLISHED[name].language != "zh"}),
    ]


def bucket_averages(buckets: Mapping[str, Mapping[str, TaskScore]]) -> list[Average]:
    """Return LongBench-E's averages over its 13 tasks, one per length bucket (`buckets`: task -> bucket -> score)."""
    return [
        average(
            f"{OVERALL} {bucket}",
            {task: scores[bucket] for task, scores in buckets.items()},
            {task: expected_in_bucket(task, bucket) for task in LONGBENCH_E_TASKS},
        )
        for bucket in BUCKETS
    ]


def overall_average(scores: Mapping[str, TaskScore], expected: Mapping[str, int]) -> Average:
    """Return the average over those tasks of `expected` that are LongBench's; else over all, named after them."""
    published = {task: rows for task, rows in expected.items() if task in PUBLISHED}
    if published:
        return average(OVERALL, scores, published)
    (category, *others) = {TASKS[task].category if task in TASKS else OWN for task in expected}
    return average(OWN if others or category == OWN else f"all of {category}", scores, expected)


def average(name: str, scores: Mapping[str, TaskScore], expected: Mapping[str, int]) -> Average:
    """Return the average of the tasks in `expected` (task -> published number of samples) that have a score.

    The published scores, with two decimals, are averaged, so that anyone can redo it from result.json.
    """
    present = [scores[task] for task in expected if task in scores and scores[task].score is not None]
    low, high = interval(average_draws([score.draws for score in present])) or (None, None)
    return Average(
        name=name,
        score=round(sum(score.score or 0.0 for score in present) / len(present), 2) if present else None,
        num_tasks=len(present),
        expected_tasks=len(expected),
        n=sum(score.n for score in present),
        expected=sum(expected.values()),
        ci_low=None if low is None else round(low, 2),
        ci_high=None if high is None else round(high, 2),
        partial=len(present) < len(expected) or any(score.n < score.expected for score in present),
    )


def bucket_of(length: int) -> str:
    """Return the LongBench-E bucket of a row by its `length` field (words, or characters in Chinese)."""
    return BUCKETS[sum(length >= end for end in _BUCKET_ENDS)]


def expected_in_bucket(task_name: str, bucket: str) -> int:
    """Return the rows that LongBench-E has of a task in a bucket."""
    return _OTHER_BUCKETS.get(task_name, _FULL_BUCKETS)[BUCKETS.index(bucket)]


def bucket_scores(task_name: str, samples: Sequence[SampleScore], lengths: Sequence[int]) -> dict[str, TaskScore]:
    """Return a task's score in every LongBench-E bucket; `lengths` are the rows' `length` fields."""
    in_bucket: dict[str, list[SampleScore]] = {bucket: [] for bucket in BUCKETS}
    for sample, length in zip(samples, lengths, strict=True):
        in_bucket[bucket_of(length)].append(sample)
    return {
        bucket: task_score(task_name, members, expected_in_bucket(task_name, bucket))
        for bucket, members in in_bucket.items()
    }


def _category_average(category: str, scores: Mapping[str, TaskScore], expected: Mapping[str, int]) -> Average:
    return average(
        category, scores, {name: rows for name, rows in expected.items() if PUBLISHED[name].category == category}
    )
