"""Which slots stay where layers and heads keep unequally many tokens, by sorting Python tuples."""

import torch

from harness.engines.hf.selection import Entry, Row, row_of
from harness.engines.hf.splits import Candidates, demanded_pages, split_pages
from policies.base import Phase, Policy


def choose_kept_ragged(
    policy: Policy,
    phase: Phase,
    scores: list[list[torch.Tensor]],
    positions: list[list[list[int]]],
    num_seen: int,
    mean_keep: int,
) -> list[list[set[int]]]:
    """Slots that stay, for every layer and KV head; all of them where the data decide so.

    Args:
        policy: a ragged one.
        phase: when the decision is made.
        scores: float32 [T] of each layer and head.
        positions: position of each slot.
        num_seen: tokens attended so far.
        mean_keep: as planned.

    Raises:
        ValueError: a score is not finite.
    """
    rows = [
        [row_of(policy, s.tolist(), p, num_seen) for s, p in zip(layer_scores, layer_positions, strict=True)]
        for layer_scores, layer_positions in zip(scores, positions, strict=True)
    ]
    candidates = _candidates(policy, rows, mean_keep)
    if policy.measured:
        num_pages = demanded_pages(policy, phase, candidates, num_seen)
        candidates = _candidates(policy, rows, candidates.size(num_pages))
    pages = split_pages(policy, phase, candidates, num_seen)
    return [
        [_best(row, candidates.size(count)) for row, count in zip(heads, counts, strict=True)]
        for heads, counts in zip(rows, pages, strict=True)
    ]


def _candidates(policy: Policy, rows: list[list[Row]], mean_keep: int) -> Candidates:
    block_size = policy.block_size
    best_first = [[sorted(row, key=Entry.rank, reverse=True) for row in heads] for heads in rows]
    return Candidates(best_first, -(-mean_keep // block_size), (mean_keep - 1) % block_size + 1, block_size)


def _best(row: Row, num_keep: int) -> set[int]:
    """Slots of the `num_keep` greatest entries."""
    return set(sorted(range(len(row)), key=lambda slot: row[slot].rank())[len(row) - num_keep :])
