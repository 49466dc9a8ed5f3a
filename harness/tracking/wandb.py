"""Weights & Biases: one W&B run a run, written once from the finished record.

Nothing is streamed while samples are generated: a run may take many sessions, and offline W&B cannot continue a run.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.benchmarks.longbench.aggregates import OVERALL
from harness.config import TrackerConfig
from harness.errors import UserError
from harness.store.manifest import Manifest
from harness.store.predictions import Prediction

MAX_TEXT = 400
MAX_HISTORY = 200
RUN_FILES = (
    "manifest.json",
    "metrics.json",
    "summary.csv",
    "predictions.jsonl",
    "block_usage.csv",
    "retention.jsonl",
    "needles.csv",
)
LOAD_TEST_FILES = ("bench_manifest.json", "bench.json", "bench.csv")
LOAD_TEST_FIELDS = ("output_tok_s", "total_tok_s", "ttft_p50", "tpot_p50", "e2e_p50", "peak_blocks", "mean_blocks")
ONLINE_TIMEOUT_S = 30
SAMPLE_COLUMNS = (
    "sample_id",
    "task",
    "score",
    "prediction",
    "answers",
    "num_prompt_tokens",
    "num_output_tokens",
    "finish_reason",
    "truncated",
    "num_evictions",
    "num_evicted_tokens",
    "peak_resident_tokens",
)


def outer_run() -> str | None:
    """Id of the W&B run that a W&B sweep agent made for this process, which then takes the place of ours."""
    return os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None


def report(
    tracker: TrackerConfig, folder: Path, manifest: Manifest, metrics: dict[str, Any], predictions: Sequence[Prediction]
) -> str:
    """Write the W&B run, its files under the run folder.

    Online, a run that W&B knows already under this id is continued, so that reporting twice does not make two.

    Returns:
        where the run is: its page, or its folder if offline.
    """
    import wandb

    with wandb.init(**_names(tracker, manifest), **_settings(folder, tracker)) as run:
        run.define_metric("kv/*", step_metric="kv/t_s")
        for step in memory_history(folder):
            run.log(step)
        rows = [sample_row(prediction) for prediction in predictions]
        run.log({"samples": wandb.Table(columns=list(SAMPLE_COLUMNS), data=rows)})
        run.log({f"figures/{name}": wandb.Html(svg, inject=False) for name, svg in run_figures(folder).items()})
        run.summary.update(summary(metrics))
        run.log_artifact(_artifact(folder, manifest.run_id, "run", RUN_FILES))
        return _place(run, tracker)


def report_load_test(tracker: TrackerConfig, folder: Path) -> str:
    """Write a load test as one W&B run: its rows as a table, medians of every setting in the summary, its files.

    Returns:
        where the run is: its page, or its folder if offline.

    Raises:
        UserError: the folder holds no load test.
    """
    import wandb

    from harness.report.reading.load_tests import read_bench, settings

    rows = read_bench([folder])
    if not rows:
        raise UserError(f"{folder} holds no load test (bench.json). Give the folder of one.")
    name = rows[0].load_test
    config = {key: getattr(rows[0], key) for key in ("model", "device", "load", "block_size", "conditions")}
    names = {"project": tracker.project, "entity": tracker.entity, "group": tracker.group, "name": name}
    names |= {"job_type": "load test", "tags": ["load test", rows[0].model, *tracker.tags], "config": config}
    with wandb.init(**names, **_settings(folder, tracker)) as run:
        columns = list(vars(rows[0]))
        run.log({"load_test": wandb.Table(columns=columns, data=[list(vars(row).values()) for row in rows])})
        for one in settings(rows):
            row = one.rows[0]
            label = row.series if row.budget is None else f"{row.series}@{row.budget:g}"
            values = {field: one.median(field) for field in LOAD_TEST_FIELDS}
            run.summary.update({f"load_test/{label}/{key}": v for key, v in values.items() if v is not None})
        run.log_artifact(_artifact(folder, name, "load-test", LOAD_TEST_FILES))
        return _place(run, tracker)


def summary(metrics: dict[str, Any]) -> dict[str, float | str]:
    """The numbers of a run by W&B name: scores in points with n and interval, then memory, speed and evictions.

    LongBench's average is of its own tasks only; a run of other tasks alone has `average` under what it is over.
    """
    overall = metrics["overall"]
    place = "longbench" if overall["name"] == OVERALL else overall["name"].replace(" ", "_")
    scores = {f"longbench/{task['task']}": task for task in metrics["tasks"]} | {f"{place}/average": overall}
    numbers: dict[str, Any] = {"status": metrics["status"]}
    for name, one in scores.items():
        numbers |= {name: one["score"], f"{name}.ci_low": one["ci_low"], f"{name}.ci_high": one["ci_high"]}
        numbers |= {f"{name}.n": one.get("n", one.get("num_samples"))}
        numbers |= {f"{name}.expected": one.get("expected", one.get("num_expected"))}
    for part in ("memory", "speed", "eviction"):
        numbers |= {f"{part}/{name}": value for name, value in metrics[part].items() if not isinstance(value, dict)}
    return {name: value for name, value in numbers.items() if value is not None}


def memory_history(folder: Path) -> list[dict[str, float]]:
    """KV blocks in use over time, at most `MAX_HISTORY` steps: of those that share one, that with the most blocks."""
    from harness.report.reading.runs import read_runs
    from harness.report.reading.usage import read_usage, thinned

    usage = [step for run in read_runs([folder]) for step in read_usage(run)]
    steps = thinned(usage, MAX_HISTORY)
    return [{"kv/t_s": step.t_s, "kv/blocks": step.blocks, "kv/running": step.running} for step in steps]


def run_figures(folder: Path) -> dict[str, str]:
    """The report's figures of this run alone, as SVG: blocks over time, and what was kept if that was recorded."""
    import vl_convert

    from harness.report.figures.all import report_looks
    from harness.report.figures.figure import Figure, declaration
    from harness.report.figures.retention import heads_figure, retention_figures
    from harness.report.figures.speed import usage_figure
    from harness.report.reading.runs import make_groups, read_runs

    found = {}
    for group in make_groups(read_runs([folder])):
        usage = usage_figure(group, report_looks([group], []))
        for figure in (usage, heads_figure(group), *retention_figures(group)):
            if isinstance(figure, Figure):
                name = figure.name.removesuffix(f"-{group.name}")
                found[name] = vl_convert.vegalite_to_svg(declaration(figure))
    return found


def sample_row(prediction: Prediction) -> list[Any]:
    """One row of the table of samples, in the order of `SAMPLE_COLUMNS`, long texts shortened in the middle."""
    values = asdict(prediction)
    values["prediction"] = _shortened(prediction.prediction)
    values["answers"] = _shortened(" | ".join(prediction.answers))
    return [values[column] for column in SAMPLE_COLUMNS]


def _names(tracker: TrackerConfig, manifest: Manifest) -> dict[str, Any]:
    """What identifies the W&B run, and everything it is filtered and grouped by."""
    config = manifest.config
    policy, model, benchmark = config["policy"], config["model"]["name"], config["benchmark"]["name"]
    budget = "" if policy["budget"] is None else f"-b{policy['budget']}"
    names = {
        "group": tracker.group,
        "job_type": tracker.job_type,
        "name": f"{policy['name']}{budget}-{model}-{benchmark}",
        "tags": [policy["name"], model, benchmark, *tracker.tags],
        "config": config
        | {
            "run_id": manifest.run_id,
            "command": manifest.command,
            "hardware": manifest.hardware,
            "versions": manifest.versions,
            "git": manifest.git,
            "data": manifest.data,
        },
    }
    if outer_run() is None:
        names |= {"project": tracker.project, "entity": tracker.entity, "id": manifest.run_id, "resume": "allow"}
    return names


def _settings(folder: Path, tracker: TrackerConfig) -> dict[str, Any]:
    import wandb

    settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, init_timeout=ONLINE_TIMEOUT_S)
    return {"dir": folder, "mode": tracker.mode, "reinit": "finish_previous", "settings": settings}


def _artifact(folder: Path, name: str, kind: str, files: Sequence[str]) -> Any:  # noqa: ANN401
    """The files of a folder as a W&B artifact of that name."""
    import wandb

    artifact = wandb.Artifact(re.sub(r"[^\w.-]", "_", name), type=kind)
    for file in files:
        if (folder / file).exists():
            artifact.add_file(str(folder / file))
    return artifact


def _place(run: Any, tracker: TrackerConfig) -> str:  # noqa: ANN401
    return str(run.url) if tracker.mode == "online" else run.settings.sync_dir


def _shortened(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[: MAX_TEXT // 2]} [...] {text[-MAX_TEXT // 2 :]}"
