"""Task scores, and a pool of processes that scores samples while others are still being generated."""

import math
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from types import TracebackType
from typing import Self

import numpy as np

from harness.benchmarks.longbench.edit_similarity import DEFAULT_EDIT_SIMILARITY, check_edit_similarity
from harness.benchmarks.sample_score import SampleScore
from harness.benchmarks.scoring_worker import Sample, score_samples, start_worker
from harness.benchmarks.tasks import get_task
from harness.errors import UserError
from harness.hardware import num_cores
from harness.statistics.stats import bootstrap_means, interval

CHUNK_SIZE = 32


@dataclass(frozen=True)
class TaskScore:
    """Score of one task, or of one length bucket of it.

    Attributes:
        task: task name.
        score: mean of the sample scores, 0 to 100 with two decimals; None without a sample.
        n: samples scored.
        expected: samples in the whole set; the score is only the task's score if `n` equals it.
        num_empty: samples whose prediction is empty.
        ci_low, ci_high: 95 % bootstrap interval of the score, None with fewer than 10 independent samples.
        extra: means of the other measures by name, as `score`.
        draws: bootstrap draws of the mean, 0 to 100, for intervals of averages; None where there is no interval.
    """

    task: str
    score: float | None
    n: int
    expected: int
    num_empty: int
    ci_low: float | None
    ci_high: float | None
    extra: dict[str, float]
    draws: np.ndarray | None = field(default=None, repr=False, compare=False)


def task_score(
    task_name: str,
    samples: Sequence[SampleScore],
    expected: int | None = None,
    clusters: Sequence[Hashable] | None = None,
) -> TaskScore:
    """Return the score of a task from its sample scores.

    Args:
        task_name: one of `harness.benchmarks.tasks.TASKS`.
        samples: the scored samples, in any order.
        expected: samples that a full set has; None: `num_rows` of the task.
        clusters: per sample, what it shares with others (its context's hash); None: nothing.
    """
    if expected is None:
        expected = get_task(task_name).num_rows
    num_empty = sum(sample.empty for sample in samples)
    if not samples:
        return TaskScore(task_name, None, 0, expected, num_empty, None, None, {})
    percents = [100 * sample.score for sample in samples]
    draws = bootstrap_means(percents, clusters, task_name)
    low, high = interval(draws) or (None, None)
    return TaskScore(
        task=task_name,
        score=_mean_percent([sample.score for sample in samples]),
        n=len(samples),
        expected=expected,
        num_empty=num_empty,
        ci_low=None if low is None else round(low, 2),
        ci_high=None if high is None else round(high, 2),
        extra={name: _mean_percent([sample.extra[name] for sample in samples]) for name in samples[0].extra},
        draws=draws,
    )


def _mean_percent(scores: Sequence[float]) -> float:
    return round(100 * math.fsum(scores) / len(scores), 2)


class ScoringPool:
    """Processes that score samples while the caller goes on; use as a context manager.

    The processes are spawned, so they inherit no model and no GPU of the caller; Python imports the caller's main
    module in each of them, so that module must not import vLLM at its top level. They start with the first full chunk.
    """

    def __init__(
        self,
        edit_similarity: str = DEFAULT_EDIT_SIMILARITY,
        num_workers: int | None = None,
        chunk_size: int = CHUNK_SIZE,
    ) -> None:
        """Prepare the pool.

        Args:
            edit_similarity: back end of the code tasks.
            num_workers: scoring processes; None: one per CPU this process may use.
            chunk_size: samples that go to a process at once; 1 to have each score soon.

        Raises:
            UserError: there is no such back end.
        """
        check_edit_similarity(edit_similarity)
        self._edit_similarity = edit_similarity
        self._chunk_size = chunk_size
        self._executor = ProcessPoolExecutor(num_workers or num_cores(), get_context("spawn"), initializer=start_worker)
        self._sample_ids: set[str] = set()
        self._chunk: list[Sample] = []
        self._futures: list[Future[list[tuple[str, SampleScore]]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def submit(
        self, sample_id: str, task: str, prediction: str, answers: list[str], all_classes: list[str] | None
    ) -> None:
        """Hand over one sample; returns at once.

        Raises:
            UserError: this id was handed over before.
        """
        if sample_id in self._sample_ids:
            raise UserError(f"sample {sample_id} was given to the scorer twice. Give every sample an id of its own.")
        self._sample_ids.add(sample_id)
        self._chunk.append(Sample(sample_id, task, prediction, answers, all_classes))
        if len(self._chunk) == self._chunk_size:
            self._send_chunk()

    def start(self) -> None:
        """Start a process now, and not in the middle of what the caller times."""
        self._executor.submit(score_samples, [], self._edit_similarity)

    def ready(self, timeout_s: float = 0.0) -> dict[str, SampleScore]:
        """Return the scores that are there now, or within `timeout_s`; each once. Faults are left to `results`."""
        self._send_chunk()
        wait(self._futures, timeout_s)
        done = [future for future in self._futures if future.done() and future.exception() is None]
        self._futures = [future for future in self._futures if future not in done]
        return {sample_id: score for future in done for sample_id, score in future.result()}

    def results(self) -> dict[str, SampleScore]:
        """Wait for all samples handed over so far and return their scores by id, in the order of `submit`.

        Those that `ready` gave already are left out.

        Raises:
            UserError: a sample could not be scored; the message starts with its id.
        """
        self._send_chunk()
        return {sample_id: score for future in self._futures for sample_id, score in future.result()}

    def _send_chunk(self) -> None:
        if self._chunk:
            self._futures.append(self._executor.submit(score_samples, self._chunk, self._edit_similarity))
            self._chunk = []
