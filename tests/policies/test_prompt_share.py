"""Budgets as a share of the prompt."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import Phase, build_policy
from policies.prompt_share import for_model, tokens_of_share

BLOCK = 16
SHARES = st.integers(1, 1000).map(lambda number: number / 1000)


def share(name="h2o", budget=0.25, **options):
    return build_policy(name, budget=budget, block_size=BLOCK, options=options)


@given(SHARES, st.integers(1, 200_000), st.sampled_from([1, 16, 32, 128]))
def test_it_is_the_fewest_whole_blocks_that_hold_the_share(budget, num_tokens, block_size):
    exact = Fraction(str(budget)) * num_tokens
    tokens = tokens_of_share(budget, num_tokens, block_size)
    assert tokens % block_size == 0
    assert exact <= tokens
    assert tokens - block_size < exact or tokens == 2 * block_size


@given(SHARES, st.integers(1, 5000))
def test_kvpress_keeps_at_most_a_block_less(budget, num_tokens):
    """kvpress's own formula, in exact numbers; two blocks are ours at least."""
    theirs = int(num_tokens * Fraction(str(budget)))
    tokens = tokens_of_share(budget, num_tokens, BLOCK)
    assert theirs <= tokens
    assert tokens - theirs <= BLOCK or tokens == 2 * BLOCK


@given(SHARES, st.integers(1, 5000), st.integers(0, 500))
def test_a_longer_prompt_has_no_smaller_budget(budget, num_tokens, more):
    policy = share("streaming_llm", budget)
    assert policy.for_prompt(num_tokens).budget <= policy.for_prompt(num_tokens + more).budget


@pytest.mark.parametrize(
    ("budget", "num_tokens", "tokens"),
    [(0.07, 3200, 224), (0.25, 1000, 256), (0.25, 1024, 256), (0.25, 1025, 272), (0.3, 10, 32), (1.0, 1000, 1008)],
)
def test_a_share_is_taken_as_it_is_written(budget, num_tokens, tokens):
    assert tokens_of_share(budget, num_tokens, BLOCK) == tokens


def test_what_follows_from_the_budget_follows_it():
    policy = share("h2o", heavy_ratio=0.25)
    for num_tokens, budget in ((640, 160), (6400, 1600)):
        resolved = policy.for_prompt(num_tokens)
        assert (resolved.budget, resolved.protect_last) == (budget, budget * 3 // 4)
        assert resolved.plan(Phase.PREFILL_END, num_tokens) == budget
        assert policy.for_budget(budget) is resolved
    assert policy.for_prompt(640) is policy.for_prompt(639), (
        "one policy a budget, so that requests are treated together"
    )


def test_a_fixed_budget_is_that_of_every_prompt():
    policy = share(budget=64)
    assert policy.for_prompt(10) is policy.for_budget(64) is policy


@pytest.mark.parametrize(
    ("name", "options", "least"),
    [
        ("streaming_llm", {}, 32),
        ("snapkv", {"window": 50}, 64),
        ("streaming_llm", {"protect_first": 70}, 80),
        ("paged_eviction", {"protect_first": 40}, 64),
        ("lagkv", {}, 144),
        ("h2o", {"granularity": "block", "heavy_ratio": 0.25}, 64),
        ("snapkv", {"window": 8, "think": 0.4, "think_window": 40}, 48),
        ("kvpress", {"press": "SnapKVPress", "arguments": {"window_size": 64}}, 80),
    ],
)
def test_a_short_prompt_has_the_least_budget_that_the_options_allow(name, options, least):
    policy = share(name, budget=0.1, **options)
    assert policy.for_prompt(100).budget == least
    build_policy(name, budget=least, block_size=BLOCK, options=options)
    with pytest.raises(ValueError, match=r"policy\.|below the minimum"):
        build_policy(name, budget=least - BLOCK, block_size=BLOCK, options=options)


def test_options_that_no_budget_can_mend_are_refused_as_ever():
    with pytest.raises(ValueError, match=r"prefill_chunk=17 is not a multiple"):
        share("h2o", prefill="chunked", prefill_chunk=17)
    with pytest.raises(ValueError, match=r"policy\.options\.protect_last=5 contradicts policy=snapkv"):
        share("snapkv", protect_last=5)


def test_policies_of_prompts_know_the_model_too():
    policy = for_model(share("head_classes", heads=[[0, 1]]), num_layers=2, num_kv_heads=2)
    resolved = policy.for_prompt(640)
    assert (resolved.budget, resolved.whole_rows) == (160, [[False, True], [False, False]])
    assert resolved.plan(Phase.PREFILL_END, 640, 640) == (640 + 3 * 160) // 4 // BLOCK * BLOCK + BLOCK * (1120 % 64 > 0)
    assert policy.for_budget(160) is resolved
    with pytest.raises(ValueError, match=r"heads names \[0, 1\]"):
        for_model(share("head_classes", heads=[[0, 1]]), num_layers=2, num_kv_heads=1)


@pytest.mark.parametrize("budget", [1.5, -0.5, 0.0, 512.0, float("nan")])
def test_other_numbers_are_no_share(budget):
    with pytest.raises(ValueError, match="no share of the prompt"):
        share(budget=budget)


@pytest.mark.parametrize(("name", "why"), [("full", "never evicts"), ("corm", "lets the data decide")])
def test_a_policy_without_budget_takes_no_share(name, why):
    with pytest.raises(ValueError, match=rf"policy={name} {why}, so policy.budget=0.25 has no effect"):
        share(name)


@pytest.mark.parametrize("name", ["quest", "sentencekv"])
def test_what_is_read_at_each_step_is_no_share(name):
    with pytest.raises(ValueError, match=rf"policy={name} reads policy\.budget tokens at each step, and a share"):
        share(name)


def test_the_share_is_no_option_of_a_policy():
    with pytest.raises(ValueError, match=r"prompt_share is not an option"):
        share("h2o", budget=64, prompt_share=None)
