"""Block accounting under load: arrivals at any time, any lengths, pools small enough to preempt."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.engines.contract import GenerationRequest
from harness.engines.vllm.arguments import EngineShape
from harness.engines.vllm.llm import sampling_params
from harness.engines.vllm.settings import EvictionSettings
from tests.engines.vllm.live import assert_blocks_match_lengths, live_engine, runner_of, scheduler_of
from tests.tiny_llama import random_prompt

BLOCK = 32
SMALL_POOL = 24  # blocks; the null block is one of them
MAX_TOKENS = 500

ENGINES = {
    "paged": EvictionSettings("paged_eviction", budget=64, reserve=False),
    "paged-reserve": EvictionSettings("paged_eviction", budget=128, reserve=True),
    "paged-chunked": EvictionSettings(
        "paged_eviction", budget=64, reserve=False, options={"prefill": "chunked", "prefill_chunk": 64}
    ),
    "streaming": EvictionSettings("streaming_llm", budget=96, reserve=False),
    "share": EvictionSettings("paged_eviction", budget=0.25, reserve=False),
    "share-reserve": EvictionSettings("h2o", budget=0.5, reserve=True),
    "full": EvictionSettings("full", reserve=False),
}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, tiny_model):
    shape = EngineShape(
        model=str(tiny_model),
        dtype="float32",
        max_model_len=600,
        block_size=BLOCK,
        kv_cache_gib=0.05,
        num_kv_blocks=SMALL_POOL,
        max_num_batched_tokens=256,
        max_num_seqs=6,
    )
    with live_engine(shape, ENGINES[request.param]) as live:
        live.settings = ENGINES[request.param]
        yield live


arrivals = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 480), st.integers(1, 100)), min_size=1, max_size=8
)  # step of arrival, prompt tokens, new tokens


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrivals=arrivals)
def test_blocks_equal_the_plan_after_each_step_and_all_return(engine, arrivals):
    llm, scheduler, runner = engine.llm_engine, scheduler_of(engine.llm_engine), runner_of(engine.llm_engine)
    policy = engine.settings.build_policy(BLOCK)
    waiting = sorted((step, index, length, new) for index, (step, length, new) in enumerate(arrivals))
    expected = {f"r{index}": new for _, index, _, new in waiting}
    finished, step = {}, 0
    while waiting or llm.has_unfinished_requests():
        while waiting and waiting[0][0] <= step:
            _, index, length, new = waiting.pop(0)
            request = GenerationRequest(f"r{index}", random_prompt(length, index), new, ignore_eos=True)
            llm.add_request(
                request.request_id, {"prompt_token_ids": request.prompt_token_ids}, sampling_params(request)
            )
        for output in llm.step() if llm.has_unfinished_requests() else ():
            if output.finished:
                finished[output.request_id] = len(output.outputs[0].token_ids)
        assert_blocks_match_lengths(scheduler, runner, policy)
        step += 1
        assert step < 10_000, "the engine makes no progress"
    assert finished == expected
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    stats = engine.stats()
    if engine.settings.reserve:
        assert stats.num_preemptions == 0
    if policy.evicts and policy.prompt_share is None:
        decoding = [change for change in stats.block_usage if change.running and not change.prefilling]
        assert all(change.blocks <= change.running * (policy.budget // BLOCK + 1) for change in decoding)


def preempting_requests():
    return [GenerationRequest(f"r{i}", random_prompt(60, i), 300, ignore_eos=True) for i in range(6)]


def test_a_pool_that_full_cache_overfills_preempts_and_still_finishes(tiny_model):
    """The pool holds 736 tokens; six requests of 360 want 2,160."""
    small = EngineShape(
        model=str(tiny_model), dtype="float32", max_model_len=600, block_size=BLOCK, kv_cache_gib=0.05,
        num_kv_blocks=SMALL_POOL,
    )  # fmt: skip
    with live_engine(small, EvictionSettings("full", reserve=False)) as live:
        results = list(live.generate(preempting_requests()))
        assert live.stats().num_preemptions > 0
        assert sum(result.eviction.num_preemptions for result in results) == live.stats().num_preemptions
        assert [len(result.token_ids) for result in results] == [300] * 6


@pytest.mark.parametrize("reserve", [True, False])
def test_eviction_lets_all_run_at_once_without_preemption(tiny_model, reserve):
    """Six requests of at most 64 + 32 resident tokens fit into the pool that full cache overfills."""
    small = EngineShape(
        model=str(tiny_model), dtype="float32", max_model_len=600, block_size=BLOCK, kv_cache_gib=0.05,
        num_kv_blocks=SMALL_POOL,
    )  # fmt: skip
    with live_engine(small, EvictionSettings("paged_eviction", budget=64, reserve=reserve)) as live:
        results = list(live.generate(preempting_requests()))
        stats = live.stats()
    assert stats.num_preemptions == 0
    assert stats.peak_blocks <= 6 * (64 // BLOCK + 1)
    assert max(result.eviction.peak_resident_tokens for result in results) == 64 + BLOCK
