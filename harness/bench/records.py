"""One repeat of one variant as a row of `bench.json` and `bench.csv`, the format that `harness.report` reads."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from harness.bench.config import Variant
from harness.bench.measure import Memory, Timing, latencies, memory_between
from harness.engines.contract import BlockUsageSample, EngineStats
from harness.engines.vllm.traffic import TimedRequest
from harness.hardware import describe


@dataclass(frozen=True)
class Repeat:
    """What was seen of one repeat of one variant.

    Attributes:
        number: counts from 0.
        began_s: seconds since its session began.
        engine_start_s, warmup_s: what the engine took to be ready, not part of the timing.
        before, after: the engine's counts around it; None for stock vLLM.
        usage: its engine steps.
    """

    variant: Variant
    number: int
    load: Sequence[TimedRequest]
    timings: Sequence[Timing]
    began_s: float
    engine_start_s: float
    warmup_s: float
    before: EngineStats | None
    after: EngineStats | None
    usage: Sequence[BlockUsageSample]


def device_name() -> str:
    """The GPUs, or the CPU and how many cores of it may be used."""
    machine = describe()
    if machine["device"] == "cuda":
        return ", ".join(gpu["name"] for gpu in machine["gpus"])
    return f"{machine['cpu']}, {machine['num_cores']} cores"


def make_row(repeat: Repeat, device: str) -> dict[str, Any]:
    """The repeat as plain data. Times in seconds, rates a second of the timed part, blocks of vLLM's pool."""
    config = repeat.variant.config
    inputs = [len(timed.request.prompt_token_ids) for timed in repeat.load]
    outputs = [len(timing.token_s) for timing in repeat.timings]
    duration = max(timing.token_s[-1] for timing in repeat.timings)
    return {
        "model": config.model.name,
        "policy": repeat.variant.policy,
        "variant": repeat.variant.note,
        "budget": config.policy.budget,
        "block_size": config.engine.block_size,
        "repeat": repeat.number,
        "num_requests": len(repeat.load),
        "input_tokens": fmean(inputs),
        "output_tokens": fmean(outputs),
        "output_tok_s": sum(outputs) / duration,
        "total_tok_s": (sum(inputs) + sum(outputs)) / duration,
        "duration_s": duration,
        "began_s": repeat.began_s,
        "engine_start_s": repeat.engine_start_s,
        "warmup_s": repeat.warmup_s,
        "device": device,
        "label": repeat.variant.label,
        **latencies(repeat.timings),
        **_memory_columns(repeat, duration),
    }


def _memory_columns(repeat: Repeat, duration: float) -> dict[str, Any]:
    """None throughout for stock vLLM, which does not record them."""
    if repeat.before is None or repeat.after is None:
        names = [*Memory.__dataclass_fields__, *_EXTRA_COLUMNS]
        return dict.fromkeys(names)
    memory, per_block = memory_between(repeat.before, repeat.after), repeat.after.bytes_per_block
    extra = (
        repeat.after.num_blocks,
        per_block,
        memory.peak_blocks * per_block,
        round(memory.mean_blocks * per_block),
        memory.eviction_time_s / duration,
        memory.decode_eviction_time_s / memory.decode_s if memory.decode_s else None,
    )
    return asdict(memory) | dict(zip(_EXTRA_COLUMNS, extra, strict=True))


_EXTRA_COLUMNS = (
    "pool_blocks",
    "bytes_per_block",
    "peak_kv_bytes",
    "mean_kv_bytes",
    "eviction_share",
    "eviction_share_of_decode",
)
