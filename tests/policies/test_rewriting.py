"""Policies that change what is cached: Elastic Cache's merging, and ThinK's channels on top of any policy."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_views import GROUP, HEAD_SIZE, NUM_HEADS, bare_view, random_view, shuffled

from policies import Phase, Signal, build_policy
from policies.elastic_cache import averaged, nearest_kept
from policies.selection import reduce_heads, select
from tests.policy_names import EQUAL

BUDGET, BLOCK = 64, 16
SMALL = {
    "lagkv": {"lag": 24},
    "cascading": {"protect_first": 4},
    "kvpress": {"press": "SnapKVPress", "arguments": {"window_size": 12}},
}
THINKING = [name for name in EQUAL if name != "full"]


def build(name, budget=BUDGET, block_size=BLOCK, **options):
    return build_policy(name, budget=budget, block_size=block_size, options=SMALL.get(name, {}) | options)


def kept(policy, view):
    num_keep = policy.plan(view.phase, view.positions.shape[-1])
    scores = reduce_heads(policy, policy.score(view))
    positions = view.positions.expand(scores.shape)
    return select(policy, view.phase, scores[None], positions[None], view.num_seen, num_keep)[0]


@settings(max_examples=80, deadline=None)
@given(num_tokens=st.integers(2, 40), seed=st.integers(0, 999), data=st.data())
def test_the_nearest_kept_token_is_found_wherever_it_lies(num_tokens, seed, data):
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randperm(3 * num_tokens, generator=generator)[:num_tokens]
    keep = torch.zeros(num_tokens, dtype=torch.bool)
    keep[torch.randperm(num_tokens, generator=generator)[: data.draw(st.integers(1, num_tokens))]] = True
    anchors = [p for p, stays in zip(positions.tolist(), keep.tolist(), strict=True) if stays]
    expected = [min(anchors, key=lambda anchor: (abs(anchor - p), anchor)) for p in positions.tolist()]
    assert positions[nearest_kept(positions[None, None], keep[None, None])[0, 0]].tolist() == expected


def test_merged_states_are_float32_means():
    states = torch.tensor([1.0, 2, 4, 256.0]).bfloat16()[None, None, :, None]
    slots = torch.tensor([0, 0, 3, 3])[None, None]
    merged = averaged(states, slots)
    assert merged.dtype is torch.bfloat16
    assert merged.flatten().tolist() == [1.5, 0, 0, 130.0]


def test_elastic_cache_merges_a_prompt_into_its_anchors():
    """Anchors 0, 1 (first), 9 (last) and 4, 5, 6 by attention; 2 goes to 1, 3 to 4, 7 to 6, 8 to 9."""
    mass = torch.tensor([0.0, 0, 1, 1, 9, 8, 7, 1, 1, 0])
    states = torch.arange(10.0)[None, None, :, None].expand(1, 2, 10, 3)
    policy = build("elastic_cache", budget=6, block_size=3, protect_first=2, distance=1)
    view = bare_view(attention_mass=mass.expand(1, 2, 10), keys=states, values=-states)
    keep = kept(policy, bare_view(positions=range(10), attention_mass=mass.expand(1, 2, 10)))
    assert keep[0, 0].nonzero().flatten().tolist() == [0, 1, 4, 5, 6, 9]
    keys, values = policy.rewrite(view, keep)
    for head in range(2):
        assert keys[0, head, keep[0, 0], 0].tolist() == [0, 1.5, 3.5, 5, 6.5, 8.5]
        assert torch.equal(values[0, head, keep[0, 0]], -keys[0, head, keep[0, 0]])


def test_elastic_cache_leaves_an_anchor_without_neighbours_alone_and_chooses_by_the_mean_of_heads():
    mass = torch.stack([torch.tensor([5.0, 0, 0, 9, 0, 0, 0, 0]), torch.tensor([5.0, 0, 0, 0, 0, 8, 8, 0])])[None]
    policy = build("elastic_cache", budget=4, block_size=2, protect_first=1, protect_last=0, distance=1)
    assert kept(policy, bare_view(positions=range(8), attention_mass=mass))[0, 0].nonzero().flatten().tolist() == [
        0,
        3,
        5,
        6,
    ]


def test_elastic_cache_evicts_at_one_fixed_place_while_decoding():
    """8 tokens, 3 from the end: what is older stays, what is newer moves through the place."""
    policy = build("elastic_cache", budget=8, block_size=4, distance=3)
    resident = [0, 1, 2, 3, 10, 40, 41, 42]
    for position, gone in ((60, 40), (61, 41), (62, 42), (63, 60)):
        order = torch.randperm(9, generator=torch.Generator().manual_seed(position))
        positions = torch.tensor([*resident, position])[order]
        view = bare_view(Phase.DECODE, positions=positions, num_seen=position + 1, attention_mass=torch.rand(1, 2, 9))
        stays = sorted(positions[kept(policy, view)[0, 0]].tolist())
        assert set(resident) | {position} == {*stays, gone}
        resident = stays


def naive_channels(view, keep, window, share):
    """What ThinK leaves of the keys, by plain loops: float64 [H, T, D]."""
    keys, positions = view.keys[0].double().clone(), view.positions[0]
    for head in range(NUM_HEADS):
        row = head if len(positions) > 1 else 0
        kept = [slot for slot in range(len(positions[row])) if keep[0, row, slot]]
        cut = [slot for slot in kept if int(positions[row, slot]) < int(view.num_seen[0]) - window]
        scores = []
        for channel in range(HEAD_SIZE):
            queries = view.window_queries[0, head * GROUP : (head + 1) * GROUP, -window:, channel].double()
            asked = sum(float(q) ** 2 for q in queries.flatten()) / queries.numel()
            scores.append(asked * sum(float(keys[head, slot, channel]) ** 2 for slot in kept) / len(kept))
        for channel in sorted(range(HEAD_SIZE), key=scores.__getitem__)[: int(share * HEAD_SIZE)]:
            keys[head, cut, channel] = 0
    return keys


def full_view(policy, num_extra, seed):
    """A prompt with the policy's signals, and keys and values in any case."""
    from dataclasses import replace

    view, _ = shuffled(random_view(policy, Phase.PREFILL_END, 1, num_extra, seed), seed)
    shape, generator = (1, NUM_HEADS, view.positions.shape[-1], HEAD_SIZE), torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    return replace(
        view, keys=keys if view.keys is None else view.keys, values=values if view.values is None else view.values
    )


@pytest.mark.parametrize("name", THINKING)
def test_think_cuts_the_least_channels_of_what_the_policy_keeps(name):
    thinking = build(name, think=0.4, think_window=8)
    view = full_view(thinking, 40, seed=1)
    keep = kept(thinking, view)
    keys, values = thinking.rewrite(view, keep)
    stays = keep.expand(1, NUM_HEADS, -1)[0]
    expected = naive_channels(view, keep, 8, 0.4)
    if name != "elastic_cache":  # there the keys were averaged before
        torch.testing.assert_close(keys[0].double()[stays], expected[stays])
        assert torch.equal(values, view.values)
    old = (keep & (view.positions < view.num_seen[:, None, None] - 8)).expand(1, NUM_HEADS, -1)[0]
    num_zero = (keys[0] == 0).sum(dim=-1)
    assert (num_zero[old] == 3).all()
    assert (num_zero[stays & ~old] == 0).all()


@pytest.mark.parametrize("name", THINKING)
def test_think_changes_no_choice(name):
    from dataclasses import replace

    plain, thinking = build(name), build(name, think=0.4, think_window=40)
    assert thinking.signals == plain.signals | {Signal.WINDOW_QUERIES}
    view = full_view(thinking, 40, seed=2)
    own = plain.query_window
    as_plain = replace(view, window_queries=view.window_queries[:, :, -own:] if own else None)
    assert torch.equal(plain.score(as_plain), thinking.score(view))


def test_think_of_nothing_is_the_policy_itself():
    assert build("snapkv", think=0.0, think_window=32) == build("snapkv")
    assert type(build("snapkv", think=0.4)) is type(build("snapkv", think=0.5))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("snapkv", {"think": 1.5}, r"think=1\.5 is too large"),
        ("keydiff", {"think": 0.4, "think_window": 64}, r"think_window=64 is too large for policy\.budget=64"),
        ("keydiff", {"think": 0.4, "prefill": "chunked"}, r"prefill=chunked is not defined with think"),
        ("pyramid_kv", {"think": 0.4}, r"think is not for policy=pyramid_kv with unequal counts"),
        ("streaming_llm", {"think": 0.4, "position_mode": "cache"}, r"position_mode=cache turns keys anew"),
        ("keydiff", {"think": "much"}, r"think=much is not a number"),
        ("elastic_cache", {"distance": 61}, r"distance=61 is too large for policy\.budget=64"),
    ],
)
def test_what_cannot_be_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        build(name, **options)


def test_a_policy_that_never_evicts_cuts_no_channels():
    with pytest.raises(ValueError, match="think is not for policy=full"):
        build_policy("full", budget=None, block_size=BLOCK, options={"think": 0.4})
