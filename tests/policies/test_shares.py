"""The vectorised arithmetic of shares against plain Python, and its laws."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rankings import candidates_of, rankings, some_policy

from policies import Phase
from policies.ragged_selection import num_kept, rank, select_ragged
from policies.shares import best_tokens, mean_tokens, page_limits, split_by_best_page, split_by_wishes

many = settings(max_examples=120, deadline=None)


def by_request(ranking, pages_of, over_layers):
    """int64 [L, N, H] from `pages_of(request, candidates, layers)` for each group of layers that share."""
    num_layers, num_requests, _ = ranking.lengths.shape
    pages = torch.zeros(ranking.lengths.shape, dtype=torch.int64)
    for request in range(num_requests):
        candidates = candidates_of(ranking, request)
        for layers in [range(num_layers)] if over_layers else [[layer] for layer in range(num_layers)]:
            for (layer, head), count in pages_of(request, candidates, layers).items():
                pages[layer, request, head] = count
    return pages


@many
@given(ranking=rankings(), seed=st.integers(0, 2**31), over_layers=st.booleans())
def test_wishes_are_met_as_plain_python_meets_them(ranking, seed, over_layers):
    if not over_layers and not _layers_can_share(ranking):
        return
    generator = torch.Generator().manual_seed(seed)
    wishes = torch.randint(0, 60, ranking.lengths.shape, generator=generator).double() / 2

    def pages_of(request, candidates, layers):
        return candidates.give_by_wishes(layers, wishes[:, request].tolist())

    found = split_by_wishes(ranking, wishes, over_layers=over_layers)
    assert torch.equal(found, by_request(ranking, pages_of, over_layers))


@many
@given(ranking=rankings(), over_layers=st.booleans())
def test_best_pages_stay_as_plain_python_chooses_them(ranking, over_layers):
    if not over_layers and not _layers_can_share(ranking):
        return

    def pages_of(_, candidates, layers):
        def worth(layer, head, page):
            largest = candidates.rows[layer][head][candidates.size(page)]
            return float("inf") if largest.protected else largest.score

        return candidates.give(layers, worth)

    found = split_by_best_page(ranking, over_layers=over_layers)
    assert torch.equal(found, by_request(ranking, pages_of, over_layers))


@many
@given(ranking=rankings(), total=st.integers(0, 40))
def test_best_tokens_of_a_layer_are_counted_by_head(ranking, total):
    _, num_requests, num_heads = ranking.lengths.shape
    found = best_tokens(ranking, total)
    for request in range(num_requests):
        for layer, heads in enumerate(candidates_of(ranking, request).rows):
            tokens = [
                (-float("inf") if entry.protected else -entry.score, place, head)
                for head, row in enumerate(heads)
                for place, entry in enumerate(row)
            ]
            best = [head for _, _, head in sorted(tokens)[:total]]
            if len(tokens) >= total:
                assert found[layer, request].tolist() == [best.count(head) for head in range(num_heads)]


@many
@given(ranking=rankings())
def test_limits_of_a_row(ranking):
    least, most = page_limits(ranking)
    for request in range(ranking.lengths.shape[1]):
        candidates = candidates_of(ranking, request)
        for layer, heads in enumerate(candidates.rows):
            for head, row in enumerate(heads):
                assert (least[layer, request, head], most[layer, request, head]) == candidates.limits(row)


@many
@given(ranking=rankings())
def test_each_row_keeps_its_best(ranking):
    pages = split_by_best_page(ranking, over_layers=True)
    counts, mask = num_kept(ranking, pages), select_ragged(ranking, pages)
    assert counts.float().mean(dim=(0, 2)).tolist() == [mean_tokens(ranking)] * counts.shape[1]
    for request in range(ranking.lengths.shape[1]):
        for layer, heads in enumerate(candidates_of(ranking, request).rows):
            for head, row in enumerate(heads):
                kept = ranking.positions[layer, request, head][mask[layer, request, head]].tolist()
                best = [entry.position for entry in row[: int(counts[layer, request, head])]]
                assert sorted(kept) == sorted(best)


def _layers_can_share(ranking):
    """Each layer alone can hold its mean."""
    least, most = page_limits(ranking)
    total = ranking.mean_pages * ranking.lengths.shape[2]
    return bool(((least.sum(dim=-1) <= total) & (total <= most.sum(dim=-1))).all())


def equal_rows(num_layers, num_heads, num_tokens, mean_keep, scores=None, **protection):
    positions = torch.arange(num_tokens).expand(num_layers, 1, num_heads, num_tokens)
    scores = torch.zeros(positions.shape) if scores is None else torch.tensor(scores).float()[:, None]
    lengths = torch.full((num_layers, 1, num_heads), num_tokens)
    seen = torch.tensor([num_tokens])
    return rank(some_policy(**protection), Phase.PREFILL_END, scores, positions, lengths, seen, mean_keep)


def test_one_page_is_the_least():
    ranking = equal_rows(1, 3, 40, mean_keep=8)
    wishes = torch.tensor([[[22.0, 1.0, 1.0]]]).double()  # 5.5, 0.25 and 0.25 pages of 6
    assert split_by_wishes(ranking, wishes, over_layers=False).flatten().tolist() == [4, 1, 1]


def test_largest_remainders_are_rounded_up_and_the_earlier_head_first():
    ranking = equal_rows(1, 4, 80, mean_keep=12)
    wishes = torch.tensor([[[14.0, 14.0, 11.0, 9.0]]]).double()  # 3.5, 3.5, 2.75 and 2.25 pages
    assert split_by_wishes(ranking, wishes, over_layers=False).flatten().tolist() == [4, 3, 3, 2]


def test_what_the_length_cuts_goes_to_the_others_in_equal_parts():
    ranking = equal_rows(1, 3, 20, mean_keep=12)
    wishes = torch.tensor([[[28.0, 4.0, 4.0]]]).double()  # 7, 1 and 1 pages of at most 5
    assert split_by_wishes(ranking, wishes, over_layers=False).flatten().tolist() == [5, 2, 2]


def test_all_newest_pages_hold_the_rest():
    ranking = equal_rows(1, 2, 20, mean_keep=10)  # 3 pages, the newest holding 2
    wishes = torch.tensor([[[14.0, 6.0]]]).double()
    pages = split_by_wishes(ranking, wishes, over_layers=False)
    assert pages.flatten().tolist() == [4, 2]
    assert num_kept(ranking, pages).flatten().tolist() == [14, 6]


def test_protected_tokens_hold_their_pages():
    ranking = equal_rows(1, 2, 40, mean_keep=12, protect_last=9)
    wishes = torch.tensor([[[24.0, 0.0]]]).double()
    assert split_by_wishes(ranking, wishes, over_layers=False).flatten().tolist() == [3, 3]


def test_pages_change_layer_if_all_layers_share_one_total():
    scores = [[[0] * 12], [[5] * 11 + [6]], [[9] * 4 + [1] * 8]]
    assert split_by_best_page(equal_rows(3, 1, 12, 8, scores), over_layers=True).flatten().tolist() == [1, 3, 2]


def test_a_page_is_worth_its_largest_member():
    scores = [[[9] * 4 + [3, 0, 0, 0] + [0] * 4, [9] * 4 + [2] * 8, [9] * 4 + [1] * 4 + [0] * 4]]
    assert split_by_best_page(equal_rows(1, 3, 12, 8, scores), over_layers=True).flatten().tolist() == [2, 3, 1]


def test_nothing_waits_for_the_device():
    ranking = equal_rows(2, 3, 24, mean_keep=8, protect_last=3)
    meta = type(ranking)(
        **{k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in vars(ranking).items() if k != "order"}
    )
    wishes = torch.zeros(2, 1, 3, dtype=torch.float64, device="meta")
    for pages in (
        split_by_best_page(meta, over_layers=True),
        *(split_by_wishes(meta, wishes, over_layers=o) for o in (True, False)),
    ):
        assert select_ragged(meta, pages).device.type == "meta"
    assert best_tokens(meta, torch.zeros(2, 1, dtype=torch.int64, device="meta")).device.type == "meta"
