"""Prompts with a common part are computed once; evictions never touch what others share or may find again."""

import random
from dataclasses import replace

import pytest
from vllm import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from harness.engines.contract import GenerationRequest
from harness.engines.vllm.arguments import eviction_arguments
from harness.engines.vllm.llm import sampling_params
from harness.engines.vllm.refusals import refuse_settings
from harness.engines.vllm.settings import EvictionSettings
from tests.engines.vllm.live import assert_blocks_match_lengths, runner_of, scheduler_of
from tests.engines.vllm.schedulers import add_request, answer, build_scheduler
from tests.tiny_llama import random_prompt

SYSTEM = random_prompt(200, seed=7)
QUICK = ("keydiff", "snapkv")
SETTINGS = [
    ("keydiff", {}),
    ("snapkv", {"window": 16}),
    ("paged_eviction_literal", {}),
    ("streaming_llm", {"position_mode": "cache"}),
    ("inverse_key_l2", {"granularity": "block"}),
    ("chunkkv", {"window": 24}),
    ("tova", {}),
    ("snapkv", {"window": 8, "think": 0.5, "think_window": 24}),
]


def requests_of(wave):
    """Six prompts that begin alike."""
    return [
        GenerationRequest(f"w{wave}r{n}", SYSTEM + random_prompt(10 + 17 * n, seed=n), 45, ignore_eos=True)
        for n in range(6)
    ]


def answers(shape, settings, enable, num_waves=2):
    """Texts and cached tokens by request, preemptions; the requests of a wave together, one wave after the other."""
    arguments = eviction_arguments(shape, settings) | {"enable_prefix_caching": enable}
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    scheduler, runner = scheduler_of(engine), runner_of(engine)
    texts, cached = {}, {}
    try:
        for wave in range(num_waves):
            for request in requests_of(wave):
                prompt = {"prompt_token_ids": request.prompt_token_ids}
                engine.add_request(request.request_id, prompt, sampling_params(request))
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        texts[output.request_id] = list(output.outputs[0].token_ids)
                        cached[output.request_id] = output.num_cached_tokens
                if not enable:
                    assert_blocks_match_lengths(scheduler, runner, runner.eviction_policy)
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        return texts, cached, scheduler._totals
    finally:
        engine.engine_core.shutdown()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(*one, marks=[] if one[0] in QUICK and "think" not in one[1] else pytest.mark.parity)
        for one in SETTINGS
    ],
)
def test_a_common_part_is_computed_once_and_the_answers_stay(shape, name, options):
    """The second wave asks the same again; the queries that a policy watches are computed anew each time."""
    settings = EvictionSettings(name, 64, options, reserve=name == "snapkv")
    expected, nothing, totals = answers(shape, settings, enable=False)
    texts, cached, same = answers(shape, settings, enable=True)
    assert texts == expected
    assert set(nothing.values()) == {0}
    num_anew = max(1, settings.build_policy(32).query_window)
    for request in requests_of(1):
        found = (len(request.prompt_token_ids) - num_anew) // 32 * 32
        assert cached[request.request_id] == found, "found again after the evictions of the first wave"
    assert totals.num_evictions == same.num_evictions >= 12


def test_a_pool_with_no_room_for_copies_still_answers_and_loses_no_block(shape):
    """13 blocks: one such request and little more."""
    small = replace(shape, max_model_len=384, num_kv_blocks=14, max_num_seqs=4)
    settings = EvictionSettings("keydiff", 64, reserve=False)
    texts, _, totals = answers(small, settings, enable=True)
    assert {len(tokens) for tokens in texts.values()} == {45}
    assert totals.num_evictions >= 12


@pytest.mark.parametrize("name", ["keydiff", "snapkv"])
@pytest.mark.parametrize("seed", range(3))
def test_a_promise_holds_where_requests_hold_blocks_in_common(shape, name, seed):
    """120 prompts that begin alike, on a pool for about six of them: none is preempted, and the pool is used."""
    rng = random.Random(seed)
    crowd = replace(shape, max_num_seqs=64, max_num_batched_tokens=2048)
    scheduler = build_scheduler(crowd, EvictionSettings(name, 64, reserve=True), num_blocks=60, prefix_caching=True)
    for index in range(120):
        common = SYSTEM[: rng.choice([0, 96, 200])]
        prompt = common + random_prompt(rng.randint(1, 150), seed=index)
        add_request(scheduler, f"r{index}", 0, rng.randint(1, 200), prompt)
    most_shared = most_running = 0
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        assert not output.preempted_req_ids
        most_running = max(most_running, len(scheduler.running))
        owners = [block.ref_cnt for block in scheduler.kv_cache_manager.block_pool.blocks[1:]]
        most_shared = max(most_shared, *owners)
        answer(scheduler, output)
    assert most_shared > 2
    assert most_running > 6
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@pytest.mark.parametrize(
    ("name", "options", "reserve", "message"),
    [
        ("h2o", {}, False, "policy=h2o watches attention_mass of the whole prompt"),
        ("expected_attention", {}, False, "policy=expected_attention watches query_moments of the whole prompt"),
        ("keydiff", {"prefill": "chunked", "prefill_chunk": 64}, False, "would move the borders of prefill=chunked"),
        ("ada_kv", {"window": 16}, False, "policy=ada_kv gives layers and heads pages of their own"),
        ("full", {}, True, None),
        ("keydiff", {}, True, None),
        ("snapkv", {"window": 16}, False, None),
    ],
)
def test_where_prefix_caching_cannot_be(shape, name, options, reserve, message):
    settings = EvictionSettings(name, None if name == "full" else 64, options, reserve=reserve)
    config = EngineArgs(**eviction_arguments(shape, settings) | {"enable_prefix_caching": True}).create_engine_config()
    if message is None:
        refuse_settings(config, settings.build_policy(32), reserve)
    else:
        with pytest.raises(ValueError, match=f"prefix caching is on, but .*{message}"):
            refuse_settings(config, settings.build_policy(32), reserve)
