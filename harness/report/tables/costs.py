"""Tables of KV memory, speed and evictions of LongBench runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from harness.report.reading.runs import Group, Run
from harness.report.reading.usage import (
    Percentiles,
    blocks_per_request,
    e2e,
    mean_blocks,
    peak_blocks,
    read_usage,
    total_tokens_per_s,
    tpot,
    ttft,
)
from harness.report.tables.conditions import (
    BUDGET_MEANING,
    COMPACTION_MEANING,
    key_cells,
    key_columns,
    key_record,
    setting,
    source_of_blocks,
    speed_warnings,
    warnings,
)
from harness.report.tables.grid import Cell, Column, Table, number_cell

MIB = 1024**2

Reader = Callable[[Run], float | None]


@dataclass(frozen=True)
class Quantity:
    """One column: its name in CSV, its heading, and how to read it off a run (None: not recorded)."""

    key: str
    title: str
    unit: str
    digits: int
    read: Reader


def memory_table(group: Group) -> Table:
    """Blocks in use and resident tokens, with the share of the full cache's memory of a request."""
    to_full = Quantity("request_kv_to_full", "To full", "% of KV a request", 1, lambda run: _share_of_full(group, run))
    caption = (
        f"{setting(group)} {source_of_blocks(group)} Peak and mean are of the whole pool: they depend on how many "
        "requests ran at once, and do not compare policies. Blocks and KV a request do: mean of a running request, in "
        "all layers. Means are over time. To full: KV a request over that of the full cache on the same engine with as "
        "many requests at once. Resident tokens are those of one layer of one request: the peak is reached while its "
        f"prompt is read, the end is what stays after evictions. {BUDGET_MEANING}."
    )
    uneven = any(memory_of(run, "mean_kept_tokens") is not None for run in group.runs)
    if uneven:
        caption += (
            " Kept of a prompt: where layers and KV heads keep unequally many tokens, over all of these and prompts."
        )
    quantities = [*_MEMORY, *(_KEPT if uneven else ()), to_full]
    return _table(group, "memory", "KV memory", caption, quantities, warnings(group))


def speed_table(group: Group) -> Table:
    """Throughput, latency percentiles, evictions and preemptions."""
    caption = (
        f"{setting(group)} All samples were sent at once, so TTFT holds the time in the queue; load tests measure "
        "latency better. Runs whose answers differ in length compare by samples, not by tokens. TPOT: time "
        "of a request after its first token by its later tokens. "
        f"{COMPACTION_MEANING}; with engine=kvpress it is the time in the press. {BUDGET_MEANING}."
    )
    return _table(group, "speed", "Speed and evictions", caption, _SPEED, [*warnings(group), *speed_warnings(group)])


def memory_of(run: Run, key: str) -> float | None:
    """A number of `metrics.json`'s memory, None where the engine ended badly."""
    return run.metrics["memory"].get(key)


def request_kv_mib(run: Run) -> float | None:
    """KV memory of a running request in MiB, mean over engine steps: whatever number of requests runs at once."""
    blocks, size = blocks_per_request(read_usage(run)), memory_of(run, "bytes_per_block")
    return None if blocks is None or size is None else blocks * size / MIB


def samples_per_s(run: Run) -> float | None:
    """Samples answered a second."""
    return run.metrics["speed"]["samples_per_s"]


def mean_answer_tokens(run: Run) -> float | None:
    """Mean tokens of an answer; speeds of runs whose answers differ in length compare by samples only."""
    return fmean(p.num_output_tokens for p in run.answered) if run.answered else None


def _table(
    group: Group, part: str, title: str, caption: str, quantities: Sequence[Quantity], notes: Sequence[str]
) -> Table:
    keys = key_columns(group)
    rows: list[list[Cell]] = []
    records: list[dict[str, Any]] = []
    for run in group.runs:
        values = {one.key: one.read(run) for one in quantities}
        cells = [number_cell(values[one.key], one.digits) for one in quantities]
        rows.append([*key_cells(run, group), *cells])
        records.append(key_record(run) | values)
    return Table(
        name=f"{part}-{group.name}",
        title=f"{title}, {group.title}",
        caption=caption,
        columns=[*keys, *(Column(one.title, one.unit) for one in quantities)],
        rows=rows,
        num_keys=len(keys),
        notes=notes,
        records=records,
    )


def _share_of_full(group: Group, run: Run) -> float | None:
    baseline = group.cost_baseline(run)
    mine, full = request_kv_mib(run), baseline and request_kv_mib(baseline)
    return 100 * mine / full if mine is not None and full else None


def _mib(size: float | None) -> float | None:
    return None if size is None else size / MIB


def _speed_of(key: str) -> Reader:
    return lambda run: run.metrics["speed"][key]


def _eviction_of(key: str) -> Reader:
    return lambda run: run.metrics["eviction"][key]


def _memory_of(key: str) -> Reader:
    return lambda run: memory_of(run, key)


def _mean_kv_mib(run: Run) -> float | None:
    blocks, size = mean_blocks(read_usage(run)), memory_of(run, "bytes_per_block")
    return None if blocks is None or size is None else blocks * size / MIB


def _peak_blocks(in_prefill: bool) -> Reader:
    return lambda run: peak_blocks(read_usage(run), in_prefill)


def _resident_share(run: Run) -> float | None:
    share = memory_of(run, "mean_resident_share")
    return None if share is None else 100 * share


def _share_evicted(run: Run) -> float | None:
    share = run.metrics["eviction"]["share_evicted"]
    return None if share is None else 100 * share


def _compaction_share(run: Run) -> float | None:
    seconds = run.metrics["speed"]["generation_s"]
    evicting = run.metrics["eviction"]["eviction_time_s"]
    return 100 * evicting / seconds if seconds and evicting is not None else None


def _percentile(of: Callable[[Sequence[Any]], Percentiles | None], name: str, factor: float) -> Reader:
    def read(run: Run) -> float | None:
        found = of(run.answered)
        return None if found is None else factor * getattr(found, name)

    return read


def _latency(key: str, of: Callable[[Sequence[Any]], Percentiles | None], unit: str, factor: float) -> list[Quantity]:
    return [
        Quantity(f"{key}_{name}_{unit}", f"{key.upper()} {name}", unit, 2, _percentile(of, name, factor))
        for name in ("p50", "p90", "p99")
    ]


_MEMORY = (
    Quantity("block_size", "Block", "tokens", 0, lambda run: run.block_size),
    Quantity("peak_blocks", "Peak blocks", "", 0, _memory_of("peak_blocks")),
    Quantity("peak_prefill_blocks", "In prefill", "peak blocks", 0, _peak_blocks(in_prefill=True)),
    Quantity("peak_decode_blocks", "In decode", "peak blocks", 0, _peak_blocks(in_prefill=False)),
    Quantity("peak_kv_mib", "Peak KV", "MiB", 1, lambda run: _mib(memory_of(run, "peak_kv_bytes"))),
    Quantity("mean_blocks", "Mean blocks", "", 1, lambda run: mean_blocks(read_usage(run))),
    Quantity("mean_kv_mib", "Mean KV", "MiB", 1, _mean_kv_mib),
    Quantity("blocks_per_request", "Blocks a request", "", 1, lambda run: blocks_per_request(read_usage(run))),
    Quantity("request_kv_mib", "KV a request", "MiB", 1, request_kv_mib),
    Quantity("peak_resident_tokens", "Resident, peak", "tokens, max", 0, _memory_of("peak_resident_tokens")),
    Quantity("mean_peak_resident_tokens", "Resident, mean peak", "tokens", 0, _memory_of("mean_peak_resident_tokens")),
    Quantity(
        "mean_final_resident_tokens", "Resident, end", "tokens, mean", 0, _memory_of("mean_final_resident_tokens")
    ),
    Quantity("resident_share", "Left, end", "% of a request", 1, _resident_share),
)
_KEPT = (
    Quantity("mean_kept_tokens", "Kept of a prompt", "tokens, mean", 0, _memory_of("mean_kept_tokens")),
    Quantity("least_kept_tokens", "Least", "of a head", 0, _memory_of("least_kept_tokens")),
    Quantity("most_kept_tokens", "Most", "of a head", 0, _memory_of("most_kept_tokens")),
)
_SPEED = (
    Quantity("samples_per_s", "Samples", "1/s", 3, samples_per_s),
    Quantity("mean_answer_tokens", "Answer", "tokens, mean", 1, mean_answer_tokens),
    Quantity("output_tokens_per_s", "Output", "tokens/s", 1, _speed_of("output_tokens_per_s")),
    Quantity("total_tokens_per_s", "Total", "tokens/s", 1, total_tokens_per_s),
    *_latency("ttft", ttft, "s", 1),
    *_latency("tpot", tpot, "ms", 1000),
    *_latency("e2e", e2e, "s", 1),
    Quantity("share_evicted", "Evicted from", "% of requests", 0, _share_evicted),
    Quantity("num_evictions", "Evictions", "", 0, _eviction_of("num_evictions")),
    Quantity("compaction_share", "Compaction", "% of time", 2, _compaction_share),
    Quantity("num_preemptions", "Preemptions", "", 0, _eviction_of("num_preemptions")),
)
