"""The signals that a policy sees equal what transformers computes."""

import pytest
import torch

from harness.engines.hf.generate import run_reference
from harness.engines.hf.signals import Rotary
from harness.engines.hf.trace import ReferenceTrace
from harness.errors import UserError
from policies.base import Phase, View
from tests.engines.hf.hf_oracle import MaskedForward, masked_forward
from tests.engines.hf.recorder import Recorder
from tests.tiny_llama import random_prompt, tiny_llama

PROMPT = random_prompt(60)
NUM_LAYERS = 3


@pytest.fixture(scope="module", params=["after", "chunked"])
def run(request) -> tuple[list[View], ReferenceTrace, MaskedForward]:
    """Views of all evictions, the trace, and the same text in transformers."""
    model = tiny_llama()
    policy = Recorder(budget=24, block_size=8, prefill=request.param, prefill_chunk=16, protect_first=3, protect_last=4)
    trace = run_reference(model, policy, PROMPT, 12)
    chunk = policy.prefill_chunk if request.param == "chunked" else None
    return policy.views, trace, masked_forward(model, PROMPT, trace, chunk)


def test_views_carry_the_decision(run):
    views, trace, _ = run
    assert len(views) == NUM_LAYERS * len(trace.decisions)
    for index, view in enumerate(views):
        decision = trace.decisions[index // NUM_LAYERS]
        assert (view.layer, view.num_layers) == (index % NUM_LAYERS, NUM_LAYERS)
        assert (view.phase, view.num_seen.tolist()) == (decision.phase, [decision.num_seen])
        assert view.positions.shape == (1, 2, decision.num_resident_before)
    assert {Phase.PREFILL_END, Phase.DECODE} <= {view.phase for view in views}


def test_attention_mass_is_the_column_sum_of_all_queries_so_far(run):
    views, _, oracle = run
    for view in views:
        attention = oracle.attentions[view.layer].unflatten(0, (2, 2))[..., : view.num_seen, :].sum(dim=(1, 2))
        expected = attention.gather(-1, view.positions[0])
        torch.testing.assert_close(view.attention_mass[0], expected, atol=1e-4, rtol=1e-4)


def test_window_holds_the_last_rotated_queries_of_prompt_and_answer(run):
    views, _, oracle = run
    for view in views:
        expected = oracle.rotated_queries[view.layer][:, view.num_seen - 6 : view.num_seen]
        torch.testing.assert_close(view.window_queries[0], expected, atol=1e-4, rtol=1e-4)


def test_query_moments_are_those_of_the_prompt_before_rotation(run):
    views, _, oracle = run
    for view in views:
        seen = min(int(view.num_seen), len(PROMPT))
        queries = oracle.queries[view.layer][:, 3:seen]
        covariance = torch.stack([torch.cov(head.T, correction=0) for head in queries])
        torch.testing.assert_close(view.query_mean[0], queries.mean(dim=1), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(view.query_cov[0], covariance, atol=1e-4, rtol=1e-4)
        assert view.inv_freq.shape == (16,)


def test_a_window_longer_than_the_text_holds_all_queries():
    policy = Recorder(budget=2, block_size=1)
    run_reference(tiny_llama(), policy, PROMPT[:3], 2)
    assert policy.views[0].window_queries.shape == (1, 4, 3, 32)


def test_moments_are_zero_if_the_whole_prompt_is_protected():
    policy = Recorder(budget=4, block_size=1, protect_first=3)
    run_reference(tiny_llama(), policy, PROMPT[:3], 4)
    assert policy.views[0].query_mean.count_nonzero() == policy.views[0].query_cov.count_nonzero() == 0


def test_signals_that_are_not_asked_for_are_absent():
    class Positions(Recorder):
        signals = frozenset()

        def score(self, view: View) -> torch.Tensor:
            self.views.append(view)
            return view.positions.float()

    policy = Positions(budget=24, block_size=8)
    run_reference(tiny_llama(), policy, PROMPT, 2)
    view = policy.views[0]
    absent = (view.keys, view.values, view.attention_mass, view.window_queries, view.query_mean, view.inv_freq)
    assert all(signal is None for signal in absent)


def test_models_that_do_not_rotate_whole_heads_are_refused():
    with pytest.raises(UserError, match="cannot be un-rotated"):
        Rotary.of(tiny_llama(), head_size=64)
