"""Cases of unequal counts whose right split is known by arithmetic."""

import pytest
import torch
from policy_views import bare_view

from policies import Phase, build_policy
from policies.ragged_selection import num_kept, rank, select_ragged

PEAK = 9.0


def keep(policy, views, phase=Phase.PREFILL_END):
    """Sorted positions that stay, [layers][heads]; one view [1, H, T] a layer, whose tokens are all resident."""
    scores = torch.stack([policy.score(view) for view in views])
    positions = torch.stack([view.positions.expand(scores.shape[1:]) for view in views])
    num_tokens, lengths = scores.shape[-1], torch.full(scores.shape[:3], scores.shape[-1])
    mean_keep = policy.plan(phase, num_tokens, num_tokens)
    ranking = rank(policy, phase, scores, positions, lengths, views[0].num_seen, mean_keep)
    if policy.measured:
        mean_keep = int(num_kept(ranking, policy.demand(ranking)))
        ranking = rank(policy, phase, scores, positions, lengths, views[0].num_seen, mean_keep)
    mask = select_ragged(ranking, policy.split(ranking))
    return [
        [row[m].sort().values.tolist() for row, m in zip(p[0], k[0], strict=True)]
        for p, k in zip(positions, mask, strict=True)
    ]


def counts(kept):
    return [[len(row) for row in heads] for heads in kept]


def attended(*logits, window=1):
    """A layer whose queries of ones see keys D = 1 with these logits, one list a head."""
    keys = torch.tensor(logits)[None, :, :, None].float()
    return bare_view(keys=keys, window_queries=torch.ones(1, len(logits), window, 1))


def peaked(num_tokens, *peaks):
    return [PEAK if token in peaks else 0.0 for token in range(num_tokens)]


FLAT = [0.0] * 16
SHARP = peaked(16, 2, 5, 11)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"floor": 0.0}, [4, 12]),  # 14 best beside the window: 3 peaks, then 11 of the flat head
        ({"floor": 0.5}, [6, 10]),  # half of that, and half of 8
        ({"floor": 1.0}, [8, 8]),
        ({"floor": 0.5, "floor_rule": "minimum"}, [4, 12]),  # 4 of the sharp head are safe: 3 peaks and the window
        ({"floor": 0.75, "floor_rule": "minimum"}, [6, 10]),
    ],
)
def test_ada_kv_gives_a_flat_head_more(options, expected):
    policy = build_policy("ada_kv", budget=8, block_size=1, options={"window": 1, "kernel": 1, **options})
    kept = keep(policy, [attended(SHARP, FLAT)])
    assert counts(kept) == [expected]
    assert {2, 5, 11, 15} <= set(kept[0][0])


def test_ada_kv_in_pages_rounds_the_largest_remainder_up():
    policy = build_policy("ada_kv", budget=8, block_size=4, options={"window": 1, "kernel": 1, "floor": 0.5})
    assert counts(keep(policy, [attended(SHARP, FLAT)])) == [[8, 8]]  # 1.5 and 2.5 pages: the earlier head
    policy = build_policy("ada_kv", budget=8, block_size=4, options={"window": 1, "kernel": 1, "floor": 0.4})
    assert counts(keep(policy, [attended(SHARP, FLAT)])) == [[4, 12]]  # 1.4 and 2.6


def test_ada_kv_shares_inside_a_layer_only():
    policy = build_policy("ada_kv", budget=8, block_size=1, options={"window": 1, "kernel": 1, "floor": 0.0})
    assert counts(keep(policy, [attended(SHARP, SHARP), attended(FLAT, FLAT)])) == [[8, 8], [8, 8]]


PYRAMIDS = [
    (1000, [484, 370, 256, 142, 28]),  # 16 + 240 / 20 at the end, 16 + 480 - 12 at the beginning
    (400, [400, 328, 256, 184, 112]),  # the first keeps the prompt, the last 16 + 480 - 384
]


@pytest.mark.parametrize(("num_tokens", "expected"), PYRAMIDS)
def test_pyramid_kv_falls_by_equal_steps(num_tokens, expected):
    options = {"window": 16, "kernel": 1, "beta": 20.0}
    policy = build_policy("pyramid_kv", budget=256, block_size=1, options=options)
    layer = attended([0.0] * num_tokens, [0.0] * num_tokens, window=16)
    assert counts(keep(policy, [layer] * 5)) == [[count] * 2 for count in expected]


def test_pyramid_kv_in_pages_keeps_the_total():
    policy = build_policy("pyramid_kv", budget=256, block_size=32, options={"window": 16, "kernel": 1, "beta": 20.0})
    layer = attended([0.0] * 1000, [0.0] * 1000, window=16)
    found = counts(keep(policy, [layer] * 5))
    # 15.1, 11.6, 8, 4.4 and 0.9 pages of 40: one is the least, and the greatest remainder is rounded up
    assert found == [[480, 480], [384, 384], [256, 256], [128, 128], [32, 32]]


def test_ada_pyramid_does_both():
    options = {"window": 1, "kernel": 1, "floor": 0.0, "beta": 7.0}
    policy = build_policy("ada_kv", budget=8, block_size=1, options=options)
    layer = attended(peaked(32, 2, 5, 11), [0.0] * 32)
    # 7 beside the window: 13, 7 and 1 a head, so 26, 14 and 2 best of each layer; the last holds peaks only
    assert counts(keep(policy, [layer] * 3)) == [[4, 24], [4, 12], [3, 1]]


def squares(*rows):
    return bare_view(squared_attention=torch.tensor(rows)[None].float(), block_size=2)


def test_kv_compress_keeps_the_blocks_with_the_best_best_token():
    policy = build_policy("kv_compress", budget=4, block_size=2, options={"protect_last": 2})
    one, many = [0.9, 0.1, 0.1, 0.1, 0.1, 0.1, 0, 0], [0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0, 0]
    assert keep(policy, [squares(one, many)]) == [[[0, 5, 6, 7], [0, 1, 6, 7]]]
    assert keep(policy, [squares(one), squares([2 * x for x in many])]) == [[[6, 7]], [[0, 1, 2, 3, 6, 7]]]


def test_kv_compress_by_layer_moves_no_page_between_layers():
    policy = build_policy("kv_compress", budget=4, block_size=2, options={"protect_last": 2, "scope": "layer"})
    views = [squares([0.9, 0.1, 0.1, 0.1, 0.1, 0.1, 0, 0]), squares([9, 8, 7, 6, 5, 4, 0, 0])]
    assert counts(keep(policy, views)) == [[4], [4]]


def test_corm_keeps_what_is_at_least_average():
    policy = build_policy("corm", budget=None, block_size=2, options={"window": 1, "protect_last": 2})
    kept = keep(policy, [attended([0.0] * 10, peaked(10, 3))])
    # The flat head keeps all 10, the other 3 and 8, 9 in 2 pages; 7 pages are no whole number of blocks of 2 heads.
    assert counts(kept) == [[10, 6]]
    assert {3, 8, 9} <= set(kept[0][1])


def test_corm_asks_every_query_of_the_window():
    """The older query of two sees the peak before the newest, and no query finds the rest important."""
    keys = torch.tensor(peaked(12, 3, 4))[None, None, :, None]
    queries = torch.tensor([[1.0], [-1.0]])[None, None]
    policy = build_policy("corm", budget=None, block_size=2, options={"window": 2, "protect_last": 2})
    scores = policy.score(bare_view(keys=keys, window_queries=queries))[0, 0]
    assert (scores >= 1).all()
    queries = torch.tensor([[1.0], [1.0]])[None, None]
    scores = policy.score(bare_view(keys=keys, window_queries=queries))[0, 0]
    assert (scores >= 1).nonzero().flatten().tolist() == [3, 4]


def test_head_classes_keep_everything_or_sinks_and_a_window():
    policy = build_policy("head_classes", budget=8, block_size=4, options={"heads": [[0, 0]], "protect_first": 2})
    policy = policy.for_model(2, 1)
    kept = keep(policy, [bare_view(positions=range(21)), bare_view(positions=range(21))])
    assert policy.plan(Phase.PREFILL_END, 21, 21) == 13  # 6 and 2 pages, the newest holding 1 token
    assert kept == [[list(range(21))], [[0, 1, 18, 19, 20]]]


@pytest.mark.parametrize(("num_seen", "expected"), [(40, 24), (44, 28), (41, 29), (43, 31)])
def test_head_classes_free_a_block_once_a_page_of_each_row_is_free(num_seen, expected):
    """One of two rows keeps all: of two blocks that fill, one is freed; between, the windows keep what is left over."""
    policy = build_policy("head_classes", budget=8, block_size=4, options={"heads": [[0, 0]]}).for_model(2, 1)
    resident = 24 + num_seen - 40
    assert policy.plan(Phase.PREFILL_END, 40, 40) == 24  # 10 and 2 pages
    assert policy.plan(Phase.DECODE, resident, num_seen) == min(expected, resident)
    assert policy.plan(Phase.DECODE, 32, 48) == 28


def test_mix_attention_windows_most_layers():
    policy = build_policy("mix_attention", budget=4, block_size=2, options={"full_every": 3, "full_first": 1})
    kept = keep(policy.for_model(3, 1), [bare_view(positions=range(16)) for _ in range(3)])
    assert kept == [[[12, 13, 14, 15]], [list(range(16))], [[12, 13, 14, 15]]]


def test_a_layer_that_borrows_keeps_one_page():
    options = {"full_every": 4, "share": 2}
    policy = build_policy("mix_attention", budget=6, block_size=2, options=options).for_model(8, 1)
    assert policy.lenders == (0, 1, 1, 3, 4, 5, 5, 7)
    kept = keep(policy, [bare_view(positions=range(16)) for _ in range(8)])
    # 8 + 3 + 1 + 3 + 8 + 3 + 1 + 3 pages are 4 blocks of 8, less 2 pages, which the windows get
    assert counts(kept) == [[16], [8], [2], [8], [16], [6], [2], [6]]
    assert kept[2] == kept[6] == [[14, 15]]


def test_neighbours_share_up_to_the_next_full_layer():
    lenders = {}
    for share in (1, 2, 3, 9):
        policy = build_policy("mix_attention", budget=6, block_size=2, options={"full_every": 6, "share": share})
        lenders[share] = policy.for_model(8, 1).lenders
    assert lenders == {1: None, 2: (0, 1, 1, 3, 3, 5, 6, 7), 3: (0, 1, 1, 1, 4, 4, 6, 7), 9: (0, 1, 1, 1, 1, 1, 6, 7)}


def test_inverse_key_l2_skips_the_first_layers():
    policy = build_policy("inverse_key_l2", budget=4, block_size=2, options={"skip_layers": 1}).for_model(3, 1)
    keys = torch.tensor([5.0, 1, 5, 1, 5, 1, 5, 1, 5, 5])[None, None, :, None]
    kept = keep(policy, [bare_view(keys=keys) for _ in range(3)])
    assert kept == [[list(range(10))], [[1, 3, 5, 7]], [[1, 3, 5, 7]]]
