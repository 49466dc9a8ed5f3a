"""From scores to slots where layers and heads keep unequally many tokens.

Letters as in `policies.base`; slots after a row's last token are padding.
"""

import torch

from policies.base import Phase, Policy, Ranking
from policies.selection import comparable


def rank(
    policy: Policy,
    phase: Phase,
    scores: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    num_seen: torch.Tensor,
    mean_keep: int,
) -> Ranking:
    """What `Policy.split` and `select_ragged` are asked with.

    Args:
        policy: gives protection and the block size.
        phase: when the decision is made.
        scores: float32 [L, N, H, T], anything in padding.
        positions: int64 [L, N, H, T], anything in padding.
        lengths: int64 [L, N, H].
        num_seen: int64 [N].
        mean_keep: tokens that a layer and head keeps on average, at least one, as planned.
    """
    filled = torch.arange(scores.shape[-1], device=scores.device) < lengths[..., None]
    positions = positions.masked_fill(~filled, -1)
    last_unprotected = num_seen[None, :, None, None] - policy.protect_last
    protected = (positions < policy.protect_first) | (positions >= last_unprotected)
    return Ranking(
        phase=phase,
        scores=comparable(scores).masked_fill(~filled, float("-inf")),
        positions=positions,
        protected=protected & filled,
        lengths=lengths,
        num_seen=num_seen,
        mean_pages=(mean_keep - 1) // policy.block_size + 1,
        rest=(mean_keep - 1) % policy.block_size + 1,
        block_size=policy.block_size,
    )


def num_kept(ranking: Ranking, pages: torch.Tensor) -> torch.Tensor:
    """Tokens in so many pages of a row."""
    return (pages - 1) * ranking.block_size + ranking.rest


def select_ragged(ranking: Ranking, pages: torch.Tensor) -> torch.Tensor:
    """Choose the slots that stay: the best of each row by (protected, score, position), as `policies.selection` does.

    Args:
        ranking: the candidates.
        pages: int64 [L, N, H], as `Policy.split` answers.

    Returns:
        bool [L, N, H, T] with `num_kept(ranking, pages)` True in each row.
    """
    num_tokens = ranking.order.shape[-1]
    place = torch.arange(num_tokens, device=pages.device)
    stays = place >= num_tokens - num_kept(ranking, pages)[..., None]
    return torch.zeros_like(ranking.protected).scatter_(-1, ranking.order, stays)
