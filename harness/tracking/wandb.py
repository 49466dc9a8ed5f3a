"""Weights & Biases: one W&B run a run, written once from the finished record.

Nothing is streamed while samples are generated: a run may take many sessions, and offline W&B cannot continue a run.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.config import TrackerConfig
from harness.store.manifest import Manifest
from harness.store.predictions import Prediction

MAX_TEXT = 400
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

    settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, init_timeout=ONLINE_TIMEOUT_S)
    with wandb.init(
        **_names(tracker, manifest), dir=folder, mode=tracker.mode, reinit="finish_previous", settings=settings
    ) as run:
        rows = [sample_row(prediction) for prediction in predictions]
        run.log({"samples": wandb.Table(columns=list(SAMPLE_COLUMNS), data=rows)})
        run.summary.update(summary(metrics))
        return str(run.url) if tracker.mode == "online" else run.settings.sync_dir


def summary(metrics: dict[str, Any]) -> dict[str, float]:
    """The numbers of a run by W&B name: `longbench/<task>` in points, then memory, speed and evictions."""
    numbers = {f"longbench/{task['task']}": task["score"] for task in metrics["tasks"]}
    numbers["longbench/average"] = metrics["overall"]["score"]
    for part in ("memory", "speed", "eviction"):
        numbers |= {f"{part}/{name}": value for name, value in metrics[part].items()}
    return {name: value for name, value in numbers.items() if value is not None}


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


def _shortened(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[: MAX_TEXT // 2]} [...] {text[-MAX_TEXT // 2 :]}"
