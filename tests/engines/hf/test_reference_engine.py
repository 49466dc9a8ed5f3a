"""When generation ends, what is refused, and the engine around it."""

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from harness.engines.contract import GenerationRequest
from harness.engines.hf.engine import ReferenceEngine
from harness.engines.hf.generate import run_reference
from harness.errors import UserError
from policies.registry import build_policy
from tests.tiny_llama import random_prompt, save_tiny_llama, tiny_llama

BLOCK = 8
FULL = build_policy("full", budget=None, block_size=BLOCK)
STREAMING = build_policy("streaming_llm", budget=32, block_size=BLOCK)
PROMPT = random_prompt(50)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return str(save_tiny_llama(tmp_path_factory.mktemp("tiny_llama")))


def test_a_stop_token_ends_the_text_and_is_not_part_of_it(model):
    full = run_reference(model, FULL, PROMPT, 10)
    stop = full.token_ids[4]
    trace = run_reference(model, FULL, PROMPT, 10, stop_token_ids=(stop,))
    assert trace.token_ids == full.token_ids[: full.token_ids.index(stop)]
    assert trace.finish_reason == "stop"
    assert len(trace.logits) == len(trace.steps) == len(trace.token_ids) + 1


def test_no_stop_token_is_chosen_before_the_minimum(model):
    stop = run_reference(model, FULL, PROMPT, 1).token_ids[0]
    trace = run_reference(model, FULL, PROMPT, 10, stop_token_ids=(stop,), min_new_tokens=3)
    assert len(trace.token_ids) >= 3
    assert stop not in trace.token_ids
    assert (trace.logits[:, stop] == float("-inf")).tolist()[:4] == [True, True, True, False]


def test_a_minimum_without_stop_tokens_changes_nothing(model):
    trace = run_reference(model, FULL, PROMPT, 5, min_new_tokens=3)
    assert torch.equal(trace.logits, run_reference(model, FULL, PROMPT, 5).logits)


def test_ignore_eos_generates_exactly_the_maximum(model):
    full = run_reference(model, FULL, PROMPT, 10)
    trace = run_reference(model, FULL, PROMPT, 10, stop_token_ids=full.token_ids, ignore_eos=True)
    assert trace.token_ids == full.token_ids
    assert trace.finish_reason == "length"


def test_nothing_is_evicted_once_the_last_token_is_chosen(model):
    assert run_reference(model, STREAMING, PROMPT, 1).decisions == []
    assert len(run_reference(model, STREAMING, PROMPT, 2).decisions) == 1


def test_margins_are_the_gap_between_the_two_best(model):
    trace = run_reference(model, FULL, PROMPT, 3)
    ordered = trace.logits.sort(descending=True).values
    assert torch.equal(trace.margins(), ordered[:, 0] - ordered[:, 1])


def test_the_model_attends_as_before_after_a_run(model):
    model.set_attn_implementation("eager")
    run_reference(model, STREAMING, PROMPT, 2)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(("prompt", "max_new_tokens"), [([], 5), ([7], 0)])
def test_requests_without_work_are_refused(model, prompt, max_new_tokens):
    with pytest.raises(UserError, match="cannot be continued"):
        run_reference(model, FULL, prompt, max_new_tokens)


def test_sliding_window_models_are_refused():
    config = MistralConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=16,
    )
    with pytest.raises(UserError, match="sliding_window=16"):
        run_reference(MistralForCausalLM(config).eval(), FULL, PROMPT, 1)


def test_engine_answers_each_request_as_if_alone(model, model_path):
    prompts = [random_prompt(length, seed=length) for length in (50, 20, 75)]
    engine = ReferenceEngine(model_path, STREAMING)
    results = list(engine.generate(GenerationRequest(str(i), prompt, 12) for i, prompt in enumerate(prompts)))
    assert [result.request_id for result in results] == ["0", "1", "2"]
    for result, prompt in zip(results, prompts, strict=True):
        assert result.token_ids == run_reference(model, STREAMING, prompt, 12).token_ids
        assert result.num_prompt_tokens == len(prompt)
        assert result.finish_reason == "length"
        assert 0 < result.ttft_s <= result.e2e_s


def test_engine_passes_every_setting_of_a_request_on(model, model_path):
    tokens = run_reference(model, FULL, PROMPT, 10).token_ids
    requests = [
        GenerationRequest("stop", PROMPT, 10, stop_token_ids=(tokens[0],)),
        GenerationRequest("minimum", PROMPT, 10, stop_token_ids=(tokens[0],), min_new_tokens=2),
        GenerationRequest("ignore", PROMPT, 10, stop_token_ids=(tokens[0],), ignore_eos=True),
    ]
    stop, minimum, ignore = ReferenceEngine(model_path).generate(requests)
    assert (stop.token_ids, stop.finish_reason) == ([], "stop")
    assert len(minimum.token_ids) >= 2
    assert (ignore.token_ids, ignore.finish_reason) == (tokens, "length")


def test_engine_counts_evictions_and_blocks(model_path):
    engine = ReferenceEngine(model_path, STREAMING)
    long, short = engine.generate([GenerationRequest("long", PROMPT, 4), GenerationRequest("short", PROMPT[:9], 2)])
    assert (long.eviction.num_evictions, long.eviction.num_evicted_tokens) == (3, 20)
    assert (long.eviction.peak_resident_tokens, long.eviction.final_resident_tokens) == (50, 33)
    assert (long.eviction.peak_blocks, short.eviction.peak_blocks) == (7, 2)
    assert short.eviction.num_evictions == 0
    stats = engine.stats()
    assert [sample.blocks for sample in stats.block_usage] == [7, 5, 5, 5, 2, 2]
    assert [sample.t_s for sample in stats.block_usage] == sorted(sample.t_s for sample in stats.block_usage)
    assert stats.block_usage[0].t_s == 0
    assert (stats.num_steps, stats.num_evictions, stats.num_evicted_tokens) == (6, 3, 20)
    assert (stats.num_blocks, stats.peak_blocks, stats.free_blocks_at_end) == (7, 7, 7)
    times = [sample.t_s for sample in stats.block_usage]
    weighted = [blocks * (end - begin) for blocks, begin, end in zip([7, 5, 5, 5, 2], times, times[1:], strict=False)]
    assert stats.mean_blocks == pytest.approx(sum(weighted) / times[-1])
    assert stats.bytes_per_block == 3 * 2 * 8 * (32 + 32) * 4
    assert stats.eviction_time_s > 0


def test_engine_keeps_everything_without_a_policy(model_path):
    engine = ReferenceEngine(model_path)
    (result,) = engine.generate([GenerationRequest("a", PROMPT, 5)])
    assert (result.eviction.num_evictions, result.eviction.final_resident_tokens) == (0, 54)
    assert engine.stats().peak_blocks == 2
    engine.close()
    assert engine.stats().num_steps == 5


def test_a_model_that_cannot_be_loaded_is_named(tmp_path):
    with pytest.raises(UserError, match=f"model.path={tmp_path} cannot be loaded"):
        ReferenceEngine(str(tmp_path))
