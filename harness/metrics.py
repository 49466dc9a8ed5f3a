"""From the predictions and sessions of a run to its numbers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

import numpy as np

from harness.benchmarks.chat import has_reasoning
from harness.benchmarks.longbench.aggregates import overall_average
from harness.benchmarks.sample_score import SampleScore
from harness.benchmarks.scoring import TaskScore, task_score
from harness.benchmarks.tasks import TASKS
from harness.budget import is_share
from harness.by_length import scores_by_length
from harness.store.manifest import Manifest, Session
from harness.store.predictions import Prediction

ROUNDING = 1e-6  # of a product of tokens and a share, which are exact elsewhere


def run_metrics(manifest: Manifest, predictions: Sequence[Prediction]) -> dict[str, Any]:
    """All numbers of a run as plain data, the content of `metrics.json`.

    Of a run that is not finished they are the numbers of what it did so far: every part says of how many samples, and
    holds None for what nothing is known of. Samples that are answered and not scored yet count in all but the scores.

    Tasks come in LongBench's order, then own ones. The overall score is the mean of the scores of LongBench's tasks, as
    LongBench averages, and that of the own tasks in a run of these alone. Scores run from 0 to 100; units are part of
    the names.
    """
    by_task = _by_task(manifest, predictions)
    scores = task_scores(manifest, predictions)
    overall = asdict(overall_average(scores, manifest.data["num_expected"]))
    return {
        "run_id": manifest.run_id,
        "status": manifest.status,
        "limit": manifest.config["benchmark"]["limit"],
        "edit_similarity": manifest.config["benchmark"]["edit_similarity"],
        "num_samples": len(predictions),
        "num_scored": sum(p.score is not None for p in predictions),
        "overall": overall,
        "tasks": [_task_metrics(scores[name], rows) for name, rows in by_task.items()],
        "by_length": scores_by_length(manifest, predictions),
        "memory": _memory(manifest.sessions, predictions),
        "kept_by_head": kept_by_head(manifest.sessions),
        "read_by_head": read_by_head(manifest.sessions),
        "speed": _speed(manifest.sessions, predictions),
        "eviction": _eviction(manifest, predictions),
    }


def task_scores(manifest: Manifest, predictions: Sequence[Prediction]) -> dict[str, TaskScore]:
    """The score of every task of a run from the scores of its samples, in LongBench's order."""
    expected: dict[str, int] = manifest.data["num_expected"]
    return {name: _task_score(name, rows, expected[name]) for name, rows in _by_task(manifest, predictions).items()}


def over_budget(budget: float | None, predictions: Sequence[Prediction]) -> list[Prediction]:
    """The samples from whose prompt the policy has to evict; older records tell by the length of the prompt alone."""
    if budget is None:
        return []
    planned = (budget if p.planned_tokens is None else p.planned_tokens for p in predictions)
    return [p for p, tokens in zip(predictions, planned, strict=True) if p.num_prompt_tokens > tokens]


def with_least_budget(budget: float | None, block_size: int, predictions: Sequence[Prediction]) -> list[Prediction]:
    """The samples whose share of the prompt is less than the policy can work with, so that they keep more."""
    if not is_share(budget):
        return []
    blocks = [(p, budget * p.num_prompt_tokens + block_size) for p in predictions if p.budget_tokens is not None]
    return [p for p, tokens in blocks if p.budget_tokens > tokens - ROUNDING]  # a share rounded up is less


def is_full_cache_answer(options: Mapping[str, Any], prediction: Prediction) -> bool:
    """Whether an answer to a prompt over budget owes nothing to eviction.

    The first token sees the whole prompt, unless that was evicted from in chunks while it was read.
    """
    return prediction.num_output_tokens <= 1 and options.get("prefill", "after") == "after"


def _by_task(manifest: Manifest, predictions: Sequence[Prediction]) -> dict[str, list[Prediction]]:
    wanted = manifest.data["num_expected"]
    return {name: [p for p in predictions if p.task == name] for name in TASKS if name in wanted}


def _task_score(name: str, rows: list[Prediction], expected: int) -> TaskScore:
    scored = [p for p in rows if p.score is not None]
    samples = [SampleScore(p.score, p.empty, p.extra_scores) for p in scored]
    return task_score(name, samples, expected, [p.context_sha256 for p in scored])


def _task_metrics(score: TaskScore, rows: list[Prediction]) -> dict[str, Any]:
    task = TASKS[score.task]
    return {
        "task": score.task,
        "category": task.category,
        "metric": task.metric,
        "score": score.score,
        "ci_low": score.ci_low,
        "ci_high": score.ci_high,
        "num_samples": score.n,
        "num_expected": score.expected,
        "extra_scores": score.extra,
        "num_empty": score.num_empty,
        "num_truncated": sum(p.truncated for p in rows),
        "num_with_reasoning": sum(has_reasoning(p.prediction) for p in rows),
        "num_cut_in_reasoning": sum(bool(p.cut_in_reasoning) for p in rows),
        "num_ended_by_length": sum(p.finish_reason == "length" for p in rows),
        "mean_prompt_tokens": _mean(p.num_prompt_tokens for p in rows),
        "mean_output_tokens": _mean(p.num_output_tokens for p in rows),
        "mean_evicted_tokens": _mean(p.num_evicted_tokens for p in rows),
        "share_evicted": _mean(p.num_evictions > 0 for p in rows),
    }


def _memory(sessions: Sequence[Session], rows: Sequence[Prediction]) -> dict[str, Any]:
    engines = [session.engine for session in sessions if session.engine]
    if not engines:
        return {}
    per_block = engines[-1]["bytes_per_block"]
    peak = max(engine["peak_blocks"] for engine in engines)
    mean = _mean_blocks(engines)
    return {
        "block_size": engines[-1]["block_size"],
        "bytes_per_block": per_block,
        "pool_blocks": engines[-1]["num_blocks"],
        "peak_blocks": peak,
        "mean_blocks": None if mean is None else round(mean, 1),
        "peak_kv_bytes": peak * per_block,
        "mean_kv_bytes": None if mean is None else round(mean * per_block),
        "peak_resident_tokens": max((p.peak_resident_tokens for p in rows), default=None),
        "mean_peak_resident_tokens": _mean(p.peak_resident_tokens for p in rows),
        "mean_final_resident_tokens": _mean(p.final_resident_tokens for p in rows),
        "num_samples": len(rows),
        "mean_resident_share": _mean(
            p.final_resident_tokens / (p.num_prompt_tokens + p.num_output_tokens) for p in rows
        ),
        **_kept_range(kept_by_head(sessions)),
        **_read_means(read_by_head(sessions)),
        "num_samples_measured": sum(session.num_measured for session in sessions),
    }


def _mean_blocks(engines: Sequence[dict[str, Any]]) -> float | None:
    """Mean KV blocks over the time of all sessions; None if one was recorded before means were taken over time."""
    if any("measured_s" not in engine for engine in engines):
        return None
    seconds = [engine["measured_s"] for engine in engines]
    if not sum(seconds):
        return fmean(engine["mean_blocks"] for engine in engines)
    blocks = sum(engine["mean_blocks"] * covered for engine, covered in zip(engines, seconds, strict=True))
    return blocks / sum(seconds)


def kept_by_head(sessions: Sequence[Session]) -> dict[str, Any] | None:
    """Tokens that each layer and KV head kept of prompts, over all sessions: mean, least and most, [layers][heads].

    None where all keep equally many.
    """
    engines = (session.engine for session in sessions if session.engine)
    parts = [engine["kept"] for engine in engines if engine.get("kept")]
    if not parts:
        return None
    weights = [part["num_prompts"] for part in parts]
    return {
        "num_prompts": sum(weights),
        "mean": np.average([part["mean"] for part in parts], axis=0, weights=weights).round(2).tolist(),
        "least": np.min([part["least"] for part in parts], axis=0).tolist(),
        "most": np.max([part["most"] for part in parts], axis=0).tolist(),
    }


def _kept_range(kept: dict[str, Any] | None) -> dict[str, float | None]:
    """Over all layers, heads and prompts."""
    if kept is None:
        return dict.fromkeys(("mean_kept_tokens", "least_kept_tokens", "most_kept_tokens"))
    return {
        "mean_kept_tokens": round(float(np.mean(kept["mean"])), 1),
        "least_kept_tokens": int(np.min(kept["least"])),
        "most_kept_tokens": int(np.max(kept["most"])),
    }


def read_by_head(sessions: Sequence[Session]) -> dict[str, Any] | None:
    """What decode steps read of each layer and KV head, over all sessions, in tokens and as a share of what is there.

    None where all that is kept is read.
    """
    engines = (session.engine for session in sessions if session.engine)
    parts = [engine["read"] for engine in engines if engine.get("read")]
    if not parts:
        return None
    num_steps = sum(part["num_steps"] for part in parts)
    read, resident = (np.sum([part[key] for part in parts], axis=0) for key in ("read", "resident"))
    return {
        "num_steps": num_steps,
        "mean_tokens": (read / num_steps).round(2).tolist(),
        "mean_share": (read / resident).round(4).tolist(),
        "share": round(float(read.sum() / resident.sum()), 4),
    }


def _read_means(read: dict[str, Any] | None) -> dict[str, float | None]:
    """Over all layers, heads and decode steps."""
    if read is None:
        return dict.fromkeys(("mean_read_tokens", "mean_read_share"))
    return {"mean_read_tokens": round(float(np.mean(read["mean_tokens"])), 1), "mean_read_share": read["share"]}


def _speed(sessions: Sequence[Session], rows: Sequence[Prediction]) -> dict[str, Any]:
    timed = [session for session in sessions if session.generation_s > 0]
    seconds = sum(session.generation_s for session in timed)
    first = [p.ttft_s for p in rows if p.ttft_s is not None]
    whole = [p.e2e_s for p in rows if p.e2e_s is not None]
    return {
        "generation_s": round(seconds, 3),
        "output_tokens_per_s": _rate(sum(session.num_output_tokens for session in timed), seconds),
        "samples_per_s": _rate(sum(session.num_samples for session in timed), seconds),
        "median_ttft_s": round(median(first), 4) if first else None,
        "median_e2e_s": round(median(whole), 4) if whole else None,
        "num_sessions": len(sessions),
        "num_samples": sum(session.num_samples for session in timed),
    }


def _eviction(manifest: Manifest, rows: Sequence[Prediction]) -> dict[str, Any]:
    budget = manifest.config["policy"]["budget"]
    over = over_budget(budget, rows)
    options = manifest.config["policy"]["options"]
    engines = [session.engine for session in manifest.sessions if session.engine]
    return {
        "budget": budget,
        "num_samples": len(rows),
        "num_evictions": sum(p.num_evictions for p in rows),
        "num_evicted_tokens": sum(p.num_evicted_tokens for p in rows),
        "share_evicted": _mean(p.num_evictions > 0 for p in rows),
        "num_over_budget": len(over),
        "num_with_least_budget": len(with_least_budget(budget, manifest.config["engine"]["block_size"], rows)),
        "num_over_budget_not_evicted": sum(p.num_evictions == 0 for p in over),
        "num_full_cache_answers": sum(is_full_cache_answer(options, p) for p in over),
        "num_preemptions": sum(p.num_preemptions for p in rows),
        "eviction_time_s": round(sum(engine["eviction_time_s"] for engine in engines), 4) if engines else None,
    }


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return round(fmean(numbers), 4) if numbers else None


def _rate(count: float, seconds: float) -> float | None:
    return round(count / seconds, 3) if seconds else None
