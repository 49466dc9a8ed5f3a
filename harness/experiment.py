"""One run from configuration to table: load, resume, answer, score, report.

A run folder is named by what decides its results (`harness.store.run_folder.make_run_id`), so the same command finds
its own folder again and goes on where it stopped.
"""

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness.answering import Prompting, Tally, answer_rows, submit
from harness.config import HarnessConfig, as_plain
from harness.engines import build_engine, prepare_engine
from harness.errors import UserError
from harness.generation import Engine
from harness.hardware import inference_device
from harness.longbench.data import Row
from harness.longbench.loading import LoadedBenchmark, load_benchmark
from harness.longbench.metrics import SampleScore
from harness.longbench.prompting import iter_samples
from harness.longbench.scoring import ScoringPool
from harness.models import load_tokenizer, resolve_model
from harness.report.metrics import over_budget, run_metrics
from harness.report.tables import print_run, write_summary_csv
from harness.store.block_usage import append_block_usage
from harness.store.manifest import (
    Manifest,
    Session,
    Status,
    new_manifest,
    now,
    read_manifest,
    write_json,
    write_manifest,
)
from harness.store.predictions import Prediction, read_predictions, replace_predictions
from harness.store.run_folder import clear, has_run, locked, make_run_id

METRICS = "metrics.json"
SUMMARY = "summary.csv"


def run(config: HarnessConfig, command: str) -> None:
    """Carry out a run, or what is left of it, and print its table.

    Args:
        config: checked configuration.
        command: the command line, as recorded and as printed for resuming.

    Raises:
        UserError: something is missing or wrong that a user can mend, or the policy never evicted.
        KeyboardInterrupt: the user stopped the run; finished samples are on disk.
    """
    prepare_engine(config.engine)
    benchmark = _load(config)
    run_id = make_run_id(as_plain(config), benchmark.content_hash)
    folder = Path(config.results_dir) / run_id
    print(_announcement(config, benchmark, folder), flush=True)
    if not config.overwrite and _is_finished(folder):
        _show_finished(folder)
        return
    model_path = resolve_model(config.model)
    _check_policy(config)
    with locked(folder):
        if config.overwrite:
            clear(folder)
        if _is_finished(folder):
            _show_finished(folder)
            return
        manifest = (
            read_manifest(folder)
            if has_run(folder)
            else new_manifest(run_id, as_plain(config), command, _data_record(benchmark), _seeds(config))
        )
        with _session(folder, manifest) as tally:
            _answer_missing(config, benchmark.rows, model_path, folder, tally)
            _check_evictions(config, folder)
    _show(folder)


def _load(config: HarnessConfig) -> LoadedBenchmark:
    wanted = config.benchmark
    return load_benchmark(
        source=wanted.source,
        path=wanted.path,
        revision=wanted.revision,
        tasks=wanted.tasks,
        limit=wanted.limit,
        on_bad_row=wanted.on_bad_row,
        longbench_e=wanted.longbench_e,
        seed=wanted.seed,
    )


def _announcement(config: HarnessConfig, benchmark: LoadedBenchmark, folder: Path) -> str:
    policy = config.policy
    budget = "" if policy.budget is None else f" budget={policy.budget}"
    return (
        f"policy={policy.name}{budget} model={config.model.name} benchmark={config.benchmark.name}: "
        f"{len(benchmark.rows)} rows of {len(benchmark.reports)} tasks, into {folder}"
    )


def _check_policy(config: HarnessConfig) -> None:
    from policies import build_policy

    policy = config.policy
    try:
        build_policy(
            policy.name, budget=policy.budget, block_size=config.engine.block_size or 0, options=policy.options
        )
    except ValueError as error:
        raise UserError(str(error)) from error


def _data_record(benchmark: LoadedBenchmark) -> dict[str, Any]:
    reports = benchmark.reports
    return {
        "content_sha256": benchmark.content_hash,
        "num_rows": len(benchmark.rows),
        "num_expected": {task: report.num_expected for task, report in reports.items()},
        "skipped": {task: report.skipped for task, report in reports.items() if report.skipped},
        "files": {task: {"file": report.file, "sha256": report.sha256} for task, report in reports.items()},
    }


def _seeds(config: HarnessConfig) -> dict[str, int]:
    return {"engine": config.engine.seed, "benchmark": config.benchmark.seed}


@contextlib.contextmanager
def _session(folder: Path, manifest: Manifest) -> Iterator[Tally]:
    """Record in the manifest that a session begins, and how it ends; write the metrics of a finished run."""
    started = Session(started_at=now())
    manifest = replace(manifest, status="started", error=None, sessions=[*manifest.sessions, started])
    write_manifest(folder, manifest)
    tally = Tally()
    try:
        yield tally
        finished = _ended(manifest, "finished", tally)
        metrics = run_metrics(finished, read_predictions(folder))
        write_json(folder / METRICS, metrics)
        write_summary_csv(folder / SUMMARY, finished, metrics)
        write_manifest(folder, finished)
    except KeyboardInterrupt:
        write_manifest(folder, _ended(manifest, "interrupted", tally))
        raise
    except BaseException:
        write_manifest(folder, _ended(manifest, "failed", tally, traceback.format_exc()))
        raise


def _ended(manifest: Manifest, status: Status, tally: Tally, error: str | None = None) -> Manifest:
    *earlier, session = manifest.sessions
    ended = replace(session, status=status, ended_at=now(), **asdict(tally))
    return replace(manifest, status=status, error=error, sessions=[*earlier, ended])


def _answer_missing(config: HarnessConfig, rows: Sequence[Row], model_path: str, folder: Path, tally: Tally) -> None:
    """Answer and score what no earlier session did."""
    tokenizer, stop_token_ids = load_tokenizer(model_path, config.model.revision)
    prompting = Prompting(tokenizer, stop_token_ids, config.model.max_model_len)
    earlier = read_predictions(folder)
    done = {prediction.sample_id for prediction in earlier}
    missing = [row for row in _wanted_rows(config, rows, prompting) if f"{row.task}/{row.row_id}" not in done]
    if done:
        print(f"resuming: {len(done)} samples are done, {len(missing)} are missing", flush=True)
    num_workers = 1 if inference_device() == "cpu" else None
    with ScoringPool(config.benchmark.edit_similarity, num_workers) as pool:
        for prediction in earlier:
            if prediction.score is None:
                submit(pool, prediction)
        if missing:
            with contextlib.closing(build_engine(config, model_path)) as engine:
                answer_rows(engine, missing, prompting, folder, pool, tally)
                tally.engine = _record_stats(engine, folder)
        _fill_in_scores(folder, pool)


def _wanted_rows(config: HarnessConfig, rows: Sequence[Row], prompting: Prompting) -> Sequence[Row]:
    """The rows whose prompts have a length that was asked for; needs a pass over all prompts, so only if asked."""
    shortest, longest = config.benchmark.min_prompt_tokens, config.benchmark.max_prompt_tokens
    if shortest is None and longest is None:
        return rows
    samples = iter_samples(
        rows,
        prompting.tokenizer,
        prompting.max_model_len,
        prompting.stop_token_ids,
        min_prompt_tokens=shortest,
        max_prompt_tokens=longest,
    )
    return [sample.row for sample in samples]


def _record_stats(engine: Engine, folder: Path) -> dict[str, Any]:
    stats = engine.stats()
    append_block_usage(folder, len(read_manifest(folder).sessions), stats.block_usage)
    counts = asdict(stats)
    del counts["block_usage"]
    return counts


def _fill_in_scores(folder: Path, pool: ScoringPool) -> None:
    scores = pool.results()
    predictions = read_predictions(folder)
    replace_predictions(folder, [_scored(p, scores[p.sample_id]) if p.sample_id in scores else p for p in predictions])


def _scored(prediction: Prediction, score: SampleScore) -> Prediction:
    return replace(prediction, score=score.score, extra_scores=score.extra, empty=score.empty)


def _check_evictions(config: HarnessConfig, folder: Path) -> None:
    """Refuse a run in which the policy had to act and never did; warn where it had nothing to do.

    Raises:
        UserError: prompts exceed the budget and nothing was evicted.
    """
    policy = config.policy
    predictions = read_predictions(folder)
    if policy.budget is None:
        return
    over = over_budget(policy.budget, predictions)
    untouched = [p.sample_id for p in over if p.num_evictions == 0 and p.num_output_tokens > 1]
    if not any(p.num_evictions for p in predictions):
        if over:
            raise UserError(
                f"policy={policy.name} with policy.budget={policy.budget} evicted nothing, although {len(over)} of "
                f"{len(predictions)} prompts are longer: these are results of a full cache. The run is marked failed; "
                f"after mending the policy or the engine plugin run it again with overwrite=true."
            )
        _warn(f"no prompt is longer than policy.budget={policy.budget}: policy={policy.name} was never active.")
    elif untouched:
        _warn(
            f"{len(untouched)} of {len(over)} prompts longer than policy.budget={policy.budget} were not evicted from, "
            f"for example {untouched[0]}."
        )


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def _is_finished(folder: Path) -> bool:
    return has_run(folder) and read_manifest(folder).status == "finished"


def _show_finished(folder: Path) -> None:
    print("this run is finished already; overwrite=true makes it anew")
    _show(folder)


def _show(folder: Path) -> None:
    print_run(read_manifest(folder), json.loads((folder / METRICS).read_text(encoding="utf-8")))
    print(f"Run folder   {folder}")
