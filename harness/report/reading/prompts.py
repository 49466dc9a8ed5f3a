"""Prompts for the page: kept in the run folder where rows were made for the run, else loaded again, without network."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from harness.benchmarks.generated import TASKS_OF
from harness.benchmarks.loading import load_benchmark
from harness.benchmarks.prompting import render
from harness.benchmarks.rows import Row
from harness.errors import UserError
from harness.report.reading.runs import MINI, Run
from harness.store.prompts import Prompt, excerpt, read_prompts


def load_prompts(runs: Sequence[Run]) -> tuple[dict[str, Prompt], str]:
    """The prompts of the samples of runs over the same rows.

    Returns:
        Prompt by sample id, and the reason why some or all are missing ("" if none is). A prompt whose hash is not
        the recorded one is left out.
    """
    if runs[0].manifest.config["benchmark"]["source"] in TASKS_OF:
        kept = {name: prompt for run in runs for name, prompt in read_prompts(run.folder).items()}
        return kept, "" if kept else "Older runs, and copies without the benchmark's texts, hold none."
    samples = [sample for run in runs for sample in run.predictions]
    recorded = {sample.sample_id: sample.task_prompt_sha256 or sample.prompt_sha256 for sample in samples}
    try:
        rows = {f"{row.task}/{row.row_id}": row for row in _load_rows(runs[0])}
        texts = {name: render(rows[name]) for name in recorded if name in rows}
    except UserError as error:
        return {}, str(error)
    found = {
        name: excerpt(name, rows[name].input, text)
        for name, text in texts.items()
        if hashlib.sha256(text.encode()).hexdigest() == recorded[name]
    }
    missing = len(recorded) - len(found)
    return found, f"{missing} of {len(recorded)} prompts are not what the runs read." if missing else ""


def _load_rows(run: Run) -> list[Row]:
    benchmark = run.manifest.config["benchmark"]
    path = benchmark["path"]
    if benchmark["source"] != MINI and (path is None or not Path(path).expanduser().exists()):
        raise UserError("The rows are not on this machine, and a report uses no network.")
    keys = ("source", "path", "revision", "tasks", "limit", "on_bad_row", "longbench_e", "seed")
    return load_benchmark(**{key: benchmark[key] for key in keys}).rows
