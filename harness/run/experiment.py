"""One run from configuration to table: load, resume, answer, score, report.

A run folder is named by what decides its results (`harness.store.run_folder.make_run_id`), so the same command finds
its own folder again and goes on where it stopped.
"""

import contextlib
import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.benchmarks.chat import choose_template
from harness.benchmarks.generated import TASKS_OF
from harness.benchmarks.prompting import prompt_sha256, render
from harness.benchmarks.rows import Row
from harness.benchmarks.scoring import ScoringPool
from harness.config import HarnessConfig
from harness.engines.choose import build_engine, check_policy
from harness.errors import UserError
from harness.hardware import inference_device
from harness.metrics import run_metrics
from harness.models import resolve_model
from harness.needles import write_needles
from harness.run.answering import Prompting, answer_rows, submit, write_scores
from harness.run.eviction_check import check_evictions
from harness.run.planning import PlannedRun, announcement, fresh_manifest, plan_run
from harness.run.reasoning_check import warn_of_cut_reasoning
from harness.run.recorded import check_finished, check_predictions
from harness.run.session import SessionRecord
from harness.run.summary import print_run, write_summary_csv
from harness.store.lock import locked
from harness.store.manifest import Manifest, read_manifest, write_json, write_manifest
from harness.store.predictions import fold_scores, predictions_sha256, read_predictions
from harness.store.prompts import MAX_PER_TASK, Prompt, by_name, excerpt, write_prompts
from harness.store.run_folder import (
    check_same_run,
    check_same_versions,
    clear,
    disk_errors_named,
    find_namesake,
    has_run,
    was_begun_under,
)
from harness.tokenizer import load_tokenizer
from harness.tracking import track

METRICS = "metrics.json"
SUMMARY = "summary.csv"


def run(config: HarnessConfig, command: str) -> None:
    """Plan a run and carry it out; see `plan_run` and `carry_out`."""
    carry_out(plan_run(config, command))


def carry_out(planned: PlannedRun) -> bool:
    """Carry out a run, or what is left of it, print its table and report it to the tracker.

    Returns:
        False if there was nothing to do because the run was finished before.

    Raises:
        UserError: something is missing or wrong that a user can mend, or the policy never evicted.
        KeyboardInterrupt: the user stopped the run; finished samples are on disk.
    """
    folder = planned.folder
    print(announcement(planned), flush=True)
    with disk_errors_named(folder):
        has_worked = _finish(planned)
        if not has_worked:
            print("this run is finished already; overwrite=true makes it anew")
        manifest = read_manifest(folder)
        metrics = _write_missing_metrics(folder, manifest)
        print_run(manifest, metrics)
        track(planned.config.tracker, folder, manifest, metrics)
    print(f"Run folder   {folder}")
    return has_worked


def read_metrics(folder: Path) -> dict[str, Any]:
    """The numbers of a finished run."""
    return json.loads((folder / METRICS).read_text(encoding="utf-8"))


def _write_missing_metrics(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The numbers of a finished run; computed again where their files are gone or damaged."""
    try:
        metrics = read_metrics(folder)
        if metrics["run_id"] == manifest.run_id and (folder / SUMMARY).stat().st_size:
            return metrics
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        pass
    print(f"{METRICS} and {SUMMARY} are computed again from the predictions", flush=True)
    return _write_metrics(folder, manifest)


def _write_metrics(folder: Path, manifest: Manifest) -> dict[str, Any]:
    metrics = run_metrics(manifest, read_predictions(folder))
    write_json(folder / METRICS, metrics)
    write_summary_csv(folder / SUMMARY, manifest, metrics)
    write_needles(folder)
    return metrics


def _finish(planned: PlannedRun) -> bool:
    """Do what is left of a run; False if nothing is."""
    config, folder = planned.config, planned.folder
    fresh = fresh_manifest(planned)
    overwrite = config.overwrite and not was_begun_under(planned.claim, folder)
    if not overwrite and _is_finished(folder, fresh):
        return False
    if not has_run(folder) and (earlier := find_namesake(folder, fresh)):
        print(f"the same settings ran before with {earlier[1]}: {earlier[0]}", flush=True)
    model_path = resolve_model(config.model)
    check_policy(config)
    with locked(folder):
        if overwrite:
            clear(folder)
        if _is_finished(folder, fresh):
            return False
        manifest = read_manifest(folder) if has_run(folder) else fresh
        check_same_versions(folder, manifest, fresh)
        with _session(folder, manifest) as record:
            _answer_missing(planned.pinned, planned.benchmark.rows, model_path, folder, record)
            predictions = read_predictions(folder)
            warn_of_cut_reasoning(predictions)
            check_evictions(config.policy, config.engine.block_size or 0, predictions)
    return True


def _is_finished(folder: Path, fresh: Manifest) -> bool:
    """Whether the run is done; a record that says that it is another run is refused, and so is a damaged one."""
    if not has_run(folder):
        return False
    found = read_manifest(folder)
    check_same_run(folder, found, fresh)
    if found.status != "finished":
        return False
    check_finished(folder, found, fresh)
    return True


@contextlib.contextmanager
def _session(folder: Path, manifest: Manifest) -> Iterator[SessionRecord]:
    """Record in the manifest that a session begins, and how it ends; write the metrics of a finished run."""
    record = SessionRecord(folder, manifest)
    try:
        yield record
        fold_scores(folder)
        finished = replace(record.end("finished"), predictions_sha256=predictions_sha256(folder))
        _write_metrics(folder, finished)
        write_manifest(folder, finished)
    except KeyboardInterrupt:
        _record_end(folder, record.end("interrupted"))
        raise
    except BaseException:
        _record_end(folder, record.end("failed", traceback.format_exc()))
        raise


def _record_end(folder: Path, manifest: Manifest) -> None:
    """Record how a session ended, if the disk takes it: what ended the session matters more than that it cannot."""
    with contextlib.suppress(OSError, UserError):
        write_manifest(folder, manifest)
        fold_scores(folder)


def _answer_missing(
    config: HarnessConfig, rows: Sequence[Row], model_path: str, folder: Path, record: SessionRecord
) -> None:
    """Answer and score what no earlier session did."""
    from harness.engines.prompt_plans import prompt_plans

    tokenizer, stop_token_ids = load_tokenizer(model_path, config.model.revision)
    template = choose_template(tokenizer, config.model.chat_template, config.model.template_arguments)
    prompting = Prompting(tokenizer, stop_token_ids, config.model.max_model_len, template, prompt_plans(config))
    record.describe(prompting.record({row.task: None for row in rows}))
    earlier = read_predictions(folder)
    by_id = {f"{row.task}/{row.row_id}": row for row in rows}
    check_predictions(folder, earlier, by_id, lambda row: prompt_sha256(row, tokenizer, template))
    if config.benchmark.source in TASKS_OF:
        _keep_prompts(folder, by_id)
    done = {prediction.sample_id for prediction in earlier}
    missing = [row for row in _wanted_rows(config, rows, prompting) if f"{row.task}/{row.row_id}" not in done]
    if done:
        print(f"resuming: {len(done)} samples are done, {len(missing)} are missing", flush=True)
    num_workers = 1 if inference_device() == "cpu" else None
    with ScoringPool(config.benchmark.edit_similarity, num_workers, chunk_size=1) as pool:
        pool.start()
        for prediction in earlier:
            if prediction.score is None:
                submit(pool, prediction)
        if missing:
            with contextlib.closing(build_engine(config, model_path, folder)) as engine:
                answer_rows(engine, missing, prompting, folder, pool, record)
        write_scores(folder, pool.results())


def _keep_prompts(folder: Path, rows: Mapping[str, Row]) -> None:
    """Of rows made for this run, which a report could not make again: how the first prompts of each task look."""
    kept: dict[str, list[Prompt]] = {}
    for sample_id in by_name(rows):
        row = rows[sample_id]
        of_task = kept.setdefault(row.task, [])
        if len(of_task) < MAX_PER_TASK:
            of_task.append(excerpt(sample_id, "\n".join([*row.needles, row.input]), render(row)))
    write_prompts(folder, [prompt for of_task in kept.values() for prompt in of_task])


def _wanted_rows(config: HarnessConfig, rows: Sequence[Row], prompting: Prompting) -> Sequence[Row]:
    """The rows whose prompts have a length that was asked for; needs a pass over all prompts, so only if asked."""
    shortest, longest = config.benchmark.min_prompt_tokens, config.benchmark.max_prompt_tokens
    if shortest is None and longest is None:
        return rows
    samples = prompting.samples(rows, shortest, longest)
    return [sample.row for sample in samples]
