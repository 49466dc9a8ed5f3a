"""Reading less than is kept on the reference: against the tensor code, and against the full cache."""

import pytest
import torch

from harness.engines.contract import GenerationRequest
from harness.engines.hf import reading
from harness.engines.hf.engine import ReferenceEngine
from harness.engines.hf.generate import run_reference
from policies.registry import build_policy
from tests.engines.hf import hf_oracle
from tests.engines.hf.hf_oracle import forwards, kept_masks
from tests.policy_names import READING_CASES
from tests.tiny_llama import random_prompt, save_tiny_llama, tiny_llama

BUDGETS = {"quest": 64, "sentencekv": 192}
BLOCK, NUM_LAYERS, NUM_HEADS = 16, 3, 2
PROMPT = random_prompt(203, seed=3)
NUM_NEW = 24


@pytest.fixture(scope="module")
def model():
    return tiny_llama(uneven=True)


@pytest.mark.parametrize(("name", "options"), READING_CASES, ids=str)
def test_the_policys_tensors_choose_the_same_pages(model, monkeypatch, name, options):
    policy = build_policy(name, budget=BUDGETS[name], block_size=BLOCK, options=options)
    plain = run_reference(model, policy, PROMPT, NUM_NEW)
    monkeypatch.delitem(reading.RULES, name)
    vectorised = run_reference(model, policy, PROMPT, NUM_NEW)
    assert vectorised.reads == plain.reads
    assert vectorised.token_ids == plain.token_ids
    assert any(len(set(map(tuple, pages))) > 1 for step in plain.reads for pages in step), "heads choose for themselves"


@pytest.mark.parametrize("dense_layers", [0, 2])
def test_logits_equal_transformers_masked_to_the_pages_that_were_read(model, monkeypatch, dense_layers):
    policy = build_policy("quest", budget=64, block_size=BLOCK, options={"dense_layers": dense_layers})
    trace = run_reference(model, policy, PROMPT, NUM_NEW)
    masks = kept_masks({}, forwards(NUM_NEW, len(PROMPT), len(PROMPT)), NUM_LAYERS, NUM_HEADS)
    for step, layers in enumerate(trace.reads):
        for layer, heads in enumerate(layers):
            for head, pages in enumerate(heads):
                read = [slot // BLOCK in pages for slot in range(masks.shape[-1])]
                masks[layer, head, len(PROMPT) + step] &= torch.tensor(read)
    monkeypatch.setattr(hf_oracle, "kept_masks", lambda *args: masks)
    oracle = hf_oracle.masked_forward(model, PROMPT, trace)
    torch.testing.assert_close(trace.logits, oracle.logits[len(PROMPT) - 1 :], atol=1e-4, rtol=1e-4)
    assert {len(pages) for heads in trace.reads[0][dense_layers:] for pages in heads} == {4}


@pytest.mark.parametrize("options", [{"dense_layers": 0}, {}])
def test_a_budget_that_covers_all_gives_the_full_caches_logits(model, options):
    full = run_reference(model, build_policy("full", budget=None, block_size=BLOCK), PROMPT, NUM_NEW)
    policy = build_policy("quest", budget=15 * BLOCK, block_size=BLOCK, options=options)
    trace = run_reference(model, policy, PROMPT, NUM_NEW)
    assert torch.equal(trace.logits, full.logits)
    assert trace.read.read == trace.read.resident


def test_sentencekv_without_its_second_stage_is_snapkv(model):
    options = {"window": 8, "kernel": 7, "pooling": "max"}
    snapkv = build_policy("snapkv", budget=128, block_size=BLOCK, options=options)
    policy = build_policy("sentencekv", budget=128, block_size=BLOCK, options=options | {"read_sentences": False})
    traces = [run_reference(model, one, PROMPT, NUM_NEW) for one in (snapkv, policy)]
    assert torch.equal(traces[0].logits, traces[1].logits)
    assert traces[1].read is None


def test_the_engine_sums_what_requests_read_and_needs_no_list_of_ends(tmp_path):
    path = str(save_tiny_llama(tmp_path / "tiny", uneven=True))
    quest = build_policy("quest", budget=128, block_size=BLOCK, options={"dense_layers": 1})
    engine = ReferenceEngine(path, quest)
    requests = [GenerationRequest(name, PROMPT[:length], 4) for name, length in (("a", 203), ("b", 150))]
    list(engine.generate(requests))
    stats = engine.stats()
    assert stats.read.num_steps == 6
    assert stats.read.resident[0][0] == 204 + 205 + 206 + 151 + 152 + 153
    assert stats.read.read[0] == stats.read.resident[0]
    assert stats.read.read[1][0] == 6 * 7 * BLOCK + (12 + 13 + 14) + (7 + 8 + 9)
    with pytest.raises(ValueError, match="no token of the model's tokenizer ends a sentence"):
        ReferenceEngine(path, build_policy("sentencekv", budget=128, block_size=BLOCK))
