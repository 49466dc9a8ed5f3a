"""Scores by prompt length: RULER and the needle grid by the tokens asked for, LongBench-E by its buckets of words."""

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


def scores_by_length(manifest: Manifest, predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """One record a length and task, and one a length with the mean over its tasks (`task` is ALL_TASKS).

    Scores run from 0 to 100. `length` is the number of tokens, or LongBench-E's name of the bucket; lengths ascend.
    Empty for a benchmark without lengths.
    """
    in_cell: dict[tuple[int | str, str], list[Prediction]] = {}
    for prediction in predictions:
        label = _label(manifest, prediction)
        if label is not None and prediction.score is not None:
            in_cell.setdefault((label, prediction.task), []).append(prediction)
    lengths = sorted(
        {label for label, _ in in_cell}, key=lambda label: BUCKETS.index(label) if label in BUCKETS else label
    )
    records = []
    for length in lengths:
        scores = {task: _score(task, in_cell[length, task]) for task in TASKS if (length, task) in in_cell}
        mean = average(ALL_TASKS, scores, {task: score.n for task, score in scores.items()})
        records += [_record(length, task, score) for task, score in scores.items()]
        records.append(_record(length, ALL_TASKS, mean))
    return records


def _label(manifest: Manifest, prediction: Prediction) -> int | str | None:
    benchmark = manifest.config["benchmark"]
    if benchmark["source"] in TASKS_OF:
        return prediction.length
    return bucket_of(prediction.length) if benchmark["longbench_e"] else None


def _score(task: str, members: Sequence[Prediction]) -> TaskScore:
    samples = [SampleScore(p.score, bool(p.empty), p.extra_scores or {}) for p in members]
    return task_score(task, samples, len(samples), [p.context_sha256 for p in members])


def _record(length: int | str, task: str, score: TaskScore | Average) -> dict[str, Any]:
    shown = {"score": score.score, "ci_low": score.ci_low, "ci_high": score.ci_high, "num_samples": score.n}
    return {"length": length, "task": task, **shown}
