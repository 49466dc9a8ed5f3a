"""Cases whose answer is known by hand: what must stay, what must leave."""

import pytest
import torch
from policy_views import bare_view

from policies import Phase, Signal, build_policy
from policies.selection import reduce_heads, select
from policies.views import key_directions


def build(name, budget=8, block_size=4, **options):
    return build_policy(name, budget=budget, block_size=block_size, options=options)


def kept_positions(policy, *views):
    """Sorted positions that stay, [layers][rows]; one view a layer."""
    positions = torch.stack([view.positions for view in views])
    scores = torch.stack([reduce_heads(policy, policy.score(view)) for view in views])
    if policy.per_head:
        positions = positions.expand_as(scores)
    num_keep = policy.plan(views[0].phase, positions.shape[-1])
    mask = select(policy, views[0].phase, scores, positions, views[0].num_seen, num_keep)
    return [
        [sorted(row[keep].tolist()) for row, keep in zip(p[0], m[0], strict=True)]
        for p, m in zip(positions, mask, strict=True)
    ]


def kept_rows(policy, view):
    return kept_positions(policy, view)[0]


def norms(*rows):
    """[1, H, T, 1] from one list a head."""
    return torch.tensor(rows, dtype=torch.float32)[None, :, :, None]


def logits_as_keys(*rows):
    """Keys for which a query of ones, D = 1, has these logits."""
    return norms(*rows)


def ones_query(num_query_heads=1, window=1):
    return torch.ones(1, num_query_heads, window, 1)


def test_streaming_llm_keeps_the_sinks_and_the_tail():
    policy = build("streaming_llm")
    assert kept_rows(policy, bare_view(positions=range(20))) == [[0, 1, 2, 3, 16, 17, 18, 19]]


def test_streaming_llm_keeps_the_sinks_and_the_tail_when_slots_were_refilled():
    policy = build("streaming_llm")
    slots = [0, 1, 2, 3, 20, 17, 18, 19, 16]
    assert kept_rows(policy, bare_view(Phase.DECODE, positions=slots)) == [[0, 1, 2, 3, 17, 18, 19, 20]]


def test_streaming_llm_in_block_form_drops_the_oldest_block_without_a_sink():
    policy = build("streaming_llm", granularity="block")
    slots = [0, 1, 2, 3, 20, 21, 22, 23, 24, 25, 26, 27]
    assert kept_rows(policy, bare_view(Phase.DECODE, positions=slots)) == [[0, 1, 2, 3, 24, 25, 26, 27]]


def test_paged_eviction_evicts_block_2():
    policy = build("paged_eviction_literal", budget=12)
    values = [4, 4, 4, 4, 4, 4, 0.1, 4, 2, 2, 2, 2, 0.1, 0.1, 0.1, 0.1]
    view = bare_view(Phase.DECODE, keys=norms([2] * 16, [2] * 16), values=norms(values, values))
    assert kept_rows(policy, view) == [[*range(8), *range(12, 16)]]


def test_paged_eviction_prunes_a_prompt_by_value_over_key_norm_averaged_over_heads():
    policy = build("paged_eviction_literal")
    keys = norms([1, 1, 1, 1, 1, 1, 1, 8, 1], [1, 1, 1, 1, 1, 1, 1, 8, 1])
    values = norms([1, 1, 1, 0, 1, 1, 1, 4, 1], [1, 1, 1, 3, 1, 1, 1, 4, 1])
    assert kept_rows(policy, bare_view(keys=keys, values=values)) == [[0, 1, 2, 3, 4, 5, 6, 8]]


def sink_like(num_tokens):
    """A prompt whose first and newest tokens have the smallest values, as sinks have."""
    values = [1.0 + token for token in range(num_tokens)]
    values[:4], values[-5:] = [0.1] * 4, [0.2, 0.3, 0.3, 0.3, 0.3]
    return bare_view(keys=norms([1] * num_tokens), values=norms(values))


def test_paged_eviction_never_evicts_the_first_and_the_last_page_of_a_prompt():
    """18 tokens, C = 12: pages of 4 at both ends, counted from the newest token; 9 to 12 have the largest values."""
    assert kept_rows(build("paged_eviction", budget=12), sink_like(18)) == [[0, 1, 2, 3, 9, 10, 11, 12, 14, 15, 16, 17]]
    literal = kept_rows(build("paged_eviction_literal", budget=12), sink_like(18))[0]
    assert not {0, 1, 2, 3} & set(literal)


def test_paged_eviction_never_evicts_the_first_page_in_decode():
    values = [0.1] * 4 + [3] * 4 + [2] * 4 + [0.1] * 4
    view = bare_view(Phase.DECODE, keys=norms([1] * 16), values=norms(values))
    assert kept_rows(build("paged_eviction", budget=12), view) == [[*range(8), *range(12, 16)]]
    assert kept_rows(build("paged_eviction_literal", budget=12), view) == [[*range(4, 16)]]


@pytest.mark.parametrize("block_size", [4, 8])
def test_protected_pages_are_as_long_as_a_page(block_size):
    policy = build("paged_eviction", budget=8 * block_size, block_size=block_size)
    assert (policy.protect_first, policy.protect_last) == (block_size, block_size)
    more = build("paged_eviction", 8 * block_size, block_size, protect_first_pages=2, protect_last=3 * block_size)
    assert (more.protect_first, more.protect_last) == (2 * block_size, 3 * block_size)


def test_paged_eviction_with_global_scope_evicts_the_same_block_in_all_layers():
    first = {"keys": norms([1] * 12), "values": norms([100] * 4 + [110] * 4 + [1] * 4)}
    second = {"keys": norms([1] * 12), "values": norms([3] * 4 + [1] * 4 + [1] * 4)}
    views = [bare_view(Phase.DECODE, layer=i, **signals) for i, signals in enumerate((first, second))]
    own = kept_positions(build("paged_eviction_literal"), *views)
    shared = kept_positions(build("paged_eviction_literal", decode_scope="global"), *views)
    assert own == [[[*range(4, 12)]], [[*range(4), *range(8, 12)]]]
    assert shared == [[[*range(4), *range(8, 12)]]] * 2


def test_inverse_key_l2_evicts_the_longest_keys_of_each_head():
    lengths = [[1, 9, 1, 1, 9, 1, 1, 1, 1, 1], [1, 1, 9, 1, 1, 1, 9, 1, 1, 1]]
    assert kept_rows(build("inverse_key_l2"), bare_view(keys=norms(*lengths))) == [
        [0, 2, 3, 5, 6, 7, 8, 9],
        [0, 1, 3, 4, 5, 7, 8, 9],
    ]


def test_inverse_key_l2_in_block_form_evicts_one_block_for_all_heads():
    lengths = [[1, 1, 1, 1, 4, 4, 4, 4, 9, 9, 9, 9], [9, 1, 1, 1, 4, 4, 4, 4, 9, 9, 9, 9]]
    view = bare_view(Phase.DECODE, keys=norms(*lengths))
    assert kept_rows(build("inverse_key_l2", granularity="block"), view) == [[*range(4), *range(8, 12)]]


def test_keydiff_drops_the_duplicates():
    distinct = [torch.tensor([2, 5, 9]), torch.tensor([0, 7, 11])]
    keys = torch.zeros(1, 2, 16, 4)
    keys[..., 0] = 3.0
    for head, tokens in enumerate(distinct):
        keys[0, head, tokens] = torch.eye(4)[1:]
    for row, tokens in zip(kept_rows(build("keydiff"), bare_view(**key_directions(keys))), distinct, strict=True):
        assert set(tokens.tolist()) <= set(row)


def test_keydiff_ignores_the_length_of_keys():
    keys = torch.tensor([[1.0, 0], [50, 0], [1, 0], [1, 0], [0, 900], [1, 0], [1, 0], [1, 0], [1, 0]])[None, None]
    scores = build("keydiff").score(bare_view(**key_directions(keys)))[0, 0]
    assert scores.argmax() == 4
    torch.testing.assert_close(scores[1], scores[0])


def heavy_hitter_attention():
    """Causal attention over 20 tokens where queries 8 to 12 look at token 7 only, the others at themselves and 0."""
    attention = torch.zeros(20, 20)
    for query in range(20):
        looked_at = [7] if 8 <= query <= 12 else [0, query]
        attention[query, looked_at] = 1 / len(looked_at)
    return attention


def test_h2o_keeps_token_7_that_recent_queries_ignore():
    mass = heavy_hitter_attention().sum(dim=0)[None, None]
    assert mass[0, 0].argsort(descending=True)[:2].tolist() == [0, 7]
    kept = kept_rows(build("h2o"), bare_view(attention_mass=mass))[0]
    assert {0, 7} <= set(kept)
    assert kept[-4:] == [16, 17, 18, 19]
    assert len(kept) == 8


def test_h2o_keeps_each_heads_own_heavy_hitters_and_the_recent_half():
    mass = torch.ones(1, 2, 12)
    mass[0, 0, [1, 2, 3, 7]] = torch.tensor([9.0, 8, 7, 6])
    mass[0, 1, [0, 4, 5, 6]] = torch.tensor([9.0, 8, 7, 6])
    assert kept_rows(build("h2o"), bare_view(attention_mass=mass)) == [
        [1, 2, 3, 7, 8, 9, 10, 11],
        [0, 4, 5, 6, 8, 9, 10, 11],
    ]


@pytest.mark.parametrize(("heavy_ratio", "num_recent"), [(0.0, 8), (0.25, 6), (0.5, 4), (1.0, 0)])
def test_h2o_protects_what_the_heavy_hitters_leave(heavy_ratio, num_recent):
    assert build("h2o", heavy_ratio=heavy_ratio).protect_last == num_recent


def test_h2o_in_block_form_lets_all_heads_share_the_block_with_most_attention():
    mass = torch.tensor([[9.0] * 4 + [1] * 4 + [0] * 4, [0.0] * 4 + [4] * 4 + [0] * 4])[None]
    policy = build("h2o", granularity="block")
    assert kept_rows(policy, bare_view(Phase.DECODE, attention_mass=mass)) == [[*range(4), *range(8, 12)]]


def test_value_weighted_h2o_lets_a_large_value_outweigh_attention():
    mass = torch.tensor([5.0, 2, 2, 2, 2, 1, 0, 0, 0])[None, None]
    values = torch.ones(1, 1, 9, 2)
    values[0, 0, 0] = torch.tensor([0.1, -0.1])
    values[0, 0, 3] = torch.tensor([-3.0, 4.0])
    view = bare_view(attention_mass=mass, values=values)
    scores = build("h2o", value_weighted=True).score(view)[0, 0]
    torch.testing.assert_close(scores, torch.tensor([1.0, 4, 4, 14, 4, 2, 0, 0, 0]))
    assert 0 not in kept_rows(build("h2o", value_weighted=True), view)[0]
    assert 0 in kept_rows(build("h2o"), view)[0]


@pytest.mark.parametrize("name", ["h2o", "snapkv", "tova", "chunkkv"])
def test_values_are_asked_for_only_where_they_weigh(name):
    plain, weighted = (build(name, budget=64, value_weighted=flag).signals for flag in (False, True))
    assert Signal.VALUES not in plain
    assert weighted == plain | {Signal.VALUES}


def test_tova_keeps_what_the_newest_query_attends_to_on_average_over_heads():
    logits = torch.tensor([[0, 5.0, 0, 0, 0, -9, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, -9, 0, 0, 5]])
    view = bare_view(positions=range(10), newest_attention=logits.softmax(dim=-1)[None, :, None])
    scores = reduce_heads(build("tova"), build("tova").score(view))[0, 0]
    torch.testing.assert_close(scores, logits.softmax(dim=-1).mean(dim=0))
    assert kept_rows(build("tova"), view) == [[0, 1, 2, 3, 4, 7, 8, 9]]


def test_tova_may_evict_the_newest_token():
    attention = torch.tensor([1.0, 1, 1, 1, 1, 1, 1, 1, -9]).softmax(dim=-1)
    view = bare_view(Phase.DECODE, positions=range(9), newest_attention=attention[None, None, None])
    assert kept_rows(build("tova"), view) == [[*range(8)]]
    assert kept_rows(build("tova", protect_last=1), view) == [[*range(1, 9)]]


def snapkv_view(spike, num_tokens=20, window=2):
    logits = [0.0] * num_tokens
    logits[spike] = 8.0
    return bare_view(keys=logits_as_keys(logits), window_queries=ones_query(window=window))


@pytest.mark.parametrize(("pooling", "sixth"), [("max", 17), ("avg", 15)])
def test_snapkv_keeps_the_neighbours_of_a_spike_and_the_window(pooling, sixth):
    """The rest is flat, so the latest stays; the average of 16 and 17 counts zeros from beyond the end."""
    policy = build("snapkv", window=2, kernel=5, pooling=pooling)
    kept = kept_rows(policy, snapkv_view(spike=6))[0]
    assert kept == [4, 5, 6, 7, 8, sixth, 18, 19]


def test_snapkv_without_pooling_keeps_the_spike_alone():
    kept = kept_rows(build("snapkv", window=2, kernel=1), snapkv_view(spike=6))[0]
    assert kept == [6, 13, 14, 15, 16, 17, 18, 19]


def test_snapkv_queries_do_not_see_later_tokens_of_the_window():
    logits = [1.0, 0, 0, 0, 0, 0, 0, 0, 0, 30]
    view = bare_view(keys=logits_as_keys(logits), window_queries=ones_query(window=2))
    scores = build("snapkv", window=2, kernel=1).score(view)[0, 0]
    first_query = torch.tensor(logits[:9]).softmax(dim=0)
    torch.testing.assert_close(scores[:8], first_query[:8], atol=1e-6, rtol=0)


def test_snapkv_group_max_keeps_what_one_query_head_wants_most():
    keys = torch.zeros(1, 1, 12, 2)
    keys[0, 0, 3, 0] = 9.0
    keys[0, 0, [1, 2, 4, 5, 6, 7, 8]] = torch.tensor([0.0, 2.0])
    queries = torch.eye(2)[None, :, None]
    view = bare_view(keys=keys, window_queries=queries)
    mean = build("snapkv", window=1, kernel=1).score(view)[0, 0]
    largest = build("snapkv", window=1, kernel=1, group="max").score(view)[0, 0]
    each = (queries[0, :, 0] @ keys[0, 0].T / 2**0.5).softmax(dim=-1)[:, :-1]
    torch.testing.assert_close(mean[:-1], each.mean(dim=0))
    torch.testing.assert_close(largest[:-1], each.amax(dim=0))


def test_chunkkv_keeps_whole_chunks_and_the_later_part_of_the_one_that_does_not_fit():
    logits = [0.0] * 20
    logits[4], logits[13] = 9.0, 8.0
    view = bare_view(keys=logits_as_keys(logits), window_queries=ones_query(window=1))
    policy = build("chunkkv", window=1, chunk_length=4)
    assert kept_rows(policy, view) == [[4, 5, 6, 7, 13, 14, 15, 19]]


def test_chunkkv_judges_a_short_last_chunk_by_its_mean():
    logits = [0.0, 0, 0, 0, 2, 2, 2, 2, 3, 3, 0]
    view = bare_view(keys=logits_as_keys(logits), window_queries=ones_query(window=1))
    scores = build("chunkkv", window=1, chunk_length=4).score(view)[0, 0]
    weights = torch.tensor(logits).softmax(dim=0)
    torch.testing.assert_close(scores[8:10], weights[8:10])
    torch.testing.assert_close(scores[:4], weights[:4])
    assert scores[10] == 0


def test_lagkv_keeps_equally_many_of_each_lag_and_the_one_that_stands_out():
    states = torch.randn(1, 1, 22, 8, generator=torch.Generator().manual_seed(0))
    states[0, 0, 3] = torch.tensor([40.0, -40, 40, -40, 40, -40, 40, -40])
    view = bare_view(keys=states, values=states)
    kept = kept_rows(build("lagkv", budget=16, protect_first=2, lag=4), view)[0]
    assert {0, 1, 3, 18, 19, 20, 21} <= set(kept)
    assert [sum(start <= p < start + 4 for p in kept) for start in (2, 6, 10, 14)] == [2, 2, 3, 3]


def test_lagkv_is_a_window_while_the_prompt_has_no_lag_to_compare_with():
    states = torch.randn(1, 1, 12, 8, generator=torch.Generator().manual_seed(0))
    kept = kept_rows(build("lagkv", protect_first=2, lag=6), bare_view(keys=states, values=states))
    assert kept == [[0, 1, 6, 7, 8, 9, 10, 11]]


def test_random_samples_every_position_equally_often():
    view = bare_view(positions=range(40))
    counts = torch.zeros(40)
    for seed in range(400):
        counts[kept_rows(build("random", budget=16, seed=seed), view)[0]] += 1
    assert ((counts / 400 - 0.4).abs() < 5 * (0.4 * 0.6 / 400) ** 0.5).all()


def test_random_evicts_one_token_at_a_time_as_it_would_at_once():
    policy = build("random", seed=3)
    resident = list(range(8))
    for position in range(8, 30):
        resident = kept_rows(policy, bare_view(Phase.DECODE, positions=[*resident, position]))[0]
    assert resident == kept_rows(policy, bare_view(positions=range(30)))[0]


def test_random_draws_another_sample_for_each_layer_and_seed():
    samples = {
        tuple(kept_rows(build("random", seed=seed), bare_view(positions=range(64), layer=layer))[0])
        for seed in range(3)
        for layer in range(4)
    }
    assert len(samples) == 12
