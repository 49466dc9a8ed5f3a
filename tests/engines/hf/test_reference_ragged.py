"""Policies with unequal counts on the reference: against transformers under masks, and against the vectorised split."""

import pytest
import torch

from harness.engines.contract import GenerationRequest
from harness.engines.hf.engine import ReferenceEngine
from harness.engines.hf.generate import run_reference
from harness.engines.hf.trace import Decision
from policies import Phase, Policy, Unit
from policies.ragged_selection import num_kept, rank, select_ragged
from policies.registry import build_policy
from tests.engines.hf.hf_oracle import masked_forward
from tests.policy_names import RAGGED_CASES, ragged_policy
from tests.tiny_llama import random_prompt, save_tiny_llama, tiny_llama

BUDGET, BLOCK, NUM_LAYERS, NUM_HEADS = 64, 16, 3, 2
PROMPT = random_prompt(203, seed=3)
NUM_NEW = 40


@pytest.fixture(scope="module")
def model():
    return tiny_llama(uneven=True)


@pytest.fixture(scope="module", params=RAGGED_CASES, ids=str)
def case(request, model):
    policy = ragged_policy(*request.param, BUDGET, BLOCK)
    return policy.for_model(NUM_LAYERS, NUM_HEADS), run_reference(model, policy, PROMPT, NUM_NEW)


def test_logits_equal_transformers_masked_to_the_kept_keys(case, model):
    policy, trace = case
    assert trace.decisions[0].phase is Phase.PREFILL_END
    assert len(trace.decisions) > 1 or policy.decode_unit is Unit.NONE
    oracle = masked_forward(model, PROMPT, trace, lenders=policy.lenders)
    torch.testing.assert_close(trace.logits, oracle.logits[len(PROMPT) - 1 :], atol=1e-4, rtol=1e-4)


def test_layers_or_heads_keep_unequally_many(case):
    _, trace = case
    for decision in trace.decisions:
        assert len({count for heads in decision.counts for count in heads}) > 1


def test_counts_are_whole_pages_with_newest_pages_alike_and_the_planned_mean(case):
    policy, trace = case
    for decision in trace.decisions:
        counts = [count for heads in decision.counts for count in heads]
        assert sum(counts) == decision.num_keep * NUM_LAYERS * NUM_HEADS
        assert {count % BLOCK for count in counts} == {decision.num_keep % BLOCK}
        planned = policy.plan(decision.phase, decision.num_resident_before, decision.num_seen)
        assert decision.num_keep == planned or (policy.measured and decision.num_keep > planned)


def vectorised(policy: Policy, decision: Decision) -> list[list[list[int]]]:
    """What the shared tensor code keeps of the same candidates."""
    lengths = torch.tensor([[len(row) for row in heads] for heads in decision.scores])[:, None]
    shape = (NUM_LAYERS, 1, NUM_HEADS, int(lengths.max()))
    scores, positions = torch.full(shape, float("nan")), torch.full(shape, 7)
    for layer, head in torch.cartesian_prod(torch.arange(NUM_LAYERS), torch.arange(NUM_HEADS)).tolist():
        length = lengths[layer, 0, head]
        scores[layer, 0, head, :length] = decision.scores[layer][head]
        positions[layer, 0, head, :length] = decision.positions[layer][head]

    def at(mean_keep):
        seen = torch.tensor([decision.num_seen])
        return rank(policy, decision.phase, scores, positions, lengths, seen, mean_keep)

    ranking = at(policy.plan(decision.phase, decision.num_resident_before, decision.num_seen))
    if policy.measured:
        ranking = at(int(num_kept(ranking, policy.demand(ranking))))
    mask = select_ragged(ranking, policy.split(ranking))
    return [
        [sorted(positions[layer, 0, head][mask[layer, 0, head]].tolist()) for head in range(NUM_HEADS)]
        for layer in range(NUM_LAYERS)
    ]


def test_the_vectorised_split_and_selection_keep_the_same_positions(case):
    policy, trace = case
    for decision in trace.decisions:
        assert vectorised(policy, decision) == decision.kept


@pytest.mark.parametrize("budget", [64, 128])
@pytest.mark.parametrize("num_prompt", [65, 150, 500])
def test_short_and_long_prompts_split_alike_in_both(model, budget, num_prompt):
    for name, options in RAGGED_CASES:
        policy = ragged_policy(name, options, budget, BLOCK)
        trace = run_reference(model, policy, random_prompt(num_prompt, seed=num_prompt), 2)
        for decision in trace.decisions:
            assert vectorised(policy.for_model(NUM_LAYERS, NUM_HEADS), decision) == decision.kept, name


def test_a_prompt_within_the_budget_is_left_alone(model):
    for name, options in RAGGED_CASES:
        policy = ragged_policy(name, options, 4 * BUDGET, BLOCK).for_model(NUM_LAYERS, NUM_HEADS)
        trace = run_reference(model, policy, PROMPT, 3)
        assert not trace.decisions or policy.measured or policy.lenders, name  # what a borrower holds nobody reads


def test_squared_attention_counts_the_window_of_the_prompt_and_every_step(model):
    policy = ragged_policy("kv_compress", {"window": 8, "protect_last": 16}, BUDGET, BLOCK)
    trace = run_reference(model, policy, PROMPT, NUM_NEW)
    attentions = masked_forward(model, PROMPT, trace).attentions
    for decision in trace.decisions:
        for layer, scores in enumerate(decision.scores):
            for head, row in enumerate(scores):
                group = attentions[layer].unflatten(0, (NUM_HEADS, -1))[head]
                seen = group[:, len(PROMPT) - 8 : decision.num_seen].square().sum(dim=(0, 1))
                torch.testing.assert_close(row, seen[decision.positions[layer][head]], atol=1e-5, rtol=1e-4)


def test_the_engine_counts_the_mean(tmp_path):
    policy = ragged_policy("pyramid_kv", {}, BUDGET, BLOCK)
    engine = ReferenceEngine(str(save_tiny_llama(tmp_path / "tiny", uneven=True)), policy)
    (result,) = engine.generate([GenerationRequest("a", PROMPT, 6)])
    assert result.eviction.num_evicted_tokens == len(PROMPT) - BUDGET
    assert result.eviction.final_resident_tokens == BUDGET + 5


def test_a_policy_that_does_not_fit_the_model_stops_before_it_starts(tmp_path):
    path = str(save_tiny_llama(tmp_path / "tiny"))
    policy = build_policy("head_classes", budget=BUDGET, block_size=BLOCK, options={"heads": [[7, 0]]})
    with pytest.raises(ValueError, match=r"heads names \[7, 0\], but the model has 3 layers"):
        ReferenceEngine(path, policy)
