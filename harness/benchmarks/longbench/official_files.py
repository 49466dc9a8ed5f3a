"""Predictions in LongBench's own format: a folder of `<task>.jsonl`, one row a line."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.benchmarks.tasks import TASKS
from harness.errors import UserError

ROW_KEYS = ("pred", "answers", "all_classes")


@dataclass(frozen=True)
class PredictionRow:
    """One line of a prediction file.

    Attributes:
        place: file name and line number, "qasper.jsonl:17".
        prediction, answers, all_classes: as published; their types are checked when the row is scored.
        length: the row's length field (words, or characters in Chinese), None where the file has none.
    """

    place: str
    prediction: str
    answers: list[str]
    all_classes: list[str] | None
    length: int | None


def prediction_files(folder: Path) -> dict[str, Path]:
    """Return the prediction files of a folder by task, LongBench's in its order, then own ones.

    Raises:
        UserError: no such folder, no `.jsonl` file in it, or one that is named after no task.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder. Give the folder that holds the <task>.jsonl files.")
    found = {path.stem: path for path in sorted(folder.glob("*.jsonl"))}
    if not found:
        raise UserError(f"{folder} holds no <task>.jsonl file. Give the folder that holds the predictions.")
    unknown = [path.name for stem, path in found.items() if stem not in TASKS]
    if unknown:
        raise UserError(
            f"{folder}: {', '.join(unknown)} is named after no task. "
            f"Move it away or rename it; the tasks are {', '.join(TASKS)}."
        )
    return {task: found[task] for task in TASKS if task in found}


def read_prediction_file(path: Path) -> list[PredictionRow]:
    """Read one file of predictions.

    Raises:
        UserError: unreadable, a line that is no row (named by file and line), no row at all, or rows of two tasks.
    """
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            place = f"{path.name}:{number}"
            rows.append(_prediction_row(place, parse_json_object(line, place)))
    if not rows:
        raise UserError(f"{path} holds no row. Remove the file, or generate the task again.")
    if len({json.dumps(row.all_classes) for row in rows}) > 1:
        raise UserError(f"{path} mixes rows with different all_classes. Give each task a file of its own.")
    return rows


def read_text(path: Path) -> str:
    """Return the UTF-8 text of a file.

    Raises:
        UserError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}. Check the path and the encoding (UTF-8).") from error


def parse_json_object(text: str, place: str) -> dict[str, Any]:
    """Return the JSON object in `text`.

    Raises:
        UserError: it is none; the message names `place`.
    """
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{place} is not JSON ({error}). Remove or mend the line.") from error
    if not isinstance(parsed, dict):
        raise UserError(f"{place} holds {type(parsed).__name__}, not a JSON object. Remove or mend the line.")
    return parsed


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes as hex digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _prediction_row(place: str, fields: dict[str, Any]) -> PredictionRow:
    missing = [key for key in ROW_KEYS if key not in fields]
    if missing:
        raise UserError(f"{place} lacks {', '.join(missing)}. A row has {', '.join(ROW_KEYS)} and length.")
    return PredictionRow(place, fields["pred"], fields["answers"], fields["all_classes"], fields.get("length"))
