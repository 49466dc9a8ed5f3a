"""From token events and the engine's own counts to the numbers of one repeat."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile, pairwise

import numpy as np

from harness.engines.contract import BlockUsageSample, EngineStats, mean_over_time
from harness.engines.vllm.traffic import TimedRequest, TokenEvent

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Timing:
    """One request's times, seconds since the load began: its arrival, and when each token came."""

    arrival_s: float
    token_s: Sequence[float]

    @property
    def ttft(self) -> float:
        """To the first token, from the arrival on, waiting included."""
        return self.token_s[0] - self.arrival_s

    @property
    def e2e(self) -> float:
        """To the last token."""
        return self.token_s[-1] - self.arrival_s

    @property
    def tpot(self) -> float | None:
        """A token after the first; None if there is none."""
        later = len(self.token_s) - 1
        return (self.token_s[-1] - self.token_s[0]) / later if later else None

    @property
    def gaps(self) -> list[float]:
        """Between tokens that follow each other; 0 for tokens that came together."""
        return [later - earlier for earlier, later in pairwise(self.token_s)]


@dataclass(frozen=True)
class Memory:
    """Blocks in use while the load ran, and what was evicted; counts are of this load alone.

    Attributes:
        mean_blocks: over time.
        peak_prefill_blocks: at most in steps that read prompts.
        decode_s: time of the steps that read no prompt.
        eviction_time_s: spent in evictions, and in watching attention for them.
        decode_eviction_time_s: of that, in steps that read no prompt.
        alone_share: of the steps, those in which a single request ran.
    """

    peak_blocks: int
    mean_blocks: float
    peak_prefill_blocks: int
    num_steps: int
    num_evictions: int
    num_evicted_tokens: int
    num_preemptions: int
    decode_s: float
    eviction_time_s: float
    decode_eviction_time_s: float
    alone_share: float


def collect(load: Sequence[TimedRequest], events: Iterable[TokenEvent]) -> list[Timing]:
    """The times of every request, in the order of `load`.

    Raises:
        RuntimeError: a request did not finish, or was not continued to the length that was asked for.
    """
    token_s: dict[str, list[float]] = defaultdict(list)
    finished = set()
    for event in events:
        token_s[event.request_id].extend([event.t_s] * event.num_tokens)
        if event.finished:
            finished.add(event.request_id)
    for timed in load:
        request = timed.request
        count = len(token_s[request.request_id])
        if request.request_id not in finished or (request.ignore_eos and count != request.max_new_tokens):
            raise RuntimeError(
                f"request {request.request_id} got {count} of {request.max_new_tokens} tokens, the engine lost the rest"
            )
    return [Timing(timed.at_s, token_s[timed.request.request_id]) for timed in load]


def percentiles(name: str, values: Iterable[float | None]) -> dict[str, float | None]:
    """{"name_p50": ..., "name_p90": ..., "name_p99": ...}, linear between values; None where nothing is known."""
    known = [value for value in values if value is not None]
    found = np.percentile(known, PERCENTILES).tolist() if known else [None] * len(PERCENTILES)
    return {f"{name}_p{percent}": value for percent, value in zip(PERCENTILES, found, strict=True)}


def latencies(timings: Sequence[Timing]) -> dict[str, float | None]:
    """Percentiles over requests, for inter-token latency over all gaps of all requests. Seconds."""
    return (
        percentiles("ttft", (timing.ttft for timing in timings))
        | percentiles("tpot", (timing.tpot for timing in timings))
        | percentiles("itl", (gap for timing in timings for gap in timing.gaps))
        | percentiles("e2e", (timing.e2e for timing in timings))
    )


def usage_between(before: EngineStats, after: EngineStats) -> list[BlockUsageSample]:
    """The engine steps of one load, `t_s` from the first of them.

    What comes before it is the engine cleaning up after the load before.
    """
    steps = list(dropwhile(lambda step: not step.running, after.block_usage[len(before.block_usage) :]))
    return [replace(step, t_s=round(step.t_s - steps[0].t_s, 4)) for step in steps]


def memory_between(before: EngineStats, after: EngineStats) -> Memory:
    """What the load did to the KV pool.

    Raises:
        RuntimeError: blocks are still taken although every request is finished.
    """
    if after.free_blocks_at_end != after.num_blocks - 1:
        raise RuntimeError(
            f"{after.num_blocks - 1 - after.free_blocks_at_end} KV blocks are still taken after the last request"
        )
    steps = usage_between(before, after)
    spans = [(step, later.t_s - step.t_s) for step, later in pairwise(steps)]
    return Memory(
        peak_blocks=max(step.blocks for step in steps),
        mean_blocks=mean_over_time(steps)[0],
        peak_prefill_blocks=max((step.blocks for step in steps if step.prefilling), default=0),
        num_steps=after.num_steps - before.num_steps,
        num_evictions=after.num_evictions - before.num_evictions,
        num_evicted_tokens=after.num_evicted_tokens - before.num_evicted_tokens,
        num_preemptions=after.num_preemptions - before.num_preemptions,
        decode_s=sum(seconds for step, seconds in spans if step.running and not step.prefilling),
        eviction_time_s=after.eviction_time_s - before.eviction_time_s,
        decode_eviction_time_s=after.decode_eviction_time_s - before.decode_eviction_time_s,
        alone_share=sum(step.running == 1 for step in steps) / max(1, sum(step.running > 0 for step in steps)),
    )
