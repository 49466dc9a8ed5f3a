"""Tables of KV memory, speed and evictions of LongBench runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from harness.report.reading.runs import Group, Run
from harness.report.reading.usage import (
    PERCENTILES,
    blocks_per_request,
    latencies,
    mean_blocks,
    peak_blocks,
    read_usage,
    total_tokens_per_s,
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
from harness.report.tables.grid import Column, Table, number_cell

MIB = 1024**2

Reader = Callable[[Run], float | None]


@dataclass(frozen=True)
class Quantity:
    """One column: its name in CSV, its heading, and how to read it off a run (None: not recorded).

    Attributes:
        meaning: for the caption; a quantity that needs it stands in the table only where some run has it.
    """

    key: str
    title: str
    unit: str
    digits: int
    read: Reader
    meaning: str = ""


def memory_table(group: Group) -> Table:
    """What compares policies first, a request's memory beside the full cache's; then tokens, then the pool."""
    to_full = Quantity("request_kv_to_full", "To full", "% of KV a request", 1, lambda run: _share_of_full(group, run))
    caption = (
        f"{setting(group)} {source_of_blocks(group)} Peak and mean are of the whole pool: they depend on how many "
        "requests ran at once, and do not compare policies. Blocks and KV a request do: mean of a running request, in "
        "all layers. Means are over time. To full: KV a request over that of the full cache on the same engine with as "
        "many requests at once. Resident tokens are those of one layer of one request: the peak is reached while its "
        f"prompt is read, the end is what stays after evictions. {BUDGET_MEANING}."
    )
    a_request = Quantity("request_kv_mib", "KV a request", "MiB", 1, request_kv_mib)
    quantities = [a_request, to_full, *_NOT_FREED, *_KEPT, *_POOL]
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


def request_kv_mib(run: Run) -> float | None:
    """KV memory of a running request in MiB, mean over engine steps: whatever number of requests runs at once."""
    return _in_mib(run, blocks_per_request(read_usage(run)))


def nominal_saving(run: Run) -> float | None:
    """Percent of the bytes kept that a cache with shorter keys would save at most, None without ThinK.

    Zero key channels stay in memory; keys are half of the bytes.
    """
    pruned = run.manifest.config["policy"]["options"].get("think")
    return 100 * pruned / 2 if pruned else None


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
    values = [{one.key: one.read(run) for one in quantities} for run in group.runs]
    shown = [one for one in quantities if not one.meaning or any(row[one.key] is not None for row in values)]
    meanings = dict.fromkeys(one.meaning for one in shown if one.meaning)
    return Table(
        name=f"{part}-{group.name}",
        title=f"{title}, {group.title}",
        caption=" ".join([caption, *meanings]),
        columns=[*keys, *(Column(one.title, one.unit) for one in shown)],
        rows=[
            [*key_cells(run, group), *(number_cell(row[one.key], one.digits) for one in shown)]
            for run, row in zip(group.runs, values, strict=True)
        ],
        num_keys=len(keys),
        notes=notes,
        records=[
            key_record(run) | {one.key: row[one.key] for one in shown}
            for run, row in zip(group.runs, values, strict=True)
        ],
    )


def _in_mib(run: Run, blocks: float | None) -> float | None:
    size = run.metrics["memory"].get("bytes_per_block")
    return None if blocks is None or size is None else blocks * size / MIB


def _share_of_full(group: Group, run: Run) -> float | None:
    baseline = group.cost_baseline(run)
    mine, full = request_kv_mib(run), baseline and request_kv_mib(baseline)
    return 100 * mine / full if mine is not None and full else None


def _recorded(part: str, key: str, factor: float = 1) -> Reader:
    """A number of `metrics.json`, None where the engine ended badly."""

    def read(run: Run) -> float | None:
        value = run.metrics[part].get(key)
        return None if value is None else factor * value

    return read


def _compaction_share(run: Run) -> float | None:
    seconds = run.metrics["speed"]["generation_s"]
    evicting = run.metrics["eviction"]["eviction_time_s"]
    return 100 * evicting / seconds if seconds and evicting is not None else None


def _latency(key: str, unit: str, factor: float) -> list[Quantity]:
    def reader(place: int) -> Reader:
        return lambda run: factor * found[place] if (found := latencies(run.answered).get(key)) else None

    return [
        Quantity(f"{key}_p{percent}_{unit}", f"{key.upper()} p{percent}", unit, 2, reader(place))
        for place, percent in enumerate(PERCENTILES)
    ]


_KEPT_MEANING = "Kept of a prompt: where layers and KV heads keep unequally many tokens, over all of these and prompts."
_READ_MEANING = (
    "Read: tokens that attention read in decode steps over those resident, where a policy leaves some unread; those "
    "stay in memory."
)
_NOMINAL_MEANING = (
    "Nominal: what a cache with shorter keys would save at most of the bytes that are kept (ThinK zeroes key "
    "channels). Nothing of it is freed, and no other figure counts it."
)
_KEPT = (
    Quantity("peak_resident_tokens", "Resident, peak", "tokens, max", 0, _recorded("memory", "peak_resident_tokens")),
    Quantity(
        *("mean_peak_resident_tokens", "Resident, mean peak", "tokens", 0),
        _recorded("memory", "mean_peak_resident_tokens"),
    ),
    Quantity(
        *("mean_final_resident_tokens", "Resident, end", "tokens, mean", 0),
        _recorded("memory", "mean_final_resident_tokens"),
    ),
    Quantity("resident_share", "Left, end", "% of a request", 1, _recorded("memory", "mean_resident_share", 100)),
    *(
        Quantity(key, title, unit, 0, _recorded("memory", key), _KEPT_MEANING)
        for key, title, unit in (
            ("mean_kept_tokens", "Kept of a prompt", "tokens, mean"),
            ("least_kept_tokens", "Least", "of a head"),
            ("most_kept_tokens", "Most", "of a head"),
        )
    ),
)
_POOL = (
    Quantity("blocks_per_request", "Blocks a request", "", 1, lambda run: blocks_per_request(read_usage(run))),
    Quantity("block_size", "Block", "tokens", 0, lambda run: run.block_size),
    Quantity("peak_blocks", "Peak blocks", "", 0, _recorded("memory", "peak_blocks")),
    Quantity("peak_prefill_blocks", "In prefill", "peak blocks", 0, lambda run: peak_blocks(read_usage(run), True)),
    Quantity("peak_decode_blocks", "In decode", "peak blocks", 0, lambda run: peak_blocks(read_usage(run), False)),
    Quantity("peak_kv_mib", "Peak KV", "MiB", 1, _recorded("memory", "peak_kv_bytes", 1 / MIB)),
    Quantity("mean_blocks", "Mean blocks", "", 1, lambda run: mean_blocks(read_usage(run))),
    Quantity("mean_kv_mib", "Mean KV", "MiB", 1, lambda run: _in_mib(run, mean_blocks(read_usage(run)))),
)
_NOT_FREED = (
    Quantity(
        *("read_share", "Read", "% of what is kept", 1), _recorded("memory", "mean_read_share", 100), _READ_MEANING
    ),
    Quantity("nominal_saving", "Nominal saving", "% of what is kept", 1, nominal_saving, _NOMINAL_MEANING),
)
_SPEED = (
    Quantity("samples_per_s", "Samples", "1/s", 3, samples_per_s),
    Quantity("mean_answer_tokens", "Answer", "tokens, mean", 1, mean_answer_tokens),
    Quantity("output_tokens_per_s", "Output", "tokens/s", 1, _recorded("speed", "output_tokens_per_s")),
    Quantity("total_tokens_per_s", "Total", "tokens/s", 1, total_tokens_per_s),
    *_latency("ttft", "s", 1),
    *_latency("tpot", "ms", 1000),
    *_latency("e2e", "s", 1),
    Quantity("share_evicted", "Evicted from", "% of requests", 0, _recorded("eviction", "share_evicted", 100)),
    Quantity("num_evictions", "Evictions", "", 0, _recorded("eviction", "num_evictions")),
    Quantity("compaction_share", "Compaction", "% of time", 2, _compaction_share),
    Quantity("num_preemptions", "Preemptions", "", 0, _recorded("eviction", "num_preemptions")),
)
