"""The plugin gives the same answers however the engine is run."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.engines.contract import GenerationRequest
from harness.engines.vllm.arguments import plugin_arguments, stock_arguments
from harness.engines.vllm.llm import sampling_params
from harness.engines.vllm.settings import EvictionSettings
from tests.engines.vllm.live import make_asynchronous, run_live, scheduler_of
from tests.policy_names import EQUAL
from tests.tiny_llama import random_prompt

ROOT = Path(__file__).resolve().parents[3]
LENGTHS = (20, 64, 65, 100, 150, 200, 250, 300, 310, 333, 350, 400, 31, 32, 33, 500)


@pytest.fixture(scope="module")
def requests():
    return [GenerationRequest(f"r{n}", random_prompt(n, n), 50 + n % 40, (2,), ignore_eos=n % 3 > 0) for n in LENGTHS]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("paged_eviction_literal", {}, marks=pytest.mark.parity),
        ("paged_eviction_literal", {"prefill": "chunked", "prefill_chunk": 64}),
        ("h2o", {}),
    ],
    ids=str,
)
def test_sixteen_mixed_requests_together_answer_as_one_at_a_time(shape, requests, name, options):
    settings = EvictionSettings(name, budget=64, options=options)
    together = run_live(replace(shape, max_num_seqs=16), settings, requests)
    alone = run_live(replace(shape, max_num_seqs=1), settings, requests)
    assert together.texts() == alone.texts()
    assert together.decisions == alone.decisions


@pytest.mark.parametrize("chunk", [100, *(pytest.param(chunk, marks=pytest.mark.parity) for chunk in (32, 512))])
def test_how_vllm_chunks_the_prefill_does_not_matter(shape, requests, chunk):
    settings = EvictionSettings("snapkv", budget=64, options={"window": 16})
    whole = run_live(shape, settings, requests)
    chunked = run_live(replace(shape, max_num_batched_tokens=chunk, max_num_seqs=8), settings, requests)
    assert chunked.texts() == whole.texts()


def run_asynchronously(shape, settings, requests):
    """Texts, and how many tokens were evicted, of an engine whose steps overlap."""
    arguments = stock_arguments(shape) | plugin_arguments(settings, asynchronous=False)
    engine = make_asynchronous(
        arguments | {"scheduler_cls": "harness.engines.vllm.scheduler.AsyncEvictionScheduler", "async_scheduling": None}
    )
    try:
        assert engine.engine_core.engine_core.batch_queue is not None, "steps overlap"
        for request in requests:
            engine.add_request(
                request.request_id, {"prompt_token_ids": request.prompt_token_ids}, sampling_params(request)
            )
        texts, evicted = {}, 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    tokens = list(output.outputs[0].token_ids)
                    texts[output.request_id] = tokens[:-1] if output.outputs[0].finish_reason == "stop" else tokens
                    evicted += output.kv_transfer_params["kv_eviction"]["num_evicted_tokens"]
        pool = scheduler_of(engine).kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    finally:
        engine.engine_core.shutdown()
    return texts, evicted


def test_asynchronous_scheduling_gives_the_same_text(shape, requests):
    settings = EvictionSettings("paged_eviction", budget=64)
    expected = run_live(shape, settings, requests)
    texts, evicted = run_asynchronously(shape, settings, requests)
    assert texts == expected.texts()
    assert evicted >= expected.stats.num_evicted_tokens


OTHER_PROCESS = """
import json, sys
from harness.engines.vllm.environment import prepare_environment
prepare_environment(in_process=False)
from harness.engines.vllm.arguments import EngineShape
from harness.engines.vllm.llm import VllmEngine
from harness.engines.vllm.settings import EvictionSettings
from harness.engines.contract import GenerationRequest

if __name__ == "__main__":
    job = json.load(sys.stdin)
    engine = VllmEngine(EngineShape(**job["shape"]), EvictionSettings(**job["settings"]))
    results = {}
    for result in engine.generate(GenerationRequest(**request) for request in job["requests"]):
        results[result.request_id] = result.token_ids
        stats = engine.stats()  # a run measures between steps too
    engine.close()
    print(json.dumps({"texts": results, "evicted": stats.num_evicted_tokens, "free": stats.free_blocks_at_end}))
"""


def run_in_other_processes(tmp_path, shape, settings, requests):
    """Run with the engine core in a process of its own, and the workers in theirs."""
    import json
    from dataclasses import asdict

    script = tmp_path / "other_process.py"
    script.write_text(OTHER_PROCESS)
    job = {"shape": asdict(shape), "settings": asdict(settings), "requests": [asdict(r) for r in requests]}
    result = subprocess.run(
        [sys.executable, str(script)], input=json.dumps(job), capture_output=True, text=True, timeout=500,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.strip().splitlines()[-1])


OWN_PROCESS, TWO_RANKS = 1, 2
SMALL = {"lagkv": {"lag": 24}, "cascading": {"protect_first": 4}}
EVICTING = [name for name in EQUAL if name != "full"]


@pytest.mark.parity
@pytest.mark.parametrize(
    ("name", "num_ranks"), [("paged_eviction", OWN_PROCESS), *((name, TWO_RANKS) for name in EVICTING)]
)
def test_other_processes_and_two_ranks_give_the_same_text(shape, requests, tmp_path, name, num_ranks):
    """A choice shared by all heads averages its scores over the ranks; the others choose per head on each rank."""
    settings = EvictionSettings(name, budget=64, options=SMALL.get(name, {}))
    expected = run_live(shape, settings, requests)
    found = run_in_other_processes(tmp_path, replace(shape, tensor_parallel_size=num_ranks), settings, requests)
    assert found["texts"] == expected.texts()
    assert found["evicted"] == expected.stats.num_evicted_tokens
    assert found["free"] == expected.stats.num_blocks - 1
