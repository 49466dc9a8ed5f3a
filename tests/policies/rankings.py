"""Random candidates to split, and the rules of `policies.shares` and `policies.ragged_selection` in plain Python."""

import torch
from hypothesis import strategies as st

from policies import Phase, build_policy
from policies.base import Ranking
from policies.ragged_selection import rank

BUDGET, BLOCK = 64, 4


def some_policy(protect_first=0, protect_last=0, name="random", **options):
    options |= {"protect_first": protect_first, "protect_last": protect_last}
    return build_policy(name, budget=BUDGET, block_size=BLOCK, options=options)


@st.composite
def rankings(draw, equal_lengths=False):
    """Rows of whole pages and a common partial one, few distinct scores, and a mean that fits."""
    num_layers, num_requests, num_heads = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    partial = draw(st.integers(1, BLOCK))
    shape = (num_layers, num_requests, num_heads)
    extra = torch.randint(0, 6, shape, generator=generator)
    if equal_lengths:
        extra = torch.full(shape, int(extra.max()))
    protect_first, protect_last = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    needed = -(-(protect_first + protect_last) // BLOCK)
    lengths = (extra + needed) * BLOCK + partial
    num_tokens, num_seen = int(lengths.max()), int(lengths.max()) + draw(st.integers(0, 5))
    positions = torch.stack([_positions(n, num_tokens, num_seen, protect_first, generator) for n in lengths.flatten()])
    pages = int((extra + needed + 1).reshape(num_layers, num_requests, num_heads).float().mean(dim=(0, 2)).min())
    mean_pages = draw(st.integers(needed + 1, max(pages, needed + 1)))
    most_rest = BLOCK if mean_pages < pages else partial
    mean_keep = (mean_pages - 1) * BLOCK + draw(st.integers(1, min(partial, most_rest)))
    scores = torch.randint(-3, 4, (*shape, num_tokens), generator=generator) / 2
    policy = some_policy(protect_first, protect_last)
    seen = torch.full((num_requests,), num_seen)
    return rank(policy, Phase.PREFILL_END, scores, positions.reshape(*shape, num_tokens), lengths, seen, mean_keep)


def _positions(length, num_tokens, num_seen, protect_first, generator):
    """`length` distinct positions, sinks and the newest among them, in random slots; then padding with nonsense."""
    rest = protect_first + torch.randperm(num_seen - protect_first, generator=generator)
    kept = torch.cat([torch.arange(protect_first), rest])[: int(length)]
    kept = kept[torch.randperm(int(length), generator=generator)]
    return torch.cat([kept, torch.zeros(num_tokens - int(length), dtype=torch.int64)])


def rows_of(ranking: Ranking, request: int) -> list[list[list[tuple[bool, float, int]]]]:
    """[layer][head] -> (protected, score, position) of each token."""
    shape = ranking.lengths.shape
    return [
        [
            list(
                zip(
                    ranking.protected[layer, request, head, :n].tolist(),
                    ranking.scores[layer, request, head, :n].tolist(),
                    ranking.positions[layer, request, head, :n].tolist(),
                    strict=True,
                )
            )
            for head in range(shape[2])
            for n in [int(ranking.lengths[layer, request, head])]
        ]
        for layer in range(shape[0])
    ]


def limits(row, ranking: Ranking) -> tuple[int, int]:
    """By trying: the fewest pages that hold the protected tokens, the most that the row can fill."""
    needed = sum(protected for protected, _, _ in row)
    sizes = {pages: (pages - 1) * ranking.block_size + ranking.rest for pages in range(1, len(row) + 2)}
    return (
        min(pages for pages, size in sizes.items() if size >= needed),
        max(pages for pages, size in sizes.items() if size <= len(row)),
    )


def give_pages(rows, worth, total: int, ranking: Ranking) -> list[int]:
    """One page after the other to the row whose next page is worth most; `worth(row index, page index)`."""
    bounds = [limits(row, ranking) for row in rows]
    pages = [least for least, _ in bounds]
    while sum(pages) < total:
        open_rows = [index for index, (_, most) in enumerate(bounds) if pages[index] < most]
        best = max(open_rows, key=lambda index: (worth(index, pages[index]), -pages[index], -index))
        pages[best] += 1
    assert sum(pages) == total
    return pages
