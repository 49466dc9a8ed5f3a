"""Which run a configuration asks for: its rows, its model and its code, and with them its name."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from harness.benchmarks.chat import choose_template
from harness.benchmarks.loading import LoadedBenchmark, load_benchmark
from harness.benchmarks.prompting import encode_row
from harness.benchmarks.rows import Row
from harness.budget import budget_text
from harness.config import HarnessConfig, ModelConfig, as_plain
from harness.engines.choose import check_policy, prepare_engine
from harness.errors import UserError
from harness.model_identity import option_digests
from harness.models import device_problems, identify_model, model_source
from harness.store.manifest import Manifest, new_manifest
from harness.store.result_code import ResultCode, result_code
from harness.store.run_folder import disk_errors_named, make_run_id
from harness.tokenizer import load_tokenizer

Found = TypeVar("Found")


@dataclass(frozen=True)
class PlannedRun:
    """A run whose data is loaded, so that its id is known.

    Attributes:
        model: what tells the model from others, see `harness.model_identity`.
        claim: what a sweep's job took the run with, None for a single run. `overwrite` throws nothing away that was
            begun under the same claim, so that a job that is queued again goes on.
    """

    config: HarnessConfig
    command: str
    benchmark: LoadedBenchmark
    code: ResultCode
    model: dict[str, str]
    run_id: str
    claim: str | None = None

    @property
    def folder(self) -> Path:
        """Where the run is kept."""
        return Path(self.config.results_dir) / self.run_id

    @property
    def pinned(self) -> HarnessConfig:
        """The configuration with the commit that a branch of the hub stands for now."""
        revision = self.model.get("commit", self.config.model.revision)
        return replace(self.config, model=replace(self.config.model, revision=revision))


def plan_run(config: HarnessConfig, command: str) -> PlannedRun:
    """Load the rows of a run and name it. Nothing is written.

    Args:
        config: checked configuration.
        command: the command line, as recorded and as printed for resuming.

    Raises:
        UserError: rows or model cannot be had, or a source file that decides results is not Python. All that keeps the
            run from starting is said together.
    """
    prepare_engine(config.engine)
    with disk_errors_named(Path(config.results_dir)):
        found = Findings()
        model = found.of(lambda: identify_model(config.model))
        benchmark = found.of(lambda: load_rows_of(config))
        if found.problems:
            found.of(lambda: _refuse_device(config.model))
            found.of(lambda: check_policy(config))
            raise UserError(found.text)
    code = result_code([config.policy.name], config.engine.name)
    model |= option_digests(config.policy.options)
    run_id = make_run_id(as_plain(config), benchmark.content_hash, code, model)
    return PlannedRun(config, command, benchmark, code, model, run_id)


class Findings:
    """What several checks have found wrong, to be said at once."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def of(self, check: Callable[[], Found]) -> Found | None:
        """What the check gives; None if it finds something wrong."""
        try:
            return check()
        except UserError as error:
            if str(error) not in self.problems:
                self.problems.append(str(error))
        return None

    @property
    def text(self) -> str:
        """All problems as one line, numbered if there are several."""
        if len(self.problems) < 2:
            return "".join(self.problems)
        numbered = " ".join(f"({number}) {problem}" for number, problem in enumerate(self.problems, 1))
        return f"{len(self.problems)} things are in the way: {numbered}"


def load_rows_of(config: HarnessConfig) -> LoadedBenchmark:
    """The rows that the configuration asks for.

    Raises:
        UserError: they cannot be had.
    """
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
    model = config.model
    tokenizer, _ = load_tokenizer(model_source(model), model.revision)
    template = choose_template(tokenizer, model.chat_template, model.template_arguments)
    return lambda row: len(encode_row(replace(row, needles=()), tokenizer, template).ids)


def fresh_manifest(planned: PlannedRun) -> Manifest:
    """The record of the run if it started now."""
    config, data = planned.config, _data_record(planned.benchmark)
    seeds = {"engine": config.engine.seed, "benchmark": config.benchmark.seed}
    plain = as_plain(config)
    made = new_manifest(planned.run_id, plain, planned.command, data, seeds, planned.code, planned.model)
    return replace(made, claim=planned.claim)


def announcement(planned: PlannedRun) -> str:
    """The first line that a run prints."""
    config, benchmark = planned.config, planned.benchmark
    budget = "" if config.policy.budget is None else f" budget={budget_text(config.policy.budget)}"
    return (
        f"policy={config.policy.name}{budget} model={config.model.name} benchmark={config.benchmark.name}: "
        f"{len(benchmark.rows)} rows of {len(benchmark.reports)} tasks, into {planned.folder}"
        + "".join(f"\nnote: {note}" for note in benchmark.notes)
    )


def _refuse_device(model: ModelConfig) -> None:
    if problems := device_problems(model):
        raise UserError(f"model={model.name} cannot run here: {'; '.join(problems)}.")


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
