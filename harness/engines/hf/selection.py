"""Which slots stay, by sorting Python tuples.

Written from the rules in the docstrings of `policies.base` and `policies.selection` and sharing nothing with the fast
code, so that the two can be held against each other.
"""

import math
from typing import NamedTuple

import torch

from policies.base import Phase, Policy, Unit

SCORE_BITS = 18


class Entry(NamedTuple):
    """A token or a block."""

    protected: bool
    score: float
    position: int

    def rank(self) -> tuple[bool, float, int]:
        """What it is compared by; the greater one stays. Scores count to `SCORE_BITS` significant bits."""
        fraction, exponent = math.frexp(abs(self.score))
        rounded = math.ldexp(math.floor(math.ldexp(fraction, SCORE_BITS) + 0.5), exponent - SCORE_BITS)
        return self.protected, math.copysign(rounded, self.score), self.position


Row = list[Entry]
"""One entry a slot, of one KV head of one layer."""


def choose_kept(
    policy: Policy,
    phase: Phase,
    scores: list[torch.Tensor],
    positions: list[torch.Tensor],
    num_seen: int,
    num_keep: int,
) -> list[list[set[int]]]:
    """Slots that stay, for every layer and every row of a layer.

    Args:
        policy: gives unit, protection and scope.
        phase: gives the unit.
        scores: one tensor a layer, [H, T], or [1, T] where all heads score alike.
        positions: one int64 tensor a layer, [H, T] if every head chooses for itself, else [1, T].
        num_seen: tokens attended so far.
        num_keep: slots that stay in each row.

    Returns:
        One list of rows a layer (H rows or one, as `positions`), each a set of `num_keep` slots.

    Raises:
        ValueError: a score is not finite, or `num_keep` cannot be reached by whole blocks.
    """
    layers = [
        [row_of(policy, row_scores, row_positions, num_seen) for row_scores, row_positions in zip(s, p, strict=True)]
        for s, p in zip(_scores_of_rows(policy, scores, positions), (p.tolist() for p in positions), strict=True)
    ]
    if phase is Phase.DECODE and policy.shared_by_layers:
        layers = _one_choice_for_all_layers(layers)
    if policy.unit(phase) is Unit.TOKEN:
        return [[_best_tokens(row, num_keep) for row in layer] for layer in layers]
    return [[_best_blocks(row, num_keep, policy.block_size) for row in layer] for layer in layers]


def _scores_of_rows(
    policy: Policy, scores: list[torch.Tensor], positions: list[torch.Tensor]
) -> list[list[list[float]]]:
    """One list of scores a choice: each head's own, or the mean over heads."""
    if policy.per_head:
        return [s.expand_as(p).tolist() for s, p in zip(scores, positions, strict=True)]
    return [[[math.fsum(heads) / len(heads) for heads in zip(*s.tolist(), strict=True)]] for s in scores]


def row_of(policy: Policy, scores: list[float], positions: list[int], num_seen: int) -> Row:
    """Entries of one row.

    Raises:
        ValueError: a score is not finite.
    """
    if not all(map(math.isfinite, scores)):
        raise ValueError(f"policy {policy.name} gave a score that is not finite")
    return [
        Entry(position < policy.protect_first or position >= num_seen - policy.protect_last, score, position)
        for score, position in zip(scores, positions, strict=True)
    ]


def _one_choice_for_all_layers(layers: list[list[Row]]) -> list[list[Row]]:
    """The same rows for each layer: mean of score / mean|score|, protected if any layer protects the slot.

    The slot's position in the first layer breaks ties.
    """
    shared = []
    for rows in zip(*layers, strict=True):
        scales = [max(math.fsum(abs(entry.score) for entry in row) / len(row), 1e-12) for row in rows]
        shared.append(
            [
                Entry(
                    any(entry.protected for entry in slot),
                    math.fsum(entry.score / scale for entry, scale in zip(slot, scales, strict=True)) / len(slot),
                    slot[0].position,
                )
                for slot in zip(*rows, strict=True)
            ]
        )
    return [shared for _ in layers]


def _best_tokens(row: Row, num_keep: int) -> set[int]:
    """The `num_keep` greatest entries."""
    ascending = sorted(range(len(row)), key=lambda slot: row[slot].rank())
    return set(ascending[len(row) - num_keep :])


def _best_blocks(row: Row, num_keep: int, block_size: int) -> set[int]:
    """All slots but those of the least blocks; the newest block, full or partial, always stays.

    Raises:
        ValueError: `num_keep` cannot be reached by whole old blocks.
    """

    def block_entry(block: list[int]) -> Entry:
        tokens = [row[slot] for slot in block]
        return Entry(
            any(token.protected for token in tokens),
            math.fsum(token.score for token in tokens) / block_size,
            max(token.position for token in tokens),
        )

    slots = list(range(len(row)))
    old_blocks = [slots[start : start + block_size] for start in range(0, len(row), block_size)][:-1]
    evicted = sorted(old_blocks, key=lambda block: block_entry(block).rank())[: (len(row) - num_keep) // block_size]
    kept = set(slots).difference(*evicted)
    if len(kept) != num_keep:
        raise ValueError(f"{num_keep} of {len(row)} slots cannot stay when old blocks of {block_size} leave")
    return kept
