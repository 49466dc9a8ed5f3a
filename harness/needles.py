"""What became of the needles: in which layers and heads their tokens stayed, against whether they were found.

`needles.csv` of a run folder: one row a layer and head, means over the samples whose needle is known.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.retention import RetentionRecord, read_retention
from harness.store.manifest import write_atomically
from harness.store.predictions import Prediction, read_predictions

FILE_NAME = "needles.csv"
COLUMNS = ("layer", "head", "kept", "kept_if_found", "kept_if_missed", "num_found", "num_missed")
FOUND_SCORE = 0.5  # of a sample with one answer, which scores 0 or 1


@dataclass(frozen=True)
class NeedleSample:
    """The needles of one sample.

    Attributes:
        length: tokens of prompt and answer that were asked for.
        depth: where in the context the only needle lies, 0 to 1; None if there are several.
        score: 0 to 1.
        kept: float64 [layers, heads], share of the answer's tokens inside the needles that was resident when the first
            token was generated; one head if all heads of the layers share a choice.
    """

    sample_id: str
    task: str
    length: int
    depth: float | None
    score: float
    kept: np.ndarray

    @property
    def found(self) -> bool:
        """Whether the answer was right."""
        return self.score >= FOUND_SCORE


@dataclass(frozen=True)
class Survival:
    """Means over samples of a run.

    Attributes:
        num_found, num_missed: samples whose answer was right, and others.
        kept: float64 [layers, heads], mean share of needle tokens kept.
        kept_if_found, kept_if_missed: the same over those samples alone; None if there are none.
    """

    num_found: int
    num_missed: int
    kept: np.ndarray
    kept_if_found: np.ndarray | None
    kept_if_missed: np.ndarray | None


def needle_samples(predictions: Iterable[Prediction], records: Iterable[RetentionRecord]) -> list[NeedleSample]:
    """Put answers beside what was kept; samples without needle, score or record are left out.

    Args:
        records: of the phase "prefill_end", others do not count.
    """
    by_id = {record.sample_id: record for record in records if record.phase == "prefill_end"}
    return [
        NeedleSample(p.sample_id, p.task, p.length, p.depth, p.score, _kept(by_id[p.sample_id], p.value_spans))
        for p in predictions
        if p.sample_id in by_id and p.value_spans and p.score is not None
    ]


def survival(samples: Sequence[NeedleSample]) -> Survival | None:
    """Average over samples of one run; None without samples."""
    if not samples:
        return None
    found = [sample.kept for sample in samples if sample.found]
    missed = [sample.kept for sample in samples if not sample.found]
    return Survival(
        num_found=len(found),
        num_missed=len(missed),
        kept=np.mean([sample.kept for sample in samples], axis=0),
        kept_if_found=np.mean(found, axis=0) if found else None,
        kept_if_missed=np.mean(missed, axis=0) if missed else None,
    )


def write_needles(folder: Path) -> None:
    """Write the survival of a run's needles into its folder, if it has needles and recorded what it kept."""
    mean = survival(needle_samples(read_predictions(folder), read_retention(folder)))
    if mean is None:
        return
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for layer, head in np.ndindex(mean.kept.shape):
        parts = [mean.kept, mean.kept_if_found, mean.kept_if_missed]
        shares = ["" if part is None else round(part[layer, head], 6) for part in parts]
        writer.writerow((layer, head, *shares, mean.num_found, mean.num_missed))
    write_atomically(folder / FILE_NAME, text.getvalue())


def _kept(record: RetentionRecord, spans: Sequence[Sequence[int]]) -> np.ndarray:
    """Share of the spans' tokens in each list of a record, float64 [layers, heads]; a shared list stands for all."""
    wanted = {position for start, end in spans for position in range(start, end)}
    heads = max(map(len, record.layers))
    shares = [[len(wanted.intersection(kept)) / len(wanted) for kept in layer] for layer in record.layers]
    return np.array([layer * heads if len(layer) == 1 else layer for layer in shares])
