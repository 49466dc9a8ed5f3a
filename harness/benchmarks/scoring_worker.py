"""What runs inside a scoring process. Light on purpose: no torch, no vLLM, no numpy."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from typing import NamedTuple

from harness.benchmarks.sample_score import SampleScore, score_sample
from harness.errors import UserError


class Sample(NamedTuple):
    """One prediction to score; `sample_id` names it in results and errors."""

    sample_id: str
    task: str
    prediction: str
    answers: list[str]
    all_classes: list[str] | None


def start_worker() -> None:
    """Prepare a scoring process: Ctrl-C left to the parent, and an end when the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def score_samples(samples: Sequence[Sample], edit_similarity: str) -> list[tuple[str, SampleScore]]:
    """Score samples in order.

    Raises:
        UserError: a sample has a wrong value; the message starts with its id.
    """
    return [(sample.sample_id, _score(sample, edit_similarity)) for sample in samples]


def _score(sample: Sample, edit_similarity: str) -> SampleScore:
    try:
        return score_sample(sample.task, sample.prediction, sample.answers, sample.all_classes, edit_similarity)
    except UserError as error:
        raise UserError(f"{sample.sample_id}: {error}") from error
    except Exception as error:
        error.add_note(f"while scoring {sample.sample_id}")
        raise


def _exit_with_parent() -> None:
    """End this process when the parent is gone: after a kill -9 nobody would close the queue it waits on."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
