"""Scores by prompt length: set by the benchmark, LongBench-E's buckets of words, else powers of two of tokens."""

from collections.abc import Sequence
from typing import Any

from harness.benchmarks.generated import TASKS_OF
from harness.benchmarks.longbench.aggregates import BUCKETS, Average, average, bucket_of
from harness.benchmarks.sample_score import SampleScore
from harness.benchmarks.scoring import TaskScore, task_score
from harness.benchmarks.tasks import TASKS
from harness.store.manifest import Manifest
from harness.store.predictions import Prediction

ALL_TASKS = "all tasks"
SMALLEST_LENGTH = 512


def scores_by_length(manifest: Manifest, predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """One record a length and task, and one a length with the mean over its tasks (`task` is ALL_TASKS).

    Scores run from 0 to 100. `length` is the number of tokens that the benchmark set, LongBench-E's bucket, or
    "up to" a power of two of prompt tokens; lengths ascend.
    """
    in_cell: dict[tuple[int | str, str], list[Prediction]] = {}
    for prediction in predictions:
        if prediction.score is not None:
            in_cell.setdefault((_length(manifest, prediction), prediction.task), []).append(prediction)
    records = []
    for length in sorted({length for length, _ in in_cell}, key=order):
        scores = {task: _score(task, in_cell[length, task]) for task in TASKS if (length, task) in in_cell}
        mean = average(ALL_TASKS, scores, {task: score.n for task, score in scores.items()})
        records += [_record(length, task, score) for task, score in scores.items()]
        records.append(_record(length, ALL_TASKS, mean))
    return records


def length_axis(manifest: Manifest) -> str:
    """What the lengths of a run are."""
    benchmark = manifest.config["benchmark"]
    if benchmark["source"] in TASKS_OF:
        return "Length set by the benchmark (tokens)"
    return "Length of the row (LongBench-E: words)" if benchmark["longbench_e"] else "Prompt tokens"


def order(length: int | str) -> int:
    """Where a length stands among others of its kind."""
    return BUCKETS.index(length) if length in BUCKETS else int(str(length).split(" ")[-1])


def _length(manifest: Manifest, prediction: Prediction) -> int | str:
    benchmark = manifest.config["benchmark"]
    if benchmark["source"] in TASKS_OF:
        return prediction.length
    if benchmark["longbench_e"]:
        return bucket_of(prediction.length)
    return f"up to {max(SMALLEST_LENGTH, 1 << (prediction.num_prompt_tokens - 1).bit_length())}"


def _score(task: str, members: Sequence[Prediction]) -> TaskScore:
    samples = [SampleScore(p.score, bool(p.empty), p.extra_scores or {}) for p in members]
    return task_score(task, samples, len(samples), [p.context_sha256 for p in members])


def _record(length: int | str, task: str, score: TaskScore | Average) -> dict[str, Any]:
    shown = {"score": score.score, "ci_low": score.ci_low, "ci_high": score.ci_high, "num_samples": score.n}
    return {"length": length, "task": task, **shown}
