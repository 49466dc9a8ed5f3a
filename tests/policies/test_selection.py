"""One scan for the lowest is the sort of everything: the same tokens and blocks leave, ties and protection included."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sorting_selection import select as select_by_sorting

from policies import Phase, build_policy
from policies.selection import SCORE_BITS, Candidates, candidates, comparable, ranks, select

BLOCK = 4
OPTIONS = {
    "token": ("inverse_key_l2", {"granularity": "token"}),
    "block": ("inverse_key_l2", {"granularity": "block"}),
    "global": ("paged_eviction_literal", {"decode_scope": "global"}),
}


def few_values(random, shape):
    """Ties everywhere, zeros of both signs, numbers that differ behind the bits that count, one that rounds to inf."""
    near = [1.0, 1.0 + 2.0**-SCORE_BITS / 3, -2.5, -2.5 * (1 + 2.0**-22)]
    pool = torch.tensor([0.0, -0.0, *near, 1e-30, -1e30, torch.finfo(torch.float32).max])
    return pool[torch.randint(len(pool), shape, generator=random)]


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(sorted(OPTIONS)),
    phase=st.sampled_from([Phase.PREFILL_CHUNK, Phase.PREFILL_END, Phase.DECODE]),
    num_tokens=st.integers(2 * BLOCK, 12 * BLOCK),
    leaving=st.integers(1, 12 * BLOCK),
    protect=st.tuples(st.integers(0, 2 * BLOCK), st.integers(0, 2 * BLOCK)),
    tied=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_what_stays_is_what_sorting_keeps(kind, phase, num_tokens, leaving, protect, tied, seed):
    name, options = OPTIONS[kind]
    policy = build_policy(name, budget=8 * BLOCK, block_size=BLOCK, options=options)
    for option, value in zip(("protect_first", "protect_last"), protect, strict=True):
        object.__setattr__(policy, option, value)
    if policy.unit(phase) is policy.unit(Phase.DECODE) and kind != "token":
        num_tokens -= num_tokens % BLOCK  # in decode blocks leave when the newest is full
        leaving = (1 + leaving % (num_tokens // BLOCK - 1)) * BLOCK
    leaving = min(leaving, num_tokens - 1)
    random = torch.Generator().manual_seed(seed)
    shape = (2, 3, 2 if policy.per_head else 1, num_tokens)
    scores = few_values(random, shape) if tied else torch.randn(shape, generator=random)
    first = torch.randint(100, (3,), generator=random)
    order = torch.rand(shape, generator=random).argsort(dim=-1)
    if phase is Phase.DECODE and kind != "token":  # the newest block holds the newest tokens
        order = torch.cat([order[order < num_tokens - BLOCK].view(*shape[:-1], -1),
                           torch.arange(num_tokens - BLOCK, num_tokens).expand(*shape[:-1], -1)], dim=-1)  # fmt: skip
    positions = order + first[:, None, None]
    arguments = (policy, phase, scores, positions, first + num_tokens, num_tokens - leaving)
    protected = candidates(*arguments[:-1]).protected
    assume(protected is None or not protected.all(dim=-1).any())  # the options are refused otherwise
    assert torch.equal(select(*arguments), select_by_sorting(*arguments))


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**31), tied=st.booleans())
def test_ranks_are_in_the_order_of_protection_score_and_position(seed, tied):
    random = torch.Generator().manual_seed(seed)
    scores = few_values(random, (40,)) if tied else torch.randn(40, generator=random)
    positions = torch.randint(2**31 - 1, (40,), generator=random)
    protected = torch.rand(40, generator=random) < 0.3
    plain = sorted(range(40), key=lambda i: (protected[i].item(), comparable(scores)[i].item(), positions[i].item()))
    assert ranks(scores, positions, protected).argsort().tolist() == plain


@pytest.mark.parametrize("phase", Phase)
def test_nothing_but_the_scores_decides_where_nothing_is_protected(phase):
    policy = build_policy("inverse_key_l2", budget=2 * BLOCK, block_size=BLOCK)
    scores = torch.tensor([[[[3.0, 1.0, 2.0, 1.0, 5.0]]]])
    kept = select(policy, phase, scores, torch.arange(5)[None, None, None], torch.tensor([5]), 4)
    assert kept.flatten().tolist() == [True, False, True, True, True], "of the two lowest the earlier leaves"


def test_a_protected_token_stays_beside_others_that_are_as_large_as_can_be():
    scores = torch.full((1, 4), torch.finfo(torch.float32).max)
    protected = torch.tensor([[True, True, False, False]])
    assert Candidates(scores, torch.arange(4)[None], protected, some_free=True).lowest(1).tolist() == [[2]]
