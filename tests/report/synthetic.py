"""Run folders made by the store's own functions, from rows of longbench_mini and scores drawn with a seed."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from harness.benchmarks.mini.generate import generate
from harness.benchmarks.prompting import render
from harness.benchmarks.rows import Row, content_hash
from harness.benchmarks.tasks import TASKS
from harness.engines.contract import BlockUsageSample
from harness.retention import RetentionRecord, append_retention
from harness.store.block_usage import append_block_usage
from harness.store.manifest import Manifest, Session, write_manifest
from harness.store.predictions import Prediction, append_prediction, open_for_append

NUM_LAYERS, NUM_KV_HEADS, BLOCK_SIZE = 4, 2, 32
BYTES_PER_BLOCK = 1024**2 // 4
PROMPT_TOKENS, OUTPUT_TOKENS = 1000, 20
TASK_SET = ("qasper", "hotpotqa", "gov_report", "lcc")


def write_run(
    parent: Path,
    policy: str = "full",
    budget: int | None = None,
    model: str = "tiny",
    tasks: Sequence[str] = TASK_SET,
    num_rows: int = 12,
    status: str = "finished",
    num_done: int | None = None,
    block_size: int = BLOCK_SIZE,
    options: dict | None = None,
    benchmark: dict | None = None,
    scores: dict[str, float] | None = None,
    retention: bool = False,
    usage: bool = True,
    engine: dict | None = None,
    cpu: str = "Test CPU",
) -> Path:
    """Write a run and return its folder.

    Args:
        num_done: samples that are finished, all by default.
        scores: sample id -> score from 0 to 1, for samples whose score matters.
        retention: whether positions kept were recorded (the first tokens and the last ones).
        engine: settings other than the usual ones.
    """
    rows = [row for task in TASKS if task in tasks for row in generate(task, num_rows, 0)]
    name = f"{policy}-b{budget}-{model}-{status}-{block_size}"
    name += hashlib.sha256(json.dumps([options, benchmark, engine, cpu]).encode()).hexdigest()[:6]
    folder = parent / name
    folder.mkdir(parents=True)
    done = [prediction(row, policy, budget, (scores or {}).get(f"{row.task}/{row.row_id}")) for row in rows[:num_done]]
    made = manifest(name, policy, budget, model, rows, num_rows, status, block_size, options, benchmark)
    made.config["engine"].update(engine or {})
    made.config["record_retention"] = retention
    made.hardware["cpu"] = cpu
    write_manifest(folder, made)
    with open_for_append(folder) as file:
        for one in done:
            append_prediction(file, one)
    if usage:
        each = blocks_of_a_request(budget, block_size)
        steps = [BlockUsageSample(step * 0.5, each * (1 + step % 3), 1 + step % 3) for step in range(39)]
        append_block_usage(folder, 1, [*steps, BlockUsageSample(20.0, 1, 0)])
    if retention:
        append_retention(folder, kept(done, budget))
    return folder


def blocks_of_a_request(budget: int | None, block_size: int) -> int:
    return 40 if budget is None else budget // block_size


def manifest(
    run_id: str,
    policy: str,
    budget: int | None,
    model: str,
    rows: Sequence[Row],
    limit: int,
    status: str,
    block_size: int,
    options: dict | None,
    benchmark: dict | None,
) -> Manifest:
    expected: dict[str, int] = {}
    for row in rows:
        expected[row.task] = expected.get(row.task, 0) + 1
    # The pool's mean also says how many requests ran at once: here three under a budget and one in the full cache.
    mean_blocks = float(blocks_of_a_request(budget, block_size) * (1 if budget is None else 3))
    session = Session(
        started_at="2026-01-01T00:00:00+00:00",
        status=status,
        ended_at="2026-01-01T00:01:00+00:00",
        num_samples=len(rows),
        num_output_tokens=OUTPUT_TOKENS * len(rows),
        generation_s=10.0 if budget is None else 5.0,
        num_measured=len(rows),
        engine={
            "block_size": block_size,
            "num_blocks": 1000,
            "bytes_per_block": BYTES_PER_BLOCK,
            "peak_blocks": 80 if budget is None else 60,
            "mean_blocks": mean_blocks,
            "free_blocks_at_end": 1000,
            "num_steps": 40,
            "num_evictions": 0 if budget is None else len(rows),
            "num_evicted_tokens": 0,
            "num_preemptions": 0,
            "eviction_time_s": 0.0 if budget is None else 0.25,
            "block_usage": [],
        },
    )
    return Manifest(
        run_id=run_id,
        status=status,
        config={
            "model": {"name": model, "path": None, "revision": None, "dtype": "float32", "max_model_len": 2048},
            "policy": {"name": policy, "budget": budget, "options": options or {}},
            "benchmark": {
                "name": "longbench_mini",
                "source": "mini",
                "path": None,
                "revision": None,
                "tasks": list(expected),
                "limit": limit,
                "min_prompt_tokens": None,
                "max_prompt_tokens": None,
                "on_bad_row": "fail",
                "longbench_e": False,
                "edit_similarity": "difflib",
                "seed": 0,
            }
            | (benchmark or {}),
            "engine": {"name": "vllm", "block_size": block_size, "max_num_seqs": 16},
            "tracker": {"name": "none"},
        },
        command=f"python -m harness policy={policy}",
        data={"content_sha256": content_hash(list(rows)), "num_rows": len(rows), "num_expected": expected},
        seeds={"engine": 0, "benchmark": 0},
        code_sha256="c" * 64,
        versions={"vllm": "0.32.0"},
        git={"commit": "a" * 40, "dirty": False},
        hardware={"cpu": "Test CPU", "num_cores": 2, "gpus": [], "device": "cpu"},
        sessions=[session],
        error="Traceback\nRuntimeError: out of blocks" if status == "failed" else None,
    )


def prediction(row: Row, policy: str, budget: int | None, score: float | None = None) -> Prediction:
    if score is None:
        # The sample decides most of the score, as with real runs; a smaller budget takes something off.
        luck = Random(f"{row.row_id}").random()
        noise = Random(f"{row.row_id}/{policy}/{budget}").random()
        score = max(0.0, min(1.0, 0.8 * luck + 0.1 * noise - (0.0 if budget is None else 20 / budget)))
    evicted = 0 if budget is None else PROMPT_TOKENS + OUTPUT_TOKENS - budget
    return Prediction(
        sample_id=f"{row.task}/{row.row_id}",
        task=row.task,
        row_id=row.row_id,
        prediction=f"{row.answers[0]} <as {policy} says & means it>",
        answers=list(row.answers),
        all_classes=None if row.all_classes is None else list(row.all_classes),
        length=row.length,
        context_sha256=hashlib.sha256(row.context.encode()).hexdigest(),
        prompt_sha256=hashlib.sha256(render(row).encode()).hexdigest(),
        num_prompt_tokens=PROMPT_TOKENS,
        truncated=False,
        num_output_tokens=OUTPUT_TOKENS,
        finish_reason="length",
        num_evictions=int(evicted > 0),
        num_evicted_tokens=max(evicted, 0),
        peak_resident_tokens=PROMPT_TOKENS,
        final_resident_tokens=PROMPT_TOKENS + OUTPUT_TOKENS - max(evicted, 0),
        peak_blocks=32,
        num_preemptions=0,
        ttft_s=0.5,
        e2e_s=2.4,
        score=round(score, 4),
        extra_scores={},
        empty=False,
    )


def unscored(one: Prediction) -> Prediction:
    return replace(one, score=None, extra_scores=None, empty=None)


def kept(done: Iterable[Prediction], budget: int | None) -> list[RetentionRecord]:
    """Sinks and a window; one head of two also keeps every tenth token."""
    size = PROMPT_TOKENS if budget is None else min(budget, PROMPT_TOKENS)
    window = [*range(4), *range(PROMPT_TOKENS - size + 4, PROMPT_TOKENS)]
    tenth = sorted({*window, *range(0, PROMPT_TOKENS, 10)})
    layers = [[window, tenth if layer % 2 else window] for layer in range(NUM_LAYERS)]
    return [RetentionRecord(one.sample_id, PROMPT_TOKENS, "prefill_end", layers) for one in done]


def bench_rows(model: str = "tiny", block_size: int = BLOCK_SIZE) -> list[dict]:
    """Three repeats of the full cache and of a policy at two budgets, twice as fast at the smaller one."""
    rows = []
    for repeat in range(3):
        for policy, budget, speed in (("full", None, 100.0), ("window", 128, 200.0), ("window", 256, 150.0)):
            output = speed * (1 + 0.1 * repeat)
            rows.append(
                {
                    "model": model,
                    "policy": policy,
                    "budget": budget,
                    "block_size": block_size,
                    "repeat": repeat,
                    "output_tok_s": output,
                    "total_tok_s": 2 * output,
                    "num_requests": 12,
                    "input_tokens": 384,
                    "output_tokens": 256,
                    "ttft_p50": 1.0,
                    "ttft_p99": 2.0,
                    "tpot_p50": 10 / output,
                    "tpot_p99": 15 / output,
                    "e2e_p50": 1000 / output,
                    "e2e_p99": 1200 / output,
                    "peak_blocks": 60 if budget is None else 40,
                    "mean_blocks": 40.0,
                    "bytes_per_block": BYTES_PER_BLOCK,
                    "num_preemptions": 3 if budget is None else 0,
                    "eviction_time_s": 0.0 if budget is None else 0.3,
                    "duration_s": 10.0,
                    "unknown_to_the_report": 1,
                }
            )
    return rows


def write_bench(parent: Path, rows: Sequence[dict], name: str = "bench", **settings: Any) -> Path:
    """Write the rows of a load test, and a manifest with `settings` on top of the usual ones if there are any."""
    folder = parent / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps(rows))
    if settings:
        config = {
            "model": {"dtype": "float16"},
            "engine": {"name": "vllm", "block_size": 16, "max_num_seqs": 64, "reserve": True, "kv_cache_gib": None},
            "load": {"request_rate": None},
            "load_format": "auto",
        }
        made = {"run_id": name, "status": "finished", "code_sha256": "c" * 64, "config": config | settings}
        (folder / "bench_manifest.json").write_text(json.dumps(made))
    return folder
