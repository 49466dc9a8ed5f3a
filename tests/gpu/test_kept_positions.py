"""Which positions stay on a CUDA device, against the reference on a Hugging Face model on the CPU.

Policies that look at positions alone: every decision, exactly. The others: the decision after the prompt. The first
layer's keys come from embeddings, so there at most one token of a head may differ, by rounding; deeper layers saw
attention, which vLLM's kernels compute with TF32 products, so there nearly all tokens are the same.
"""

import pytest

from harness.engines.contract import GenerationRequest
from harness.engines.hf.generate import run_reference
from harness.engines.vllm.settings import EvictionSettings
from policies import Phase
from tests.engines.vllm.live import run_live
from tests.gpu.conftest import BLOCK
from tests.tiny_llama import random_prompt, tiny_llama

pytestmark = pytest.mark.gpu

BUDGET = 8 * BLOCK
SHARED_IN_DEEPER_LAYERS = 0.9
PROMPTS = (200, 333)
BY_POSITION = ["streaming_llm", "random"]
BY_CONTENT = ["paged_eviction", "keydiff", "h2o", "snapkv"]


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def requests():
    return [GenerationRequest(f"r{n}", random_prompt(n, seed=n), 2 * BLOCK + 1, ignore_eos=True) for n in PROMPTS]


def decisions_of(shape, model, requests, name):
    """(ours, the reference's) of every request."""
    settings = EvictionSettings(name, budget=BUDGET)
    run, policy = run_live(shape, settings, requests), settings.build_policy(BLOCK)
    for request in requests:
        trace = run_reference(model, policy, request.prompt_token_ids, request.max_new_tokens, ignore_eos=True)
        yield run.decisions[request.request_id], trace.decisions


def heads_of(kept, expected):
    """Pairs of position sets by layer; heads that share one choice are one pair."""
    for layer, (ours, theirs) in enumerate(zip(kept, expected, strict=True)):
        for head, positions in enumerate(ours):
            yield layer, set(positions), set(theirs[head])


@pytest.mark.parametrize("name", BY_POSITION)
def test_choices_by_position_are_those_of_the_reference(shape, model, requests, name):
    for ours, theirs in decisions_of(shape, model, requests, name):
        assert len(ours) == len(theirs) > 1
        for our, their in zip(ours, theirs, strict=True):
            assert (our.phase, our.num_before, our.num_keep) == (their.phase, their.num_resident_before, their.num_keep)
            assert all(found == expected for _, found, expected in heads_of(our.kept, their.kept))


@pytest.mark.parametrize("name", BY_CONTENT)
def test_choices_by_content_are_those_of_the_reference_but_for_rounding(shape, model, requests, name):
    for ours, theirs in decisions_of(shape, model, requests, name):
        assert ours[0].phase is theirs[0].phase is Phase.PREFILL_END
        for layer, found, expected in heads_of(ours[0].kept, theirs[0].kept):
            allowed = 1 if layer == 0 else BUDGET * (1 - SHARED_IN_DEEPER_LAYERS)
            assert len(found) == len(expected) == BUDGET
            assert len(found - expected) <= allowed, f"layer {layer}"
