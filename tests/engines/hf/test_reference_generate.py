"""The reference generates what transformers does, minus the evicted keys."""

from dataclasses import fields

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from harness.engines.hf.generate import run_reference
from harness.engines.hf.trace import ReferenceTrace
from policies.base import Phase, Policy
from policies.registry import build_policy, policy_class
from tests.engines.hf.hf_oracle import forwards, masked_forward
from tests.engines.hf.recorder import Recorder
from tests.policy_names import EQUAL
from tests.tiny_llama import random_prompt, tiny_llama

BLOCK = 8
BUDGET = 4 * BLOCK
FULL = build_policy("full", budget=None, block_size=BLOCK)
CHUNKED = {"prefill": "chunked", "prefill_chunk": 2 * BLOCK}
POLICIES = {
    "streaming_llm token": ("streaming_llm", {}),
    "streaming_llm block": ("streaming_llm", {"granularity": "block"}),
    "streaming_llm chunked": ("streaming_llm", CHUNKED),
    "streaming_llm block chunked": ("streaming_llm", {"granularity": "block", **CHUNKED}),
    "paged_eviction": ("paged_eviction", {}),
    "paged_eviction chunked": ("paged_eviction", CHUNKED),
    "paged_eviction literal": ("paged_eviction_literal", {}),
    "paged_eviction literal global": ("paged_eviction_literal", {"decode_scope": "global"}),
    "paged_eviction literal protected": ("paged_eviction_literal", {"protect_first": 4, "protect_last": 9}),
}
PROMPT = random_prompt(93)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama()


@pytest.fixture(params=[*POLICIES, "per head", "per head chunked"])
def policy(request) -> Policy:
    if request.param in POLICIES:
        name, options = POLICIES[request.param]
        return build_policy(name, budget=BUDGET, block_size=BLOCK, options=options)
    return Recorder(budget=BUDGET, block_size=BLOCK, **(CHUNKED if "chunked" in request.param else {}))


def chunk_of(policy: Policy) -> int:
    return policy.prefill_chunk if policy.prefill == "chunked" else len(PROMPT)


def greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    output = model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("seed", range(3))
def test_keeping_everything_equals_transformers_token_for_token(model, attention, seed):
    prompt = random_prompt(100 + 31 * seed, seed)
    trace = run_reference(model, FULL, prompt, 40, stop_token_ids=(2,))
    model.set_attn_implementation(attention)
    assert trace.token_ids + [2] * (trace.finish_reason == "stop") == greedy(model, prompt, 40)
    assert trace.decisions == []


@pytest.mark.parametrize(
    "other",
    [
        Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=1,
                head_dim=16,
                initializer_range=0.3,
            )
        ),
        GPTNeoXForCausalLM(
            GPTNeoXConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                initializer_range=0.3,
            )
        ),
    ],
    ids=["qwen3", "gpt_neox"],
)
def test_other_architectures_are_covered_too(other):
    other.eval()
    prompt = random_prompt(50)
    prompt = [token % 64 for token in prompt]
    expected = greedy(other, prompt, 20)
    assert run_reference(other, FULL, prompt, len(expected)).token_ids == expected


def test_a_budget_above_the_length_changes_nothing(model):
    generous = build_policy("paged_eviction", budget=16 * BLOCK, block_size=BLOCK)
    expected = run_reference(model, FULL, PROMPT, 16 * BLOCK - len(PROMPT))
    trace = run_reference(model, generous, PROMPT, 16 * BLOCK - len(PROMPT))
    assert torch.equal(trace.logits, expected.logits)


def test_logits_equal_transformers_masked_to_the_kept_keys(model, policy):
    trace = run_reference(model, policy, PROMPT, 30)
    assert len(trace.decisions) >= 3
    oracle = masked_forward(model, PROMPT, trace, chunk_of(policy))
    torch.testing.assert_close(trace.logits, oracle.logits[len(PROMPT) - 1 :], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name", [name for name in EQUAL if policy_class(name).evicts and not policy_class(name).rewrite_phases]
)
def test_every_built_in_policy_attends_to_its_kept_keys_only(model, name):
    small = {"window": BLOCK, "lag": BLOCK, "num_caches": 3}
    options = {field.name: small[field.name] for field in fields(policy_class(name)) if field.name in small}
    options |= {"protect_first": 4} if name == "cascading" else {}
    trace = run_reference(model, build_policy(name, budget=BUDGET, block_size=BLOCK, options=options), PROMPT, 12)
    assert trace.decisions[0].phase is Phase.PREFILL_END
    oracle = masked_forward(model, PROMPT, trace)
    torch.testing.assert_close(trace.logits, oracle.logits[len(PROMPT) - 1 :], atol=1e-4, rtol=1e-4)


def test_eviction_after_prefill_leaves_the_first_token_alone_and_changes_later_ones(model):
    full = run_reference(model, FULL, PROMPT, 5)
    evicted = run_reference(model, build_policy("paged_eviction", budget=BUDGET, block_size=BLOCK), PROMPT, 5)
    assert torch.equal(evicted.logits[0], full.logits[0])
    assert (evicted.logits[1] - full.logits[1]).abs().max() > 0.1


def test_eviction_between_chunks_changes_the_first_token(model):
    policy = build_policy("streaming_llm", budget=BUDGET, block_size=BLOCK, options=CHUNKED)
    full, evicted = run_reference(model, FULL, PROMPT, 1), run_reference(model, policy, PROMPT, 1)
    assert (evicted.logits[0] - full.logits[0]).abs().max() > 0.1


def test_chunks_without_eviction_equal_one_forward(model):
    policy = build_policy("streaming_llm", budget=20 * BLOCK, block_size=BLOCK, options=CHUNKED)
    trace, full = run_reference(model, policy, PROMPT, 10), run_reference(model, FULL, PROMPT, 10)
    assert [step.num_resident for step in trace.steps][:6] == [16, 32, 48, 64, 80, 93]
    torch.testing.assert_close(trace.logits, full.logits, atol=1e-4, rtol=1e-4)


def planned_residents(policy: Policy, trace: ReferenceTrace) -> list[int]:
    """Tokens resident after each forward, by the plan alone."""
    spans = forwards(len(trace.steps), len(PROMPT), chunk_of(policy))
    residents = []
    kept = 0
    for start, end in spans:
        residents.append(kept + end - start)
        last_of_prompt = Phase.PREFILL_END if end == len(PROMPT) else Phase.PREFILL_CHUNK
        kept = policy.plan(Phase.DECODE if end > len(PROMPT) else last_of_prompt, residents[-1])
    return residents


def test_resident_tokens_are_as_planned(model, policy):
    trace = run_reference(model, policy, PROMPT, 30)
    assert [step.num_resident for step in trace.steps] == planned_residents(policy, trace)
    assert {len(head) for layer in trace.resident_positions for head in layer} == {trace.steps[-1].num_resident}
    for decision in trace.decisions:
        assert decision.num_keep == policy.plan(decision.phase, decision.num_resident_before)
        assert all(len(set(head)) == decision.num_keep for layer in decision.kept for head in layer)
        assert max(head[-1] for layer in decision.kept for head in layer) < decision.num_seen


def test_chunked_prefill_never_holds_more_than_budget_and_chunk(model):
    policy = build_policy("paged_eviction", budget=BUDGET, block_size=BLOCK, options=CHUNKED)
    trace = run_reference(model, policy, PROMPT, 1)
    assert max(step.num_resident for step in trace.steps) == BUDGET + 2 * BLOCK
    assert [decision.phase for decision in trace.decisions] == [Phase.PREFILL_CHUNK] * 3


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_decode_block_eviction_puts_the_newest_block_over_an_old_one(model, scope):
    policy = build_policy("paged_eviction_literal", budget=BUDGET, block_size=BLOCK, options={"decode_scope": scope})
    full_newest_block = run_reference(model, policy, PROMPT, BLOCK + 1).resident_positions
    evicted = run_reference(model, policy, PROMPT, BLOCK + 2).resident_positions
    replaced = set()
    for before_heads, after_heads in zip(full_newest_block, evicted, strict=True):
        for before, after in zip(before_heads, after_heads, strict=True):
            assert len(before) == BUDGET + BLOCK
            assert before[BUDGET:] == list(range(len(PROMPT), len(PROMPT) + BLOCK))
            changed = [slot for slot in range(BUDGET) if before[slot] != after[slot]]
            assert changed == list(range(changed[0], changed[0] + BLOCK))
            assert changed[0] % BLOCK == 0
            assert [after[slot] for slot in changed] == before[BUDGET:]
            assert after[BUDGET:] == [len(PROMPT) + BLOCK]
            replaced.add(changed[0])
    assert len(replaced) == 1 or scope == "layer"


def test_layers_choose_for_themselves_and_heads_together(model):
    trace = run_reference(model, build_policy("paged_eviction", budget=BUDGET, block_size=BLOCK), PROMPT, 2)
    kept = trace.decisions[0].kept
    assert all(layer[0] == layer[1] for layer in kept)
    assert kept[0][0] != kept[1][0]


def test_heads_choose_for_themselves_if_the_policy_says_so(model):
    trace = run_reference(model, Recorder(budget=BUDGET, block_size=BLOCK), PROMPT, 2)
    assert all(layer[0] != layer[1] for layer in trace.decisions[0].kept)


def test_a_share_of_the_prompt_is_resolved_for_each_prompt():
    model, share = tiny_llama(), build_policy("h2o", budget=0.25, block_size=16)
    for length, budget in ((100, 32), (333, 96)):
        prompt = random_prompt(length, seed=length)
        fixed = run_reference(model, build_policy("h2o", budget=budget, block_size=16), prompt, 3)
        found = run_reference(model, share, prompt, 3)
        assert found.resident_positions == fixed.resident_positions
        assert found.token_ids == fixed.token_ids
