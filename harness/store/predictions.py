"""`predictions.jsonl`: one line a finished sample, appended as it finishes.

Scores come a moment later and go to `scores.jsonl`, until the session ends and puts them where they belong.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from harness.errors import UserError
from harness.store.manifest import write_atomically

FILE_NAME = "predictions.jsonl"
SCORES = "scores.jsonl"


@dataclass(frozen=True)
class Prediction:
    """One answered sample.

    Attributes:
        sample_id: unique in the run; `row_id` is the data set's own id.
        prediction: the text as generated, leading spaces included, never cut.
        length: LongBench's own length field (words or characters); for RULER and the needle grid the tokens asked for.
        truncated: whether the middle of the prompt was cut out.
        score: official metric of this row, 0 to 1; `extra_scores` are other measures by name; `empty` tells whether
            what is scored holds nothing. All three are None until the sample is scored.
        num_evictions, num_evicted_tokens, peak_resident_tokens, final_resident_tokens, peak_blocks, num_preemptions:
            what eviction did; tokens of one layer.
        prompt_sha256, task_prompt_sha256: digest of the prompt inside its chat template, and of the prompt alone.
        budget_tokens: `policy.budget` in tokens, for this prompt; None where not recorded, or without one.
        planned_tokens: how many tokens of the prompt the policy means to keep, per layer and KV head, on average.
        cut_in_reasoning: whether the answer ended inside a reasoning block; None where not recorded.
        ttft_s, e2e_s: seconds from arrival in the engine to the first token, to the end.
        depth: where in the context the only needle lies, 0 (start) to 1 (end); None where not known.
        needle_spans, value_spans: [first token, one after the last] in the prompt of each needle, and of the answer in
            it; None where not known.
    """

    sample_id: str
    task: str
    row_id: str
    prediction: str
    answers: list[str]
    all_classes: list[str] | None
    length: int
    context_sha256: str
    prompt_sha256: str
    num_prompt_tokens: int
    truncated: bool
    num_output_tokens: int
    finish_reason: str
    num_evictions: int
    num_evicted_tokens: int
    peak_resident_tokens: int
    final_resident_tokens: int
    peak_blocks: int
    num_preemptions: int
    ttft_s: float | None
    e2e_s: float | None
    score: float | None = None
    extra_scores: dict[str, float] | None = None
    empty: bool | None = None
    task_prompt_sha256: str | None = None
    cut_in_reasoning: bool | None = None
    depth: float | None = None
    needle_spans: list[list[int]] | None = None
    value_spans: list[list[int]] | None = None
    budget_tokens: int | None = None
    planned_tokens: int | None = None


def read_predictions(folder: Path) -> list[Prediction]:
    """The samples finished so far, with the scores known so far; a last line that a crash cut short is left out.

    Raises:
        UserError: another line cannot be read, or a sample occurs twice.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return []
    lines = path.read_bytes()[: _sound_length(path)].splitlines()
    found: dict[str, Prediction] = {}
    for number, line in enumerate(lines, start=1):
        try:
            prediction = Prediction(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{path}:{number} is no prediction ({error}). Mend the line or use overwrite=true."
            ) from None
        if prediction.sample_id in found:
            raise UserError(f"{path}:{number} has sample {prediction.sample_id} again. Delete one of the two lines.")
        found[prediction.sample_id] = prediction
    scores = _read_scores(folder)
    return [replace(p, **scores[p.sample_id]) if p.sample_id in scores else p for p in found.values()]


def predictions_sha256(folder: Path) -> str | None:
    """Digest of the file as it is, None without one."""
    path = folder / FILE_NAME
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


@contextmanager
def open_for_append(folder: Path, name: str = FILE_NAME) -> Iterator[TextIO]:
    """Open a file for `append_prediction` or `append_score`, cutting off a last line that a crash left unfinished."""
    path = folder / name
    if path.exists():
        os.truncate(path, _sound_length(path))
    with path.open("a", encoding="utf-8", newline="\n") as file:
        yield file


def append_prediction(file: TextIO, prediction: Prediction) -> None:
    """Write one line and hand it to the operating system."""
    file.write(_line(prediction))
    file.flush()


def append_score(file: TextIO, sample_id: str, score: float, extra_scores: dict[str, float], empty: bool) -> None:
    """Write down the score of a sample whose prediction is on disk."""
    record = {"sample_id": sample_id, "score": score, "extra_scores": extra_scores, "empty": empty}
    file.write(json.dumps(record) + "\n")
    file.flush()


def fold_scores(folder: Path) -> None:
    """Put the scores written down so far into the lines of their predictions."""
    path = folder / SCORES
    if path.exists():
        replace_predictions(folder, read_predictions(folder))
        path.unlink()


def replace_predictions(folder: Path, predictions: Iterable[Prediction]) -> None:
    """Write the whole file anew in one step, to fill in scores."""
    write_atomically(folder / FILE_NAME, "".join(_line(prediction) for prediction in predictions))


def _read_scores(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / SCORES
    if not path.exists():
        return {}
    try:
        records = [json.loads(line) for line in path.read_bytes()[: _sound_length(path)].splitlines()]
        return {record.pop("sample_id"): record for record in records}
    except (ValueError, KeyError) as error:
        raise UserError(f"{path} holds no scores ({error}). Delete it, and the samples are scored again.") from None


def _line(prediction: Prediction) -> str:
    return json.dumps(asdict(prediction), ensure_ascii=False) + "\n"


def _sound_length(path: Path) -> int:
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    start = content.rfind(b"\n", 0, max(end - 1, 0)) + 1
    return end if end == 0 or _is_record(content[start:end]) else start


def _is_record(line: bytes) -> bool:
    try:
        record: Any = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict)
