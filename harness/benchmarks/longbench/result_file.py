"""The official result.json, and result.meta.json that says what it was made from."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.benchmarks.longbench.aggregates import Average
from harness.benchmarks.longbench.official_files import file_sha256, parse_json_object, read_text
from harness.benchmarks.scoring import TaskScore
from harness.errors import UserError

SCHEMA_VERSION = 1
TOLERANCE = 0.01
_PACKAGES = ("jieba", "fuzzywuzzy", "rapidfuzz", "rouge-score", "numpy")

TaskScores = Mapping[str, TaskScore]
BucketScores = Mapping[str, Mapping[str, TaskScore]]
OfficialResult = dict[str, Any]


def official_result(scores: TaskScores | BucketScores) -> OfficialResult:
    """Return {task: score}, or {task: {bucket: score}} for LongBench-E; what has no sample is left out."""
    result: OfficialResult = {}
    for task, score in scores.items():
        if isinstance(score, TaskScore):
            result[task] = score.score
        else:
            result[task] = {bucket: part.score for bucket, part in score.items() if part.n}
    return result


def scorer_settings(edit_similarity: str) -> dict[str, Any]:
    """Return all that can change a score: settings and versions."""
    return {
        "edit_similarity": edit_similarity,
        "rouge_l": "as rouge 1.0.1",
        "python": platform.python_version(),
        "packages": {name: version(name) for name in _PACKAGES},
    }


def file_digests(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the SHA-256 of each prediction file by file name."""
    return {path.name: file_sha256(path) for path in files.values()}


def result_meta(
    scores: TaskScores | BucketScores, averages: list[Average], digests: Mapping[str, str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of result.meta.json: digests, settings, and every figure with its n and interval."""
    return {
        "schema_version": SCHEMA_VERSION,
        "files_sha256": dict(digests),
        "scorer": dict(settings),
        "tasks": {
            task: _figures(score)
            if isinstance(score, TaskScore)
            else {bucket: _figures(part) for bucket, part in score.items()}
            for task, score in scores.items()
        },
        "averages": [asdict(average) for average in averages],
    }


def meta_path(result_path: Path) -> Path:
    """Return the path of the meta file beside a result file."""
    return result_path.with_name(f"{result_path.stem}.meta.json")


def write_result(path: Path, result: OfficialResult, meta: Mapping[str, Any], overwrite: bool) -> None:
    """Write a result file and its meta file, each whole or not at all.

    Raises:
        UserError: the result file is there and `overwrite` is False, or the folder cannot be written.
    """
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists and was left as it is. Use --overwrite, another --out, or --check to compare.")
    try:
        for target, content in ((meta_path(path), meta), (path, result)):
            temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
            temporary.write_text(json.dumps(content, ensure_ascii=False, indent=4) + "\n", encoding="utf-8")
            temporary.replace(target)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error}. Give another path with --out.") from error


def differences(
    path: Path, result: OfficialResult, digests: Mapping[str, str], settings: Mapping[str, Any]
) -> list[str]:
    """Return one sentence per figure of a result file that is not within 0.01 of ours, or that only one side has.

    Where a meta file lies beside it, prediction files and back end other than the recorded ones are named as well.

    Raises:
        UserError: the result file cannot be read.
    """
    theirs, ours = _flat(parse_json_object(read_text(path), str(path))), _flat(result)
    found = []
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if name not in theirs:
            found.append(f"{name}: {ours[name]:.2f} here, not in {path.name}")
        elif name not in ours:
            found.append(f"{name}: {theirs[name]} in {path.name}, no predictions here")
        elif not abs(ours[name] - theirs[name]) <= TOLERANCE + 1e-9:
            found.append(f"{name}: {ours[name]:.2f} here, {theirs[name]} in {path.name}")
    return found + _meta_differences(meta_path(path), digests, settings)


def _meta_differences(path: Path, digests: Mapping[str, str], settings: Mapping[str, Any]) -> list[str]:
    if not path.exists():
        return []
    meta = parse_json_object(read_text(path), str(path))
    recorded = meta.get("files_sha256", {})
    found = [
        f"{name}: not the file that {path.name} records"
        for name in sorted(recorded.keys() | digests.keys())
        if recorded.get(name) != digests.get(name)
    ]
    backend = meta.get("scorer", {}).get("edit_similarity")
    if backend != settings["edit_similarity"]:
        found.append(f"edit_similarity: {settings['edit_similarity']} here, {backend} in {path.name}")
    return found


def _flat(result: OfficialResult) -> dict[str, float]:
    flat: dict[str, float] = {}
    for task, score in result.items():
        if isinstance(score, dict):
            flat.update({f"{task} {bucket}": part for bucket, part in score.items()})
        else:
            flat[task] = score
    return flat


def _figures(score: TaskScore) -> dict[str, Any]:
    return {
        "score": score.score,
        "n": score.n,
        "expected": score.expected,
        "num_empty": score.num_empty,
        "ci_low": score.ci_low,
        "ci_high": score.ci_high,
        **score.extra,
    }
