"""From token events to latencies, and from the engine's counts to memory."""

from dataclasses import replace

import pytest

from harness.bench.measure import collect, latencies, memory_between, percentiles
from harness.engines.contract import BlockUsageSample, EngineStats, GenerationRequest
from harness.engines.vllm.traffic import TimedRequest, TokenEvent


def request(name: str, tokens: int, at_s: float = 0.0) -> TimedRequest:
    return TimedRequest(GenerationRequest(name, [5], tokens, ignore_eos=True), at_s)


LOAD = [request("a", 3), request("b", 1, at_s=2.0)]
EVENTS = [
    TokenEvent("a", 1.0, 1, False),
    TokenEvent("a", 1.5, 1, False),
    TokenEvent("b", 2.25, 1, True),
    TokenEvent("a", 3.5, 1, True),
]


def test_times_count_from_each_requests_arrival():
    a, b = collect(LOAD, EVENTS)
    assert (a.ttft, a.tpot, a.e2e, a.gaps) == (1.0, 1.25, 3.5, [0.5, 2.0])
    assert (b.ttft, b.tpot, b.e2e, b.gaps) == (0.25, None, 0.25, [])


def test_tokens_that_come_together_have_no_gap():
    (timing,) = collect([request("a", 3)], [TokenEvent("a", 1.0, 1, False), TokenEvent("a", 2.0, 2, True)])
    assert timing.gaps == [1.0, 0.0]


def test_latencies_are_over_requests_and_over_all_gaps():
    found = latencies(collect(LOAD, EVENTS))
    assert found["ttft_p50"] == pytest.approx(0.625)
    assert found["tpot_p50"] == pytest.approx(1.25)
    assert found["itl_p50"] == pytest.approx(1.25)
    assert found["itl_p90"] == pytest.approx(1.85)
    assert found["e2e_p99"] == pytest.approx(0.25 + 0.99 * 3.25)


def test_percentiles_of_a_hundred_numbers():
    found = percentiles("x", [float(number) for number in range(101)])
    assert found == {"x_p50": 50.0, "x_p90": 90.0, "x_p99": 99.0}
    assert percentiles("x", [None]) == {"x_p50": None, "x_p90": None, "x_p99": None}


def test_a_lost_token_is_an_error():
    with pytest.raises(RuntimeError, match="request a got 2 of 3 tokens"):
        collect([request("a", 3)], [TokenEvent("a", 1.0, 1, False), TokenEvent("a", 2.0, 1, True)])


def test_a_request_that_never_ended_is_an_error():
    with pytest.raises(RuntimeError, match="the engine lost the rest"):
        collect([request("a", 1)], [TokenEvent("a", 1.0, 1, False)])


BEFORE = EngineStats(
    block_size=32,
    num_blocks=11,
    bytes_per_block=1,
    peak_blocks=9,
    mean_blocks=5.0,
    free_blocks_at_end=10,
    num_steps=2,
    num_evictions=3,
    num_evicted_tokens=96,
    num_preemptions=1,
    eviction_time_s=0.5,
    block_usage=[BlockUsageSample(0.0, 9, 1, 1), BlockUsageSample(1.0, 0, 0)],
)
AFTER = replace(
    BEFORE,
    num_steps=6,
    num_evictions=8,
    num_evicted_tokens=256,
    num_preemptions=1,
    eviction_time_s=0.75,
    decode_eviction_time_s=0.125,
    block_usage=[
        *BEFORE.block_usage,
        BlockUsageSample(1.1, 0, 0),
        BlockUsageSample(50.0, 4, 2, 2),
        BlockUsageSample(51.0, 6, 2, 1),
        BlockUsageSample(52.0, 8, 2),
        BlockUsageSample(55.0, 0, 0),
    ],
)


def test_counts_are_of_this_load_alone_and_the_mean_is_over_time():
    memory = memory_between(BEFORE, AFTER)
    assert (memory.peak_blocks, memory.peak_prefill_blocks, memory.num_steps) == (8, 6, 4)
    assert memory.mean_blocks == pytest.approx((4 * 1 + 6 * 1 + 8 * 3) / 5)
    assert (memory.num_evictions, memory.num_evicted_tokens, memory.num_preemptions) == (5, 160, 0)
    assert (memory.decode_s, memory.eviction_time_s, memory.decode_eviction_time_s) == (3.0, 0.25, 0.125)
    assert memory.alone_share == 0


def test_steps_with_one_request_are_counted():
    usage = [BlockUsageSample(60.0, 1, 1), BlockUsageSample(61.0, 1, 1), BlockUsageSample(62.0, 0, 0)]
    more = replace(AFTER, block_usage=[*AFTER.block_usage, *usage])
    assert memory_between(BEFORE, more).alone_share == pytest.approx(2 / 5)


def test_blocks_that_stay_taken_are_an_error():
    with pytest.raises(RuntimeError, match="3 KV blocks are still taken"):
        memory_between(BEFORE, replace(AFTER, free_blocks_at_end=7))
