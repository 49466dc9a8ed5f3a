"""What eviction cannot live with is refused by name; each case below would otherwise give wrong text or no answer."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm import EngineArgs
from vllm.config import SchedulerConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, SlidingWindowSpec

from harness.engines.contract import GenerationRequest
from harness.engines.vllm.arguments import stock_arguments
from harness.engines.vllm.llm import sampling_params
from harness.engines.vllm.plugin import configure
from harness.engines.vllm.refusals import (
    refuse_chunks,
    refuse_cpu_kernels,
    refuse_layers,
    refuse_rotary,
    refuse_settings,
)
from harness.engines.vllm.settings import CONFIG_KEY, EvictionSettings
from policies import build_policy
from tests.engines.vllm.live import live_engine, scheduler_of
from tests.tiny_llama import random_prompt

PLAIN = FullAttentionSpec(block_size=32, num_kv_heads=8, head_size=64, dtype=torch.float32)
HEAD_SIZE = 64
WATCHING = build_policy("h2o", budget=64, block_size=32)


def test_plain_layers_are_accepted():
    refuse_layers({"0": PLAIN, "1": PLAIN})
    refuse_layers({"0": replace(PLAIN, num_head_slots=8)})


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (replace(PLAIN, num_kv_heads=4), r"one KV geometry; this model's have .*\(4, 64, 32.*\(8, 64, 32"),
        (replace(PLAIN, num_head_slots=2), "packs keys and values of layer second in a way of its own"),
        (replace(PLAIN, state_content_bytes=512), "packs keys and values"),
        (replace(PLAIN, head_size_v=32), "packs keys and values"),
        (replace(PLAIN, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR), r"layer second is quantised \(FP8_PER_TENSOR\)"),
        (replace(PLAIN, sliding_window=128), r"layer second has FullAttentionSpec\(sliding_window=128\)"),
        (replace(PLAIN, non_causal=True), "full causal attention only"),
        (
            SlidingWindowSpec(block_size=32, num_kv_heads=8, head_size=64, dtype=torch.float32, sliding_window=64),
            r"SlidingWindowSpec\(sliding_window=64\)",
        ),
    ],
)
def test_layers_of_another_kind_are_refused(second, message):
    with pytest.raises(ValueError, match=message):
        refuse_layers({"first": PLAIN, "second": second})


@pytest.mark.parametrize("kernels", ["amx", "neon", "vec16"])
def test_cpu_kernels_with_a_cache_of_their_own_are_refused(kernels):
    refuse_cpu_kernels([SimpleNamespace(isa="vec")] * 2)
    with pytest.raises(ValueError, match=f"its {kernels} kernels .* Use dtype=float32"):
        refuse_cpu_kernels([SimpleNamespace(isa="vec"), SimpleNamespace(isa=kernels)])


def rope(is_neox_style=True, **parameters):
    with set_current_vllm_config(VllmConfig()):
        return get_rope(HEAD_SIZE, 1024, is_neox_style, {"rope_theta": 10000.0, "rope_type": "default"} | parameters)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize("parameters", [{}, LLAMA3])
def test_llamas_rotary_embeddings_are_accepted(parameters):
    refuse_rotary(rope(**parameters), HEAD_SIZE)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (YARN, "YaRNScalingRotaryEmbedding"),
        ({"rope_type": "linear", "factor": 2.0}, "LinearScalingRotaryEmbedding"),
        ({"is_neox_style": False}, "is_neox_style=False"),
        ({"partial_rotary_factor": 0.5}, "rotary_dim=32 of 64"),
    ],
)
def test_other_rotary_embeddings_are_refused(parameters, message):
    with pytest.raises(ValueError, match=f"{message}.*Use another policy"):
        refuse_rotary(rope(**parameters), HEAD_SIZE)


@pytest.mark.parametrize(
    ("settings", "is_multimodal", "message"),
    [
        ({"max_num_batched_tokens": 256}, False, "prefill_chunk=512 cannot be scheduled whole in steps of 256 tokens"),
        ({"max_num_scheduled_tokens": 256}, False, "in steps of 256 tokens; lower it or raise max_num_batched_tokens"),
        ({"long_prefill_token_threshold": 256}, False, "long_prefill_token_threshold=256; use 0 or 512"),
        ({}, True, "images cut prompts; use prefill=after"),
    ],
)
def test_a_chunk_that_would_wait_for_ever_is_refused(settings, is_multimodal, message):
    config = SchedulerConfig(
        **{"max_num_batched_tokens": 2048} | settings, max_model_len=1024, is_encoder_decoder=False
    )
    policies = [
        build_policy("paged_eviction", budget=64, block_size=32, options={"prefill": prefill, "prefill_chunk": 512})
        for prefill in ("after", "chunked")
    ]
    refuse_chunks(policies[0], config, is_multimodal)
    with pytest.raises(ValueError, match=message):
        refuse_chunks(policies[1], config, is_multimodal)


def test_admission_by_pieces_is_refused_to_reservations(shape):
    arguments = EngineArgs(**stock_arguments(shape), scheduler_reserve_full_isl=False)
    config = arguments.create_engine_config()
    refuse_settings(config, WATCHING, reserve=False)
    with pytest.raises(ValueError, match="leave out --no-scheduler-reserve-full-isl or set reserve to false"):
        refuse_settings(config, WATCHING, reserve=True)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"enable_prefix_caching": True}, "prefix caching is on"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2; use 1"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8 is quantised; use kv_cache_dtype=auto"),
    ],
)
def test_settings_that_eviction_cannot_live_with_are_refused(shape, setting, message):
    config = EngineArgs(**stock_arguments(shape) | setting).create_engine_config()
    with pytest.raises(ValueError, match=message):
        refuse_settings(config, WATCHING, reserve=True)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size=2; use 1, or one server each"),
        ({"_api_process_count": 2}, "api_server_count=2"),
        ({"scheduler_cls": "my.Scheduler"}, "remove scheduler_cls=my.Scheduler"),
    ],
)
def test_what_the_server_hides_from_the_engine_is_refused_before(shape, setting, message):
    settings = {CONFIG_KEY: {"policy": "paged_eviction", "budget": 64}}
    with pytest.raises(ValueError, match=message):
        configure(EngineArgs(model=shape.model, additional_config=settings, **setting))


def test_a_request_that_is_aborted_after_a_reset_harms_no_other(shape):
    """A paused server resets its caches and so preempts; the client may go away before the next step."""
    with live_engine(shape, EvictionSettings("paged_eviction", budget=64)) as engine:
        llm, requests = engine.llm_engine, [GenerationRequest(n, random_prompt(100, 1), 20) for n in "ab"]
        for request in requests:
            llm.add_request(
                request.request_id, {"prompt_token_ids": request.prompt_token_ids}, sampling_params(request)
            )
        llm.step()
        scheduler_of(llm).reset_prefix_cache(reset_running_requests=True)
        llm.abort_request(["a"])
        texts = {}
        while llm.has_unfinished_requests():
            texts |= {output.request_id: output.outputs[0].token_ids for output in llm.step() if output.finished}
        pool = scheduler_of(llm).kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert set(texts) == {"b"}
        assert not scheduler_of(llm)._states
