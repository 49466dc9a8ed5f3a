"""What leaves, by sorting everything three times: slow and plain, to hold `policies.selection` against.

Leading dimensions (`...`: layers, requests) are independent rows; Hs is H for a choice per head and 1 for a shared one.
"""

import torch

from policies.base import Phase, Policy, Unit
from policies.selection import SCORE_BITS


def select(
    policy: Policy,
    phase: Phase,
    scores: torch.Tensor,
    positions: torch.Tensor,
    num_seen: torch.Tensor,
    num_keep: int,
) -> torch.Tensor:
    """Choose the slots that stay.

    Protected tokens stay first, then the highest scores; among equal scores the later position stays. Scores are
    compared at `SCORE_BITS` significant bits: equal tokens have equal keys in the first layer, and rounding, which
    depends on what else is in the batch, must not decide between them.

    Args:
        policy: gives unit, protection and scope.
        phase: gives the unit.
        scores: float32 [L, N, Hs, T].
        positions: int64 [L, N, Hs, T].
        num_seen: int64 [N].
        num_keep: tokens that stay in every row, as planned.

    Returns:
        bool [L, N, Hs, T] with exactly `num_keep` True in every row.
    """
    last_unprotected = num_seen[None, :, None, None] - policy.protect_last
    protected = (positions < policy.protect_first) | (positions >= last_unprotected)
    if phase is Phase.DECODE and policy.shared_by_layers:
        scores = _mean_over_layers(scores)
        protected = protected.any(dim=0, keepdim=True).expand_as(protected)
        positions = positions[:1].expand_as(positions)
    if policy.unit(phase) is Unit.TOKEN:
        return _keep_best(scores, positions, protected, num_keep)
    return _keep_best_blocks(scores, positions, protected, num_keep, policy.block_size)


def _mean_over_layers(scores: torch.Tensor) -> torch.Tensor:
    """Layers differ in scale, so each is divided by its own mean magnitude first."""
    scale = scores.abs().mean(dim=-1, keepdim=True).clamp_min(1e-12)
    return (scores / scale).mean(dim=0, keepdim=True).expand_as(scores)


def _comparable(scores: torch.Tensor) -> torch.Tensor:
    """float32 rounded to `SCORE_BITS` significant bits, halves away from zero."""
    dropped = torch.finfo(torch.float32).bits - 8 - SCORE_BITS  # 24 significant bits, one of them implicit
    bits = scores.float().contiguous().view(torch.int32)
    return ((bits + (1 << (dropped - 1))) >> dropped << dropped).view(torch.float32)


def _keep_best(scores: torch.Tensor, positions: torch.Tensor, protected: torch.Tensor, num_keep: int) -> torch.Tensor:
    """Mask of the `num_keep` best by (protected, score, position); [..., T] -> [..., T]."""
    order = positions.argsort(dim=-1)
    for key in (_comparable(scores), protected):
        order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, stable=True))
    keep = torch.zeros_like(protected)
    return keep.scatter_(-1, order[..., scores.shape[-1] - num_keep :], True)


def _keep_best_blocks(
    scores: torch.Tensor, positions: torch.Tensor, protected: torch.Tensor, num_keep: int, block_size: int
) -> torch.Tensor:
    """As `_keep_best` with blocks of slots as items: mean score, and a block with a protected token stays.

    The newest block, full or partial, is never a candidate: its tokens have no track record.
    """
    num_tokens = scores.shape[-1]
    num_candidates = (num_tokens - 1) // block_size
    shape = (*scores.shape[:-1], num_candidates, block_size)
    old = slice(0, num_candidates * block_size)
    keep_blocks = _keep_best(
        scores[..., old].reshape(shape).mean(dim=-1),
        positions[..., old].reshape(shape).amax(dim=-1),
        protected[..., old].reshape(shape).any(dim=-1),
        num_candidates - (num_tokens - num_keep) // block_size,
    )
    keep = torch.ones_like(protected)
    keep[..., old] = keep_blocks.repeat_interleave(block_size, dim=-1)
    return keep
