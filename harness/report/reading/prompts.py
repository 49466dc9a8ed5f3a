"""Prompt texts for the page: run folders hold only their hashes, so rows are loaded again if no network is needed."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.benchmarks.generated import TASKS_OF
from harness.benchmarks.loading import load_benchmark
from harness.benchmarks.prompting import render
from harness.benchmarks.rows import Row
from harness.errors import UserError
from harness.report.reading.runs import MINI, Run


@dataclass(frozen=True)
class Prompt:
    """What a sample asks: the row's own `input`, and the whole prompt, uncut and without chat template."""

    question: str
    text: str


def load_prompts(runs: Sequence[Run]) -> tuple[dict[str, Prompt], str]:
    """The prompts of the samples of runs over the same rows.

    Returns:
        Prompt by sample id, and the reason why some or all are missing ("" if none is). A prompt whose hash is not
        the recorded one is left out.
    """
    samples = [sample for run in runs for sample in run.predictions]
    recorded = {sample.sample_id: sample.task_prompt_sha256 or sample.prompt_sha256 for sample in samples}
    try:
        rows = _load_rows(runs[0])
        by_id = {f"{row.task}/{row.row_id}": row for row in rows}
        prompts = {name: Prompt(by_id[name].input, render(by_id[name])) for name in recorded if name in by_id}
    except UserError as error:
        return {}, str(error)
    found = {name: prompt for name, prompt in prompts.items() if _sha256(prompt.text) == recorded[name]}
    missing = len(recorded) - len(found)
    return found, f"{missing} of {len(recorded)} prompts are not what the runs read." if missing else ""


def _load_rows(run: Run) -> list[Row]:
    benchmark = run.manifest.config["benchmark"]
    if benchmark["source"] in TASKS_OF:
        raise UserError(f"Prompts of {benchmark['name']} are made to the model's tokenizer, which no report loads.")
    path = benchmark["path"]
    if benchmark["source"] != MINI and (path is None or not Path(path).expanduser().exists()):
        raise UserError("The rows are not on this machine, and a report uses no network.")
    keys = ("source", "path", "revision", "tasks", "limit", "on_bad_row", "longbench_e", "seed")
    return load_benchmark(**{key: benchmark[key] for key in keys}).rows


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
