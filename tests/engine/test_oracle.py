"""vLLM with the plugin against the slow reference on a Hugging Face model: same positions kept, same text."""

import pytest

from harness.engine.settings import EvictionSettings
from harness.generation import GenerationRequest
from harness.reference.generate import run_reference
from tests.engine.live import run_live
from tests.tiny_llama import random_prompt, tiny_llama

BLOCK = 32
NUM_NEW_TOKENS = 70

CASES = [
    ("full", {}),
    ("paged_eviction", {}),
    ("paged_eviction", {"decode_scope": "global"}),
    ("paged_eviction", {"protect_first": 8, "protect_last": 16}),
    ("paged_eviction", {"prefill": "chunked", "prefill_chunk": 64}),
    ("streaming_llm", {}),
    ("streaming_llm", {"granularity": "block"}),
    ("streaming_llm", {"prefill": "chunked", "prefill_chunk": 96}),
]


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def prompts_around(budget):
    """Below, at and above the budget; far above; and not a multiple of the block."""
    lengths = (20, budget, budget + 1, budget + BLOCK, 333, 500)
    return [
        GenerationRequest(f"r{index}", random_prompt(length, seed=index), NUM_NEW_TOKENS, ignore_eos=True)
        for index, length in enumerate(lengths)
    ]


def assert_equal_to_reference(run, request, policy, model):
    trace = run_reference(model, policy, request.prompt_token_ids, request.max_new_tokens, ignore_eos=True)
    expected = [(d.phase, d.num_resident_before, d.num_keep, d.kept) for d in trace.decisions]
    found = [
        (d.phase, d.num_before, d.num_keep, d.kept if policy.per_head else [heads * 2 for heads in d.kept])
        for d in run.decisions.get(request.request_id, [])
    ]
    assert found == expected
    assert run.results[request.request_id].token_ids == trace.token_ids
    record = run.results[request.request_id].eviction
    assert record.num_evictions == len(expected)
    assert record.final_resident_tokens == len(trace.resident_positions[0][0])


@pytest.mark.parametrize("budget", [2 * BLOCK, 8 * BLOCK])
@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: str(value))
def test_kept_positions_and_text_equal_the_reference(shape, model, name, options, budget):
    settings = EvictionSettings(name, budget=None if name == "full" else budget, options=options)
    requests = prompts_around(budget)
    run = run_live(shape, settings, requests)
    for request in requests:
        assert_equal_to_reference(run, request, settings.build_policy(BLOCK), model)
    assert run.stats.free_blocks_at_end == run.stats.num_blocks - 1
