"""A budget that is a share: prompts of unlike lengths in one batch, each as under a budget of its own."""

from dataclasses import replace

import pytest

from harness.engines.contract import GenerationRequest
from harness.engines.hf.generate import run_reference
from harness.engines.vllm.settings import EvictionSettings
from policies import build_policy
from tests.engines.vllm.live import run_live
from tests.engines.vllm.test_oracle import BLOCK, NUM_NEW_TOKENS, follows_reference
from tests.engines.vllm.test_ragged_engine import assert_one_page_moved
from tests.policy_names import WHOLE
from tests.tiny_llama import random_prompt, save_tiny_llama, tiny_llama

BUDGETS = {
    0.25: {20: 64, 128: 64, 300: 96, 333: 96, 500: 128, 640: 160},
    0.5: {20: 64, 128: 64, 300: 160, 333: 192, 500: 256, 640: 320},
}
"""Share -> prompt tokens -> budget, by hand: whole blocks of 32, two at least."""
REQUESTS = [
    GenerationRequest(f"r{length}", random_prompt(length, seed=length), NUM_NEW_TOKENS, ignore_eos=True)
    for length in BUDGETS[0.25]
]


def fixed_policies(name, share, options):
    """By request, the policy with its budget as a plain number of tokens."""
    return {
        request.request_id: build_policy(
            name, budget=BUDGETS[share][len(request.prompt_token_ids)], block_size=BLOCK, options=options
        )
        for request in REQUESTS
    }


@pytest.mark.parametrize(
    ("name", "share", "options"),
    [
        ("h2o", 0.25, {}),
        ("paged_eviction", 0.5, {}),
        pytest.param("snapkv", 0.5, {"window": 8, "think": 0.5, "think_window": 24}, marks=pytest.mark.parity),
        pytest.param("cascading", 0.25, {"protect_first": 4}, marks=pytest.mark.parity),
        pytest.param("elastic_cache", 0.5, {}, marks=pytest.mark.parity),
        pytest.param("keydiff", 0.25, {"prefill": "chunked", "prefill_chunk": 128}, marks=pytest.mark.parity),
        pytest.param("inverse_key_l2", 0.5, {}, marks=pytest.mark.parity),
    ],
    ids=str,
)
def test_each_prompt_keeps_what_a_budget_of_its_own_keeps(shape, name, share, options):
    run = run_live(shape, EvictionSettings(name, share, options), REQUESTS)
    policies, model = fixed_policies(name, share, options), tiny_llama()
    followed = [follows_reference(run, request, policies[request.request_id], model) for request in REQUESTS]
    assert followed.count(False) <= 2, "near-ties are rare"
    assert run.stats.free_blocks_at_end == run.stats.num_blocks - 1


@pytest.mark.parametrize(
    ("name", "share", "options"),
    [
        ("ada_kv", 0.25, {"window": 8}),
        ("head_classes", 0.25, {"heads": WHOLE}),
        pytest.param("kv_compress", 0.5, {"protect_last": 16}, marks=pytest.mark.parity),
        pytest.param("inverse_key_l2", 0.5, {"skip_layers": 1}, marks=pytest.mark.parity),
    ],
    ids=str,
)
def test_so_it_is_where_layers_and_heads_keep_unequally_many(shape, tmp_path, name, share, options):
    uneven = replace(shape, model=str(save_tiny_llama(tmp_path / "uneven", uneven=True)))
    run = run_live(uneven, EvictionSettings(name, share, options), REQUESTS)
    policies, model, parted = fixed_policies(name, share, options), tiny_llama(uneven=True), 0
    for request in REQUESTS:
        policy = policies[request.request_id]
        trace = run_reference(model, policy, request.prompt_token_ids, request.max_new_tokens, ignore_eos=True)
        found = [decision.kept for decision in run.decisions.get(request.request_id, [])]
        expected = [decision.kept for decision in trace.decisions]
        assert len(found) == len(expected)
        if found == expected:
            assert run.results[request.request_id].token_ids == trace.token_ids
            continue
        assert_one_page_moved(*next(pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]))
        parted += 1
    assert parted <= 2, "near-ties are rare"
    assert run.stats.free_blocks_at_end == run.stats.num_blocks - 1
