"""Random candidates to split, as tensors and as the reference engine's plain rows."""

import torch
from hypothesis import strategies as st

from harness.engines.hf.selection import Entry
from harness.engines.hf.splits import Candidates
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


def candidates_of(ranking: Ranking, request: int) -> Candidates:
    """One request as the reference sees it."""
    rows = [
        [
            sorted(map(Entry, *(x[layer, request, head, :n].tolist() for x in columns)), key=Entry.rank, reverse=True)
            for head, n in enumerate(ranking.lengths[layer, request].tolist())
        ]
        for columns in [(ranking.protected, ranking.scores, ranking.positions)]
        for layer in range(len(ranking.lengths))
    ]
    return Candidates(rows, ranking.mean_pages, ranking.rest, ranking.block_size)
