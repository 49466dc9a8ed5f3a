"""Keeping everything is free: the same tokens as stock vLLM."""

import pytest

from harness.engines.contract import GenerationRequest
from harness.engines.vllm.settings import EvictionSettings
from tests.engines.vllm.live import run_live, run_stock
from tests.tiny_llama import random_prompt

LENGTHS = (1, 31, 32, 33, 100, 257, 600, 700)


@pytest.fixture(scope="module")
def requests():
    return [GenerationRequest(f"r{n}", random_prompt(n, seed=n), 60, ignore_eos=True) for n in LENGTHS]


@pytest.fixture(scope="module")
def stock(shape, requests):
    return run_stock(shape, requests)


@pytest.mark.parametrize("name", ["full", "paged_eviction", "streaming_llm"])
def test_a_budget_above_every_length_gives_the_tokens_of_stock_vllm(shape, requests, stock, name):
    run = run_live(shape, EvictionSettings(name, budget=None if name == "full" else 1024), requests)
    assert run.texts() == stock
    assert run.stats.num_evictions == 0


def test_a_tight_budget_changes_the_tokens(shape, requests, stock):
    """Otherwise the equality above would hold for a plugin that does nothing."""
    run = run_live(shape, EvictionSettings("paged_eviction", budget=64), requests)
    assert run.stats.num_evictions > 0
    assert run.texts() != stock
    for request in requests:
        assert run.texts()[request.request_id][0] == stock[request.request_id][0], (
            "the first token sees the whole prompt"
        )
