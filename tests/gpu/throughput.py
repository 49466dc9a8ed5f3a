"""Tokens a second of one policy on a dummy-weight model of Llama-3.2-1B's geometry; prints JSON.

A process of its own, so that each policy has the whole device. Usage: python -m tests.gpu.throughput POLICY
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from transformers import LlamaConfig

from harness.engines.contract import GenerationRequest
from harness.engines.vllm.arguments import EngineShape
from harness.engines.vllm.llm import VllmEngine
from harness.engines.vllm.settings import EvictionSettings

BLOCK, BUDGET, PROMPT, NEW = 16, 512, 2048, 256
NUM_REQUESTS, POOL_TOKENS = 64, 32_768
GEOMETRY = LlamaConfig(
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131_072,
    rope_theta=500_000.0,
    tie_word_embeddings=True,
    architectures=["LlamaForCausalLM"],
    dtype="bfloat16",
)


def requests_of(label: str, count: int, num_new: int) -> list[GenerationRequest]:
    """Prompts of equal length and different tokens."""
    return [
        GenerationRequest(
            f"{label}{index}", [(index * 7919 + place) % 100_000 for place in range(PROMPT)], num_new, ignore_eos=True
        )
        for index in range(count)
    ]


def measure(name: str, model: str) -> dict[str, float]:
    """Run a warm-up, then all requests at once."""
    shape = EngineShape(
        model=model,
        dtype="bfloat16",
        load_format="dummy",
        max_model_len=PROMPT + NEW,
        block_size=BLOCK,
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=4 * PROMPT,
        num_kv_blocks=POOL_TOKENS // BLOCK + 1,
        kv_cache_gib=1.5,
        enforce_eager=False,
        async_scheduling=True,
    )
    engine = VllmEngine(shape, EvictionSettings(name, budget=None if name == "full" else BUDGET))
    try:
        list(engine.generate(requests_of("warm", 4, 2 * BLOCK)))
        warm = engine.stats()
        start = time.perf_counter()
        results = list(engine.generate(requests_of("r", NUM_REQUESTS, NEW)))
        seconds = time.perf_counter() - start
        stats = engine.stats()
    finally:
        engine.close()
    return {
        "tokens_per_s": sum(len(result.token_ids) for result in results) / seconds,
        "evictions": stats.num_evictions - warm.num_evictions,
        "eviction_host_share": (stats.eviction_time_s - warm.eviction_time_s) / seconds,
        "preemptions": stats.num_preemptions,
    }


def main() -> None:
    """Write the configuration, measure, print."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(GEOMETRY.to_json_string(), encoding="utf-8")
        print(json.dumps(measure(sys.argv[1], folder)))


if __name__ == "__main__":
    main()
