"""KV blocks over time, and the times of single requests, as recorded in a run folder."""

import csv
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from harness.engines.contract import BlockUsageSample
from harness.report.reading.runs import Run
from harness.store.block_usage import FILE_NAME
from harness.store.predictions import Prediction

PERCENTILES = (50, 90, 99)


def read_usage(run: Run) -> Sequence[BlockUsageSample]:
    """The engine steps of a run in order, its sessions one after the other; empty if they were not recorded."""
    path = run.folder / FILE_NAME
    return _read_usage(path, path.stat().st_mtime_ns) if path.exists() else []


def thinned(usage: Sequence[BlockUsageSample], most: int) -> list[BlockUsageSample]:
    """At most so many steps; of the steps that share one, that with the most blocks, so that peaks stay."""
    size = max(1, -(-len(usage) // most))
    parts = (usage[start : start + size] for start in range(0, len(usage), size))
    return [max(part, key=lambda step: step.blocks) for part in parts]


def peak_blocks(usage: Sequence[BlockUsageSample], in_prefill: bool) -> int | None:
    """Most KV blocks after a step that read prompts, or after one that read none; None if that was not recorded."""
    if not any(step.prefilling for step in usage):
        return None
    of_kind = [step.blocks for step in usage if step.running and bool(step.prefilling) == in_prefill]
    return max(of_kind, default=None)


def mean_blocks(usage: Sequence[BlockUsageSample]) -> float | None:
    """Mean KV blocks in use over time, as in load tests; None without two steps."""
    spans = [(step.blocks, later.t_s - step.t_s) for step, later in pairwise(usage)]
    whole = sum(seconds for _, seconds in spans)
    return sum(blocks * seconds for blocks, seconds in spans) / whole if whole else None


def blocks_per_request(usage: Sequence[BlockUsageSample]) -> float | None:
    """Mean KV blocks of a running request over time, whatever number of them runs; None without two steps."""
    spans = [(step, later.t_s - step.t_s) for step, later in pairwise(usage) if step.running]
    requests = sum(step.running * seconds for step, seconds in spans)
    return sum(step.blocks * seconds for step, seconds in spans) / requests if requests else None


def latencies(predictions: Sequence[Prediction]) -> dict[str, Sequence[float]]:
    """p50, p90 and p99 in seconds, of those that were recorded.

    `ttft`: from arrival in the engine to the first token, waiting included; `e2e`: to the end of the answer; `tpot`: a
    token after the first, what is left of a request's time by its later tokens, a stop token included.
    """
    timed = [p for p in predictions if p.ttft_s is not None and p.e2e_s is not None]
    later = [(p.e2e_s - p.ttft_s, p.num_output_tokens - 1 + (p.finish_reason == "stop")) for p in timed]
    times = {
        "ttft": [p.ttft_s for p in predictions if p.ttft_s is not None],
        "tpot": [seconds / tokens for seconds, tokens in later if tokens > 0],
        "e2e": [p.e2e_s for p in predictions if p.e2e_s is not None],
    }
    return {key: np.percentile(found, PERCENTILES).tolist() for key, found in times.items() if found}


def total_tokens_per_s(run: Run) -> float | None:
    """Prompt and answer tokens a second; None if a session that was killed answered some of the samples."""
    sessions = [session for session in run.manifest.sessions if session.generation_s > 0]
    if sum(session.num_samples for session in sessions) != len(run.answered) or not sessions:
        return None
    tokens = sum(p.num_prompt_tokens for p in run.answered) + sum(session.num_output_tokens for session in sessions)
    return tokens / sum(session.generation_s for session in sessions)


@lru_cache(maxsize=2)
def _read_usage(path: Path, changed_ns: int) -> list[BlockUsageSample]:
    """The file as it is since `changed_ns`; a row of a table asks several times for a run's and its baseline's."""
    content = path.read_bytes()
    whole_lines = content[: content.rfind(b"\n") + 1].decode().splitlines()
    usage: list[BlockUsageSample] = []
    session, offset = "", 0.0
    for row in csv.DictReader(whole_lines):
        if row["session"] != session:
            session, offset = row["session"], usage[-1].t_s if usage else 0.0
        usage.append(_step(row, offset))
    return usage


def _step(row: dict[str, str], offset: float) -> BlockUsageSample:
    """A line of the file; those of older runs do not tell which requests read prompts."""
    t_s, blocks, running = offset + float(row["t_s"]), int(row["blocks"]), int(row["running"])
    return BlockUsageSample(t_s, blocks, running, int(row.get("prefilling", 0)))
