"""An engine without a model that carries loads in scripted time, and the plans and loads to give it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hydra import compose, initialize_config_module

from harness.bench.config import Plan, Variant, make_plan, register_schema
from harness.bench.models import Vocabulary
from harness.engines.contract import BlockUsageSample, EngineStats
from harness.engines.vllm.traffic import TimedRequest, TokenEvent

BYTES_PER_BLOCK = 1000
NUM_BLOCKS = 100
VOCABULARY = Vocabulary(range(10, 50), (2,))
SMALL = (
    "name=small",
    "repeats=3",
    "load.num_requests=4",
    "load.input_tokens=96",
    "load.output_tokens=8",
    "variants.budgets=[64]",
    "engine.num_kv_blocks=null",
)


def composed_plan(*overrides: str) -> Plan:
    """The checked plan of `python -m harness.bench OVERRIDES`."""
    register_schema()
    with initialize_config_module(version_base="1.3", config_module="conf.bench"):
        return make_plan(compose("config", list(overrides)))


class ScriptedServer:
    """Makes one token of every request a step; a step takes `step_s` seconds times the speed of the day.

    `days` are shared by all servers: the n-th load that any of them carries runs at the n-th speed.
    """

    def __init__(self, variant: Variant, step_s: float, days: Iterator[float], log: list[str], evicts: bool = True):
        self.variant, self.step_s, self.days, self.log = variant, step_s, days, log
        self.evicts = evicts and variant.config.policy.budget is not None
        self.stats_now = EngineStats(
            block_size=32,
            num_blocks=NUM_BLOCKS,
            bytes_per_block=BYTES_PER_BLOCK,
            peak_blocks=0,
            mean_blocks=0.0,
            free_blocks_at_end=NUM_BLOCKS - 1,
            num_steps=0,
            num_evictions=0,
            num_evicted_tokens=0,
            num_preemptions=0,
            eviction_time_s=0.0,
        )
        log.append(f"start {variant.label}")

    def serve(self, requests: Sequence[TimedRequest]) -> Iterator[TokenEvent]:
        self.log.append(f"{len(requests)} requests {self.variant.label}")
        is_warmup = len(requests) == 2
        step_s = self.step_s * (1.0 if is_warmup else next(self.days))
        longest = max(timed.request.max_new_tokens for timed in requests)
        for step in range(longest):
            for timed in requests:
                last = timed.request.max_new_tokens - 1
                if step <= last:
                    yield TokenEvent(timed.request.request_id, step_s * (step + 1), 1, step == last)
        self._count(longest, step_s)

    def _count(self, num_steps: int, step_s: float) -> None:
        stats = self.stats_now
        began = stats.block_usage[-1].t_s + 5.0 if stats.block_usage else 0.0
        usage = [BlockUsageSample(began, 0, 0)]  # the engine cleans up after the load before
        usage += [BlockUsageSample(began + 2 + step * step_s, 10 + step, 2, step == 0) for step in range(num_steps)]
        usage += [BlockUsageSample(began + 2 + num_steps * step_s, 0, 0)]
        self.stats_now = replace(
            stats,
            num_steps=stats.num_steps + num_steps,
            num_evictions=stats.num_evictions + (7 if self.evicts else 0),
            eviction_time_s=stats.eviction_time_s + 0.5,
            decode_eviction_time_s=stats.decode_eviction_time_s + 0.25,
            block_usage=[*stats.block_usage, *usage],
        )

    def stats(self) -> EngineStats | None:
        return None if self.variant.is_stock else self.stats_now

    def close(self) -> None:
        self.log.append(f"close {self.variant.label}")
