"""Whatever leaves, the copies bring exactly what stays below the cut, in order after a prompt."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engines.vllm.moves import plan_moves
from policies import Phase
from policies.selection import Candidates

SIZE = 4


@settings(max_examples=300, deadline=None)
@given(
    phase=st.sampled_from([Phase.PREFILL_END, Phase.DECODE]),
    size=st.sampled_from([1, SIZE]),
    num_items=st.integers(2, 20),
    leaving=st.integers(1, 19),
    seed=st.integers(0, 2**31),
)
def test_what_stays_ends_below_the_cut(phase, size, num_items, leaving, seed):
    """Two rows; of blocks the newest is no candidate, and after a prompt it may be partial."""
    leaving = min(leaving, num_items - 1)
    random = torch.Generator().manual_seed(seed)
    num_candidates = num_items if size == 1 else num_items - 1
    ranked = torch.rand(2, num_candidates, generator=random).argsort(dim=-1)
    num_tokens = num_items * size - (0 if size == 1 or phase is Phase.DECODE else seed % size)
    candidates = Candidates(ranked.float(), torch.arange(num_candidates).expand_as(ranked), None, some_free=True)
    moves = plan_moves(candidates, phase, size, num_tokens, num_tokens - leaving * size)
    assert moves.size == size
    for row in range(2):
        items = list(range(num_items))
        gone = set(ranked[row].argsort()[:leaving].tolist())
        source = moves.source if isinstance(moves.source, int) else moves.source[row].tolist()
        target = moves.target[row].tolist()
        sources = [source] * len(target) if isinstance(source, int) else source
        moved = list(items)
        for here, there in zip(sources, target, strict=True):
            moved[there] = items[here]
        kept = moved[: num_items - leaving]
        assert sorted(kept) == [item for item in items if item not in gone]
        if phase is not Phase.DECODE:
            assert kept == sorted(kept)
