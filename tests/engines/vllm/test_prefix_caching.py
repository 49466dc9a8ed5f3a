"""Prompts with a common part are computed once; evictions never touch what others share or may find again."""

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
from tests.tiny_llama import random_prompt

SYSTEM = random_prompt(200, seed=7)
WHOLE_BLOCKS = 192
SETTINGS = [
    ("keydiff", {}),
    ("paged_eviction_literal", {}),
    ("streaming_llm", {"position_mode": "cache"}),
    ("inverse_key_l2", {"granularity": "block"}),
]


def requests_of(wave):
    """Six prompts that begin alike."""
    return [
        GenerationRequest(f"w{wave}r{n}", SYSTEM + random_prompt(10 + 17 * n, seed=n), 45, ignore_eos=True)
        for n in range(6)
    ]


def answers(shape, settings, enable, num_waves=2):
    """Texts and cached tokens by request, preemptions; the requests of a wave together, one wave after the other."""
    arguments = eviction_arguments(shape, replace(settings, reserve=False)) | {"enable_prefix_caching": enable}
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
    [SETTINGS[0], *(pytest.param(*setting, marks=pytest.mark.parity) for setting in SETTINGS[1:])],
)
def test_a_common_part_is_computed_once_and_the_answers_stay(shape, name, options):
    settings = EvictionSettings(name, 64, options)
    expected, nothing, totals = answers(shape, settings, enable=False)
    texts, cached, same = answers(shape, settings, enable=True)
    assert texts == expected
    assert set(nothing.values()) == {0}
    assert all(cached[f"w1r{n}"] >= WHOLE_BLOCKS for n in range(6)), "found again after the evictions of the first wave"
    assert totals.num_evictions == same.num_evictions > 12


def test_a_pool_with_no_room_for_copies_still_answers_and_loses_no_block(shape):
    """13 blocks: one such request and little more."""
    small = replace(shape, max_model_len=384, num_kv_blocks=14, max_num_seqs=4)
    settings = EvictionSettings("keydiff", 64)
    texts, _, totals = answers(small, settings, enable=True)
    assert {len(tokens) for tokens in texts.values()} == {45}
    assert totals.num_evictions >= 12


@pytest.mark.parametrize(
    ("name", "options", "reserve", "message"),
    [
        ("h2o", {}, False, "policy=h2o watches attention_mass"),
        ("snapkv", {"window": 16}, False, "watches window_queries"),
        ("keydiff", {"prefill": "chunked", "prefill_chunk": 64}, False, "would move the borders of prefill=chunked"),
        ("keydiff", {}, True, "reserve=true promises blocks"),
        ("full", {}, True, None),
        ("keydiff", {}, False, None),
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
