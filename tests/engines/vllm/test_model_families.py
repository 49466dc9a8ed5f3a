"""Models with plain full attention, each with tiny random weights: vLLM with eviction answers as the reference does."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from harness.engines.contract import GenerationRequest
from harness.engines.hf.engine import ReferenceEngine
from harness.engines.vllm.settings import EvictionSettings
from harness.engines.vllm.windows import with_full_cache
from policies import build_policy
from tests.engines.vllm.live import run_live, run_stock
from tests.tiny_llama import VOCAB_SIZE, random_prompt

BUDGET, BLOCK, CONTEXT, SHORT_WINDOW = 64, 32, 512, 96
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
FAMILIES = {
    "qwen2.5": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral with a window that never slides": MistralConfig(**SIZES, sliding_window=CONTEXT),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layers=[1, 0], use_sliding_window=False),
}
REQUESTS = [GenerationRequest(f"r{n}", random_prompt(n, n), 12, ignore_eos=True) for n in (40, 100, 200)]


def save(config: PretrainedConfig, folder) -> str:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).float().eval().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_answers_as_the_reference(family, shape, tmp_path):
    without_window = copy.deepcopy(FAMILIES[family])
    without_window.sliding_window = None  # the reference computes none
    policy = build_policy("inverse_key_l2", budget=BUDGET, block_size=BLOCK)
    reference = ReferenceEngine(save(without_window, tmp_path / "reference"), policy, "float32")  # vLLM patches SmolLM3
    expected = {result.request_id: result.token_ids for result in reference.generate(REQUESTS)}
    model = save(FAMILIES[family], tmp_path / "model")
    settings = EvictionSettings("inverse_key_l2", budget=BUDGET)
    ours = run_live(replace(shape, model=model, max_model_len=CONTEXT), settings, REQUESTS)
    assert ours.texts() == expected
    assert ours.stats.num_evictions > 0


def test_a_model_whose_windows_slide_runs_with_the_full_cache_as_stock_does(shape, tmp_path):
    model = save(MistralConfig(**SIZES, sliding_window=SHORT_WINDOW), tmp_path)
    slides = replace(shape, model=model, max_model_len=CONTEXT)
    assert run_live(slides, EvictionSettings("full", budget=None), REQUESTS).texts() == run_stock(slides, REQUESTS)
    with pytest.raises(ValueError, match=r"SlidingWindowSpec\(sliding_window=96\)\)?.*policy=full"):
        run_live(slides, EvictionSettings("inverse_key_l2", budget=BUDGET), REQUESTS)


def test_only_windows_that_change_nothing_get_the_cache_of_full_attention():
    shape = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    specs = {"full": FullAttentionSpec(**shape), "window": SlidingWindowSpec(**shape, sliding_window=128)}
    plain = {"full": FullAttentionSpec(**shape), "window": FullAttentionSpec(**shape)}
    assert with_full_cache(specs, keeps_everything=False, max_model_len=129) == specs
    assert with_full_cache(specs, keeps_everything=False, max_model_len=128) == plain
    assert with_full_cache(specs, keeps_everything=True, max_model_len=4096) == plain
