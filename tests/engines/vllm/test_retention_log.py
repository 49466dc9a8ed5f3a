"""`retention.jsonl` of a real engine: what is left of every prompt, and at the end after the last eviction."""

from dataclasses import replace

import pytest

from harness.engines.contract import GenerationRequest
from harness.engines.vllm.settings import EvictionSettings
from harness.retention import read_retention
from tests.engines.vllm.live import run_live
from tests.tiny_llama import random_prompt

BUDGET, SINKS = 64, 4
REQUESTS = {  # name: (prompt tokens, answer tokens)
    "fits": (40, 10),
    "fits-then-grows": (40, 50),
    "exact": (64, 20),
    "long": (200, 30),
    "long-one-token": (200, 1),
    "fits-one-token": (50, 1),
}


def window(num_tokens: int) -> list[int]:
    """What StreamingLLM keeps of the first `num_tokens` positions."""
    if num_tokens <= BUDGET:
        return list(range(num_tokens))
    return [*range(SINKS), *range(num_tokens - BUDGET + SINKS, num_tokens)]


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "overlapping steps"])
def found(request, shape, tmp_path_factory):
    folder = tmp_path_factory.mktemp("retention")
    settings = EvictionSettings("streaming_llm", budget=BUDGET, retention=str(folder))
    requests = [
        GenerationRequest(name, random_prompt(prompt, prompt), answer, ignore_eos=True)
        for name, (prompt, answer) in REQUESTS.items()
    ]
    run_live(replace(shape, async_scheduling=request.param), settings, requests)
    return read_retention(folder)


def test_every_sample_has_both_moments_once(found):
    assert sorted((record.sample_id, record.phase) for record in found) == sorted(
        (name, phase) for name in REQUESTS for phase in ("prefill_end", "end")
    )


def test_the_positions_are_those_of_the_policy_and_never_more_than_its_budget(found):
    for record in found:
        prompt, answer = REQUESTS[record.sample_id]
        num_tokens = prompt if record.phase == "prefill_end" else prompt + answer - 1
        assert record.num_prompt_tokens == prompt
        for layer in record.layers:
            assert all(positions == window(num_tokens) for positions in layer), (record.sample_id, record.phase)
