"""One load test from plan to table: model, engines, repeats, files.

Its folder holds `bench.json` and `bench.csv` (one row a repeat of a variant, rewritten after each), a
`block_usage.csv` for every variant, and `bench_manifest.json`. The same command goes on where one ended early.
"""

import contextlib
import json
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from harness.bench.config import Plan
from harness.bench.interleaving import run_interleaved
from harness.bench.load import make_load
from harness.bench.models import prepare_model
from harness.bench.records import device_name, make_row
from harness.bench.resume import MANIFEST, ROWS, Row, begin
from harness.bench.servers import Builder, vllm_builder
from harness.bench.summary import summarise
from harness.bench.table import print_summaries
from harness.engines.choose import check_policy, prepare_engine
from harness.engines.vllm.traffic import TimedRequest
from harness.gpu_hours import Work, hours
from harness.store.block_usage import append_block_usage
from harness.store.lock import locked
from harness.store.manifest import Manifest, Status, now, write_atomically, write_json
from harness.store.run_folder import clear

FLAT_ROWS = "bench.csv"
SHAPE = "model_shape"


def run(plan: Plan, command: str) -> Path:
    """Carry out a load test and print its tables.

    Args:
        plan: checked.
        command: the command line, as recorded.

    Returns:
        Its folder.

    Raises:
        UserError: something is missing or wrong that a user can mend.
    """
    prepare_engine(plan.config.engine)
    print(announcement(plan), flush=True)
    folder = Path(plan.config.results_dir) / f"{plan.config.name}-{plan.config.model.name}"
    with locked(folder):
        if plan.config.overwrite:
            clear(folder)
        model_path, vocabulary = prepare_model(plan.config.model, plan.config.load_format, folder / SHAPE)
        for variant in plan.variants:
            check_policy(variant.config)
        load = make_load(plan, vocabulary)
        manifest, rows = begin(folder, plan, command, model_path, load)
        if manifest.status == "finished":
            _print_rows(plan, rows)
            print(f"{folder} was finished before; overwrite=true measures it anew")
            return folder
        with _recorded(folder, manifest):
            carry_out(plan, load, vllm_builder(model_path, plan.config.load_format), folder, rows)
    return folder


def announcement(plan: Plan) -> str:
    """How much a load test does; hours only for models that need a GPU."""
    load, model = plan.config.load, plan.config.model
    work = Work(load.num_requests * plan.input_tokens.longest, load.num_requests * plan.output_tokens.longest)
    at_once = min(load.num_requests, plan.config.engine.max_num_seqs or load.num_requests)
    total = plan.num_runs * hours(work, model.weights_gib, at_once)
    estimate = "" if model.dtype == "float32" else f", about {total:.1f} hours on one A100 (see harness.gpu_hours)"
    return (
        f"{plan.config.name} on {model.name}: {len(plan.variants)} variants x {plan.config.repeats} repeats = "
        f"{plan.num_runs} runs{estimate}"
    )


def carry_out(
    plan: Plan, load: Sequence[TimedRequest], build: Builder, folder: Path, before: Sequence[Row] = ()
) -> None:
    """Measure what is left beside the rows of `before`, write after every repeat, and print the tables."""
    config, rows = plan.config, list(before)
    print(
        f"{config.name}: model={config.model.name}, {config.load.num_requests} requests, {len(plan.variants)} variants "
        f"x {config.repeats} repeats, into {folder}",
        flush=True,
    )
    if rows:
        print(f"  {len(rows)} of {plan.num_runs} runs were measured before and stay", flush=True)
        _write_rows(folder, rows)
    done = {(row["label"], row["repeat"]) for row in rows}
    for repeat in run_interleaved(plan, load, build, done):
        if repeat.usage:
            (folder / repeat.variant.label).mkdir(exist_ok=True)
            append_block_usage(folder / repeat.variant.label, repeat.number, repeat.usage)
        rows.append(make_row(repeat, device_name()))
        _write_rows(folder, rows)
        print(
            f"  repeat {repeat.number + 1}/{config.repeats} {repeat.variant.label}: "
            f"{rows[-1]['output_tok_s']:.1f} output tokens/s in {rows[-1]['duration_s']:.1f} s",
            flush=True,
        )
    _print_rows(plan, rows)
    print(f"Folder   {folder}")


def _print_rows(plan: Plan, rows: list[Row]) -> None:
    print_summaries(f"{plan.config.name}, {plan.config.model.name} on {device_name()}", summarise(rows))


@contextlib.contextmanager
def _recorded(folder: Path, manifest: Manifest) -> Iterator[None]:
    """Record in the manifest that the load test begins, and how it ends."""

    def ended(status: Status, error: str | None = None) -> None:
        *earlier, last = manifest.sessions
        sessions = [*earlier, replace(last, status=status, ended_at=now())]
        _write_manifest(folder, replace(manifest, status=status, error=error, sessions=sessions))

    _write_manifest(folder, manifest)
    try:
        yield
    except KeyboardInterrupt:
        ended("interrupted")
        raise
    except BaseException:
        ended("failed", traceback.format_exc())
        raise
    ended("finished")


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    write_json(folder / MANIFEST, asdict(manifest))


def _write_rows(folder: Path, rows: list[Row]) -> None:
    import pandas as pd

    write_atomically(folder / ROWS, json.dumps(rows, indent=1) + "\n")
    write_atomically(folder / FLAT_ROWS, pd.DataFrame(rows).to_csv(index=False))
