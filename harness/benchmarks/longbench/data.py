"""Rows of LongBench: reading, checking, counting.

Format: THUDM/LongBench at 2e00731f, README (one JSON object a row with the eight fields of `_REQUIRED`).
"""

import json
from collections.abc import Callable

from harness.benchmarks.longbench.sources import RowsFile, file_sha256, iter_records
from harness.benchmarks.rows import LoadReport, Row
from harness.benchmarks.task import Task
from harness.errors import UserError


def load_rows(
    file: RowsFile, task: Task, limit: int | None = None, on_bad_row: str = "fail", longbench_e: bool = False
) -> tuple[list[Row], LoadReport]:
    """Read the first `limit` good rows of a task in the order of the file; no line after them is read.

    Args:
        on_bad_row: "fail" raises at the first bad row, "skip" leaves bad rows out and lists them in the report.
        longbench_e: the file is one of LongBench-E.

    Raises:
        UserError: a bad row (missing field, wrong type, empty context, not UTF-8, not JSON, a row of another task,
            an `_id` seen before), a damaged file, or no good row at all.
    """
    rows: dict[str, Row] = {}
    skipped: list[str] = []
    for number, record in iter_records(file):
        where = f"{file.name}:{number}"
        try:
            row = parse_row(record, task, where)
            if row.row_id in rows:
                raise ValueError(f"_id {row.row_id!r} was seen before, at {rows[row.row_id].where}")
        except ValueError as error:
            if on_bad_row == "fail":
                raise UserError(
                    f"{where}: {error}. Mend the row, or leave bad rows out with benchmark.on_bad_row=skip."
                ) from error
            skipped.append(f"{where}: {error}")
            continue
        rows[row.row_id] = row
        if len(rows) == limit:
            break
    if not rows:
        raise UserError(f"{file.name} holds no good row of {task.name} ({len(skipped)} bad). Check benchmark.path.")
    num_expected = task.num_rows_e if longbench_e else task.num_rows
    return list(rows.values()), LoadReport(len(rows), num_expected, skipped, file.name, file_sha256(file))


def parse_row(record: bytes | dict[str, object], task: Task, where: str) -> Row:
    """Check one JSONL line, or one row that was read already, and return it as a `Row` of `task`.

    Raises:
        ValueError: the row is bad; the message says what is wrong.
    """
    values = _parse_line(record) if isinstance(record, bytes) else record
    for name, (kind, is_right) in _REQUIRED.items():
        if name not in values:
            raise ValueError(f"field {name!r} is missing")
        if not is_right(values[name]):
            raise ValueError(f"field {name!r} is {_describe(values[name])}, must be {kind}")
    if values["dataset"] not in (task.name, f"{task.name}_e"):
        raise ValueError(f"it is a row of {values['dataset']!r}, not of {task.name!r}")
    _check_values(values, task)
    classes = values["all_classes"]
    return Row(
        row_id=values["_id"],
        task=task.name,
        context=values["context"],
        input=values["input"],
        answers=tuple(values["answers"]),
        all_classes=None if classes is None else tuple(classes),
        length=values["length"],
        language=values["language"],
        where=where,
    )


def _parse_line(line: bytes) -> dict[str, object]:
    try:
        values = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} of the line is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos} of the line)") from error
    except RecursionError as error:
        raise ValueError("not a row (nested too deep)") from error
    if not isinstance(values, dict):
        raise ValueError(f"the line holds {_describe(values)}, must hold an object")
    return values


def _check_values(values: dict[str, object], task: Task) -> None:
    """Check what the types alone do not tell."""
    if not values["context"].strip():
        raise ValueError("field 'context' is empty")
    if task.needs_input and not values["input"].strip():
        raise ValueError(f"field 'input' is empty, and the prompt of {task.name} needs it")
    if (values["all_classes"] is not None) != (task.metric == "classification"):
        wanted = "a list of strings" if task.metric == "classification" else "null"
        raise ValueError(f"field 'all_classes' is {_describe(values['all_classes'])}, must be {wanted} in {task.name}")
    texts = (values["_id"], values["context"], values["input"], *values["answers"], *(values["all_classes"] or ()))
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it holds half a surrogate pair, which is not text") from error


def _describe(value: object) -> str:
    if isinstance(value, list):
        content = "empty" if not value else "strings" if _is_string_list(value) else "other things"
        return f"a list ({content})"
    kinds = {str: "a string", bool: "a boolean", int: "a number", float: "a number", dict: "an object"}
    return kinds.get(type(value), "null")


def _is_string(value: object) -> bool:
    return isinstance(value, str)


def _is_string_list(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_REQUIRED: dict[str, tuple[str, Callable[[object], bool]]] = {
    "_id": ("a string", _is_string),
    "dataset": ("a string", _is_string),
    "context": ("a string", _is_string),
    "input": ("a string", _is_string),
    "answers": ("a list of strings", _is_string_list),
    "all_classes": ("null or a list of strings", lambda value: value is None or _is_string_list(value)),
    "length": ("a whole number", _is_count),
    "language": ("a string", _is_string),
}
