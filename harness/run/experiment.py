"""One run from configuration to table: load, resume, answer, score, report.

A run folder is named by what decides its results (`harness.store.run_folder.make_run_id`), so the same command finds
its own folder again and goes on where it stopped.
"""

import contextlib
import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.benchmarks.loading import LoadedBenchmark, load_benchmark
from harness.benchmarks.prompting import encode_row, iter_samples
from harness.benchmarks.rows import Row
from harness.benchmarks.sample_score import SampleScore
from harness.benchmarks.scoring import ScoringPool
from harness.config import HarnessConfig, as_plain
from harness.engines.choose import build_engine, check_policy, prepare_engine
from harness.errors import UserError
from harness.hardware import inference_device
from harness.models import load_tokenizer, resolve_model
from harness.needles import write_needles
from harness.report.metrics import run_metrics
from harness.report.tables import print_run, write_summary_csv
from harness.run.answering import Prompting, answer_rows, submit
from harness.run.eviction_check import check_evictions
from harness.run.session import SessionRecord
from harness.store.manifest import (
    Manifest,
    new_manifest,
    read_manifest,
    write_json,
    write_manifest,
)
from harness.store.predictions import Prediction, read_predictions, replace_predictions
from harness.store.result_code import ResultCode, result_code
from harness.store.run_folder import (
    check_same_run,
    clear,
    disk_errors_named,
    find_run_of_other_code,
    has_run,
    locked,
    make_run_id,
    was_begun_under,
)
from harness.tracking import track

METRICS = "metrics.json"
SUMMARY = "summary.csv"


@dataclass(frozen=True)
class PlannedRun:
    """A run whose data is loaded, so that its id is known.

    Attributes:
        claim: what a sweep's job took the run with, None for a single run. `overwrite` throws nothing away that was
            begun under the same claim, so that a job that is queued again goes on.
    """

    config: HarnessConfig
    command: str
    benchmark: LoadedBenchmark
    code: ResultCode
    run_id: str
    claim: str | None = None

    @property
    def folder(self) -> Path:
        """Where the run is kept."""
        return Path(self.config.results_dir) / self.run_id


def run(config: HarnessConfig, command: str) -> None:
    """Plan a run and carry it out; see `plan_run` and `carry_out`."""
    carry_out(plan_run(config, command))


def plan_run(config: HarnessConfig, command: str) -> PlannedRun:
    """Load the rows of a run and name it. Nothing is written.

    Args:
        config: checked configuration.
        command: the command line, as recorded and as printed for resuming.

    Raises:
        UserError: the rows cannot be had, or a source file that decides results is not Python.
    """
    prepare_engine(config.engine)
    with disk_errors_named(Path(config.results_dir)):
        benchmark = _load(config)
    code = result_code([config.policy.name], config.engine.name)
    return PlannedRun(config, command, benchmark, code, make_run_id(as_plain(config), benchmark.content_hash, code))


def carry_out(planned: PlannedRun) -> bool:
    """Carry out a run, or what is left of it, print its table and report it to the tracker.

    Returns:
        False if there was nothing to do because the run was finished before.

    Raises:
        UserError: something is missing or wrong that a user can mend, or the policy never evicted.
        KeyboardInterrupt: the user stopped the run; finished samples are on disk.
    """
    folder = planned.folder
    print(_announcement(planned), flush=True)
    with disk_errors_named(folder):
        has_worked = _finish(planned)
        if not has_worked:
            print("this run is finished already; overwrite=true makes it anew")
        manifest, metrics = read_manifest(folder), read_metrics(folder)
        print_run(manifest, metrics)
        track(planned.config.tracker, folder, manifest, metrics)
    print(f"Run folder   {folder}")
    return has_worked


def read_metrics(folder: Path) -> dict[str, Any]:
    """The numbers of a finished run."""
    return json.loads((folder / METRICS).read_text(encoding="utf-8"))


def _finish(planned: PlannedRun) -> bool:
    """Do what is left of a run; False if nothing is."""
    config, folder = planned.config, planned.folder
    fresh = _fresh_manifest(planned)
    overwrite = config.overwrite and not was_begun_under(planned.claim, folder)
    if not overwrite and _is_finished(folder, fresh):
        return False
    if not has_run(folder) and (earlier := find_run_of_other_code(folder, fresh)):
        print(f"the same settings ran before with other code: {earlier}", flush=True)
    model_path = resolve_model(config.model)
    check_policy(config)
    with locked(folder):
        if overwrite:
            clear(folder)
        if _is_finished(folder, fresh):
            return False
        manifest = read_manifest(folder) if has_run(folder) else fresh
        with _session(folder, manifest) as record:
            _answer_missing(config, planned.benchmark.rows, model_path, folder, record)
            check_evictions(config.policy, read_predictions(folder))
    return True


def _fresh_manifest(planned: PlannedRun) -> Manifest:
    config, data = planned.config, _data_record(planned.benchmark)
    manifest = new_manifest(planned.run_id, as_plain(config), planned.command, data, _seeds(config), planned.code)
    return replace(manifest, claim=planned.claim)


def _is_finished(folder: Path, fresh: Manifest) -> bool:
    """Whether the run is done; a record that says that it is another run is refused."""
    if not has_run(folder):
        return False
    found = read_manifest(folder)
    check_same_run(folder, found, fresh)
    return found.status == "finished"


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
        sample=wanted.sample,
        lengths=wanted.lengths,
        depths=wanted.depths,
        haystack=wanted.haystack,
        count_tokens=_token_counter(config) if wanted.lengths else None,
    )


def _token_counter(config: HarnessConfig) -> Callable[[Row], int]:
    """Count the tokens of a row's whole prompt by the tokenizer of the model."""
    longest, room = max(config.benchmark.lengths), config.model.max_model_len
    if longest > room:
        raise UserError(
            f"benchmark.lengths has {longest}, more than model.max_model_len={room}. Raise the one or lower the other."
        )
    tokenizer, _ = load_tokenizer(resolve_model(config.model), config.model.revision)
    return lambda row: len(encode_row(replace(row, needles=()), tokenizer).ids)


def _announcement(planned: PlannedRun) -> str:
    config, benchmark = planned.config, planned.benchmark
    budget = "" if config.policy.budget is None else f" budget={config.policy.budget}"
    return (
        f"policy={config.policy.name}{budget} model={config.model.name} benchmark={config.benchmark.name}: "
        f"{len(benchmark.rows)} rows of {len(benchmark.reports)} tasks, into {planned.folder}"
        + "".join(f"\nnote: {note}" for note in benchmark.notes)
    )


def _data_record(benchmark: LoadedBenchmark) -> dict[str, Any]:
    reports = benchmark.reports
    return {
        "content_sha256": benchmark.content_hash,
        "num_rows": len(benchmark.rows),
        "num_expected": {task: report.num_expected for task, report in reports.items()},
        "skipped": {task: report.skipped for task, report in reports.items() if report.skipped},
        "notes": list(benchmark.notes),
        "files": {task: {"file": report.file, "sha256": report.sha256} for task, report in reports.items()},
    }


def _seeds(config: HarnessConfig) -> dict[str, int]:
    return {"engine": config.engine.seed, "benchmark": config.benchmark.seed}


@contextlib.contextmanager
def _session(folder: Path, manifest: Manifest) -> Iterator[SessionRecord]:
    """Record in the manifest that a session begins, and how it ends; write the metrics of a finished run."""
    record = SessionRecord(folder, manifest)
    try:
        yield record
        finished = record.end("finished")
        metrics = run_metrics(finished, read_predictions(folder))
        write_json(folder / METRICS, metrics)
        write_summary_csv(folder / SUMMARY, finished, metrics)
        write_needles(folder)
        write_manifest(folder, finished)
    except KeyboardInterrupt:
        _record_end(folder, record.end("interrupted"))
        raise
    except BaseException:
        _record_end(folder, record.end("failed", traceback.format_exc()))
        raise


def _record_end(folder: Path, manifest: Manifest) -> None:
    """Record how a session ended, if the disk takes it: what ended the session matters more than that it cannot."""
    with contextlib.suppress(OSError):
        write_manifest(folder, manifest)


def _answer_missing(
    config: HarnessConfig, rows: Sequence[Row], model_path: str, folder: Path, record: SessionRecord
) -> None:
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
            with contextlib.closing(build_engine(config, model_path, folder)) as engine:
                answer_rows(engine, missing, prompting, folder, pool, record)
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


def _fill_in_scores(folder: Path, pool: ScoringPool) -> None:
    scores = pool.results()
    predictions = read_predictions(folder)
    replace_predictions(folder, [_scored(p, scores[p.sample_id]) if p.sample_id in scores else p for p in predictions])


def _scored(prediction: Prediction, score: SampleScore) -> Prediction:
    return replace(prediction, score=score.score, extra_scores=score.extra, empty=score.empty)
