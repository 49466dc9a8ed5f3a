"""The cascade computed at once is the cascade run token by token."""

from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_views import bare_view

from policies import Phase, build_policy
from policies.selection import select


def build(budget, sinks, num_caches, **options):
    options |= {"protect_first": sinks, "num_caches": num_caches}
    return build_policy("cascading", budget=budget, block_size=4, options=options)


def kept(policy, view):
    """Positions that stay of one row."""
    num_keep = policy.plan(view.phase, view.positions.shape[-1])
    scores = policy.score(view)
    assert scores.sum(dim=-1).eq(num_keep).all(), "one token an entry, and the sinks"
    mask = select(policy, view.phase, scores[None], view.positions[None], view.num_seen, num_keep)[0]
    return [sorted(row[stays].tolist()) for row, stays in zip(view.positions[0], mask[0], strict=True)]


def run_queues(num_tokens, budget, sinks, num_caches, attention=None):
    """The definition: queues of Python, one token after the other."""
    size, rest = divmod(budget - sinks, num_caches)
    lengths = [size + rest] + [size] * (num_caches - 1)
    queues = [deque() for _ in range(num_caches)]
    for step in range(num_tokens - sinks):
        newcomer = sinks + step
        for i, (queue, length) in enumerate(zip(queues, lengths, strict=True)):
            if len(queue) < length:
                queue.append(newcomer)
                break
            if step >= budget - sinks and step % 2**i:
                if attention is not None and attention[newcomer] >= attention[queue[-1]]:
                    queue[-1] = newcomer
                break
            queue.append(newcomer)
            newcomer = queue.popleft()
    return sorted([*range(sinks), *(token for queue in queues for token in queue)])


shapes = {"budget": st.sampled_from([12, 16, 28]), "sinks": st.integers(0, 4), "num_caches": st.integers(1, 4)}


@settings(max_examples=150, deadline=None)
@given(**shapes, num_extra=st.integers(1, 120))
def test_a_prompt_goes_through_the_cascade_as_if_token_by_token(budget, sinks, num_caches, num_extra):
    num_tokens = budget + num_extra
    policy = build(budget, sinks, num_caches)
    assert kept(policy, bare_view(positions=range(num_tokens))) == [run_queues(num_tokens, budget, sinks, num_caches)]


@settings(max_examples=150, deadline=None)
@given(**shapes, num_extra=st.integers(1, 60), seed=st.integers(0, 99))
def test_each_head_keeps_the_better_of_those_that_meet(budget, sinks, num_caches, num_extra, seed):
    num_tokens = budget + num_extra
    mass = torch.rand(1, 2, num_tokens, generator=torch.Generator().manual_seed(seed)).mul(8).round()  # with ties
    policy = build(budget, sinks, num_caches, choice="attention")
    positions = torch.arange(num_tokens).expand(2, -1)
    found = kept(policy, bare_view(positions=positions, attention_mass=mass))
    assert found == [run_queues(num_tokens, budget, sinks, num_caches, row) for row in mass[0].tolist()]


@settings(max_examples=50, deadline=None)
@given(
    **shapes, num_prompt=st.integers(1, 40), chunk=st.integers(1, 9), choice=st.sampled_from(["position", "attention"])
)
def test_chunks_and_steps_lead_where_the_queues_lead(budget, sinks, num_caches, num_prompt, chunk, choice):
    """Attention is fixed here, so that it does not matter when two tokens meet."""
    attention = torch.rand(200, generator=torch.Generator().manual_seed(num_prompt))
    policy = build(budget, sinks, num_caches, choice=choice)
    resident, seen = list(range(budget)), budget
    for size in [chunk] * (num_prompt // chunk + 1) + [1] * 20:
        resident, seen = [*resident, *range(seen, seen + size)], seen + size
        order = torch.randperm(len(resident), generator=torch.Generator().manual_seed(seen))
        positions = torch.tensor(resident)[order]
        view = bare_view(
            Phase.DECODE, positions=positions, num_seen=seen, attention_mass=attention[positions][None, None]
        )
        resident = kept(policy, view)[0]
    own = attention.tolist() if choice == "attention" else None
    assert resident == run_queues(seen, budget, sinks, num_caches, own)


def test_older_text_is_kept_ever_more_thinly():
    """4 sinks and 3 sub-caches of 4: spacing 1, 2 and 4."""
    (row,) = kept(build(16, 4, 3), bare_view(positions=range(104)))
    assert row == [0, 1, 2, 3, 76, 80, 84, 88, 92, 94, 96, 98, 100, 101, 102, 103]


def test_one_sub_cache_is_streaming_llm():
    policy, view = build(16, 4, 1), bare_view(positions=range(50))
    assert kept(policy, view) == [[0, 1, 2, 3, *range(38, 50)]]


@pytest.mark.parametrize("num_caches", [0, 13])
def test_as_many_sub_caches_as_there_is_room_for(num_caches):
    with pytest.raises(ValueError, match=rf"policy\.options\.num_caches={num_caches} is too"):
        build(16, 4, num_caches)
