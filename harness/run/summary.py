"""What a run prints at its end, and its flat CSV."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.budget import budget_text
from harness.config import ENGINES_WITHOUT_POOL
from harness.store.manifest import Manifest, write_atomically

MIB = 1024**2
COLUMNS_OF_TASK = (
    "task",
    "category",
    "metric",
    "score",
    "ci_low",
    "ci_high",
    "num_samples",
    "num_expected",
    "num_empty",
    "num_truncated",
    "num_ended_by_length",
    "mean_prompt_tokens",
    "mean_output_tokens",
    "mean_evicted_tokens",
    "share_evicted",
)
PLAIN_WIDTH = 120


def write_summary_csv(path: Path, manifest: Manifest, metrics: dict[str, Any]) -> None:
    """One row a task, every number of the run repeated on it, so that runs can be put under one another."""
    import pandas as pd

    config = manifest.config
    run = {
        "run_id": manifest.run_id,
        "status": manifest.status,
        "model": config["model"]["name"],
        "engine": config["engine"]["name"],
        "policy": config["policy"]["name"],
        "budget": config["policy"]["budget"],
        "benchmark": config["benchmark"]["name"],
        "limit": config["benchmark"]["limit"],
        "device": manifest.hardware["device"],
        "overall_score": metrics["overall"]["score"],
        **metrics["memory"],
        **metrics["speed"],
        "num_evictions": metrics["eviction"]["num_evictions"],
        "num_preemptions": metrics["eviction"]["num_preemptions"],
        "eviction_time_s": metrics["eviction"]["eviction_time_s"],
    }
    rows = [run | {key: task[key] for key in COLUMNS_OF_TASK} for task in metrics["tasks"]]
    write_atomically(path, pd.DataFrame(rows).to_csv(index=False))


def print_run(manifest: Manifest, metrics: dict[str, Any]) -> None:
    """Print the table of scores, then memory, throughput and evictions."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    console.print(_score_table(manifest, metrics))
    for line in (_memory_line(manifest, metrics), _speed_line(metrics), _eviction_line(metrics)):
        console.print(line, soft_wrap=True)


def _score_table(manifest: Manifest, metrics: dict[str, Any]) -> Table:
    config = manifest.config
    budget = config["policy"]["budget"]
    policy = config["policy"]["name"] + (f", budget {budget_text(budget)}" if budget else "")
    limit = "" if metrics["limit"] is None else f", limit {metrics['limit']}"
    engine = config["engine"]["name"]
    title = f"{policy} on {config['model']['name']} ({engine}), {config['benchmark']['name']}{limit}"
    table = Table(title=title, title_justify="left", show_footer=True)
    overall = metrics["overall"]
    count = f"{overall['n']}/{overall['expected']}"
    table.add_column("task", footer="mean of tasks")
    table.add_column("metric")
    table.add_column("score", justify="right", footer=_number(overall["score"], 2))
    table.add_column("n", justify="right", footer=count)
    table.add_column("prompt tokens", justify="right")
    table.add_column("answer tokens", justify="right")
    table.add_column("evicted tokens", justify="right")
    for task in metrics["tasks"]:
        table.add_row(
            task["task"],
            task["metric"],
            _number(task["score"], 2),
            f"{task['num_samples']}/{task['num_expected']}",
            _number(task["mean_prompt_tokens"], 0),
            _number(task["mean_output_tokens"], 0),
            _number(task["mean_evicted_tokens"], 0),
        )
    return table


def _memory_line(manifest: Manifest, metrics: dict[str, Any]) -> str:
    memory = metrics["memory"]
    if not memory:
        return "KV memory    not measured, the engine ended badly"
    at_end = _number(memory["mean_final_resident_tokens"], 0)
    has_pool = manifest.config["engine"]["name"] not in ENGINES_WITHOUT_POOL
    source = "" if has_pool else "; counted from resident lengths, not from a pool"
    return (
        f"KV memory    peak {memory['peak_kv_bytes'] / MIB:.1f} MiB ({memory['peak_blocks']} blocks of "
        f"{memory['block_size']} tokens), mean over time {_number(_mib(memory['mean_kv_bytes']), 1)} MiB; a request's "
        f"resident tokens: at most {memory['peak_resident_tokens']}, at its end {at_end} on average"
        f"{_kept_text(memory)}{_read_text(memory)}{source}"
    )


def _kept_text(memory: dict[str, Any]) -> str:
    """Of policies whose layers and heads keep unequally many tokens."""
    if memory["mean_kept_tokens"] is None:
        return ""
    return (
        f"; a layer and head kept {memory['least_kept_tokens']} to {memory['most_kept_tokens']} tokens of a prompt, "
        f"{_number(memory['mean_kept_tokens'], 0)} on average"
    )


def _read_text(memory: dict[str, Any]) -> str:
    """Of policies that read less than they keep."""
    if memory["mean_read_share"] is None:
        return ""
    return f"; a decode step read {100 * memory['mean_read_share']:.1f} % of them, which frees nothing"


def _speed_line(metrics: dict[str, Any]) -> str:
    speed = metrics["speed"]
    return (
        f"Throughput   {_number(speed['output_tokens_per_s'], 1)} output tokens/s, "
        f"{_number(speed['samples_per_s'], 2)} samples/s over {speed['generation_s']:.1f} s"
    )


def _eviction_line(metrics: dict[str, Any]) -> str:
    eviction = metrics["eviction"]
    share = 100 * (eviction["share_evicted"] or 0)
    return (
        f"Evictions    {eviction['num_evictions']} in {share:.0f} % of the requests, "
        f"{eviction['num_evicted_tokens']} tokens a layer, {_number(eviction['eviction_time_s'], 2)} s; "
        f"{eviction['num_preemptions']} preemptions"
    )


def _mib(size: float | None) -> float | None:
    return None if size is None else size / MIB


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
