"""From scores to what leaves: the part of eviction that all policies share.

Items are what a policy evicts at once: tokens, or blocks of `block_size` slots. Leading dimensions (L layers,
N requests) are independent rows; Hs is H for a choice per head and 1 for a shared one; I is the number of candidates.
"""

from dataclasses import dataclass, field

import torch

from policies.base import Phase, Policy, Unit

SCORE_BITS = 18
LEVEL_BITS = 8 + SCORE_BITS  # sign, exponent and SCORE_BITS - 1 bits of the fraction
DROPPED_BITS = 32 - LEVEL_BITS
POSITION_BITS = 31
BEHIND_ALL = 1 << 30  # more than any position


@dataclass(frozen=True, eq=False)
class Candidates:
    """What may leave, in the order of (protected, score, position), the lowest first.

    Attributes:
        scores: float32 [..., I].
        positions: int32 or int64 [..., I], different ones in a row, below `BEHIND_ALL`.
        protected: bool [..., I]; None where nothing is.
        some_free: no row is all protected, which is known beforehand.
    """

    scores: torch.Tensor
    positions: torch.Tensor
    protected: torch.Tensor | None
    some_free: bool
    _found: dict[int, torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        """I."""
        return self.scores.shape[-1]

    def lowest(self, count: int) -> torch.Tensor:
        """Indices int64 [..., count] of the `count` lowest, in no order; looked for once."""
        if count not in self._found:
            self._found[count] = (
                self._lowest_one()
                if count == 1 and self.some_free
                else self._ranks().topk(count, dim=-1, largest=False, sorted=False).indices
            )
        return self._found[count]

    def highest(self, count: int) -> torch.Tensor:
        """Indices int64 [..., count] of the `count` highest, in no order."""
        return self._ranks().topk(count, dim=-1, sorted=False).indices

    def _ranks(self) -> torch.Tensor:
        return ranks(self.scores, self.positions.long(), self.protected)

    def _lowest_one(self) -> torch.Tensor:
        """Of those with the lowest score the earliest: half the memory of ranks, and passes that vectorise."""
        scores = comparable(self.scores)
        if self.protected is not None:
            scores = scores.masked_fill(self.protected, float("inf"))
        stays = scores > scores.amin(dim=-1, keepdim=True)
        if self.protected is not None:
            stays = stays.logical_or_(self.protected)  # beside others that are as large
        return torch.add(self.positions, stays, alpha=BEHIND_ALL).argmin(dim=-1, keepdim=True)


def reduce_heads(policy: Policy, scores: torch.Tensor) -> torch.Tensor:
    """Mean over the KV heads [..., H, T] -> [..., 1, T], unless every head chooses for itself."""
    return scores if policy.per_head or scores.shape[-2] == 1 else scores.mean(dim=-2, keepdim=True)


def item_size(policy: Policy, phase: Phase) -> int:
    """Slots that leave at once."""
    return policy.block_size if policy.unit(phase) is Unit.BLOCK else 1


def candidates(
    policy: Policy, phase: Phase, scores: torch.Tensor, positions: torch.Tensor, num_seen: torch.Tensor
) -> Candidates:
    """What may leave, by the policy's unit, protection and scope.

    Protected tokens stay first, then the highest scores; among equal scores the later position stays. Scores are
    compared at `SCORE_BITS` significant bits: equal tokens have equal keys in the first layer, and rounding, which
    depends on what else is in the batch, must not decide between them.

    A block counts by the mean score of its tokens and by its latest position, and is protected if a token of it is. The
    newest block, full or partial, is no candidate: its tokens have no track record.

    Args:
        policy: gives unit, protection and scope.
        phase: gives the unit.
        scores: float32 [L, N, Hs, T].
        positions: int32 or int64 [L, N, Hs, T].
        num_seen: int64 [N].

    Returns:
        [L, N, Hs, I].
    """
    # A block leaves while decoding when the newest one has just filled, so that the newest B tokens are no candidates.
    in_newest_block = phase is Phase.DECODE and policy.unit(phase) is Unit.BLOCK
    protect_last = 0 if in_newest_block and policy.protect_last <= policy.block_size else policy.protect_last
    protected = _protected(positions, policy.protect_first, num_seen, protect_last)
    together = phase is Phase.DECODE and policy.shared_by_layers
    if together:
        scores = _mean_over_layers(scores)
        positions = positions[:1].expand_as(positions)
        if protected is not None:
            protected = protected.any(dim=0, keepdim=True).expand_as(protected)
    if policy.unit(phase) is Unit.BLOCK:
        scores = _blocks(scores, policy.block_size).mean(dim=-1)
        positions = _blocks(positions, policy.block_size).amax(dim=-1)
        protected = None if protected is None else _blocks(protected, policy.block_size).any(dim=-1)
    # Protected tokens may lie in as many blocks, and elsewhere in each layer; a row's own are fewer than the budget.
    is_token = item_size(policy, phase) == 1
    some_free = not together and (is_token or policy.protect_first + protect_last < scores.shape[-1])
    return Candidates(scores, positions, protected, some_free)


def _protected(positions: torch.Tensor, first: int, num_seen: torch.Tensor, last: int) -> torch.Tensor | None:
    """The `first` and the `last` tokens, bool as `positions`; None if there are none to protect."""
    oldest = positions < first if first else None
    newest = positions >= (num_seen - last).to(positions.dtype)[:, None, None] if last else None
    if oldest is None or newest is None:
        return newest if oldest is None else oldest
    return oldest | newest


def ranks(scores: torch.Tensor, positions: torch.Tensor, protected: torch.Tensor | None) -> torch.Tensor:
    """One int64 for each (protected, score, position), in that order: [...] each -> [...].

    Positions are below 2^31, and -1 for padding.
    """
    level = _level(scores)
    if protected is not None:
        level = torch.add(level, protected, alpha=1 << LEVEL_BITS)
    return torch.add(positions, level, alpha=1 << POSITION_BITS)


def select(
    policy: Policy,
    phase: Phase,
    scores: torch.Tensor,
    positions: torch.Tensor,
    num_seen: torch.Tensor,
    num_keep: int,
) -> torch.Tensor:
    """What stays, as a mask; arguments as of `candidates`.

    Returns:
        bool [L, N, Hs, T] with exactly `num_keep` True in every row.
    """
    size = item_size(policy, phase)
    leaving = candidates(policy, phase, scores, positions, num_seen).lowest((scores.shape[-1] - num_keep) // size)
    return staying(leaving, size, scores.shape[-1])


def staying(leaving: torch.Tensor, size: int, num_tokens: int) -> torch.Tensor:
    """Mask [..., T] of the slots that stay when the items `leaving` [..., k], `size` slots each, leave."""
    slots = leaving
    if size > 1:
        slots = (leaving[..., None] * size + torch.arange(size, device=leaving.device)).flatten(-2)
    keep = torch.ones(*leaving.shape[:-1], num_tokens, dtype=torch.bool, device=leaving.device)
    return keep.scatter_(-1, slots, False)


def _mean_over_layers(scores: torch.Tensor) -> torch.Tensor:
    """Layers differ in scale, so each is divided by its own mean magnitude first."""
    scale = scores.abs().mean(dim=-1, keepdim=True).clamp_min(1e-12)
    return (scores / scale).mean(dim=0, keepdim=True).expand_as(scores)


def _blocks(values: torch.Tensor, block_size: int) -> torch.Tensor:
    """All blocks but the newest: [..., T] -> [..., I, B]."""
    num_candidates = (values.shape[-1] - 1) // block_size
    return values[..., : num_candidates * block_size].unflatten(-1, (num_candidates, block_size))


def comparable(scores: torch.Tensor) -> torch.Tensor:
    """float32 rounded to `SCORE_BITS` significant bits, halves away from zero."""
    return _rounded(scores).bitwise_and_(-1 << DROPPED_BITS).view(torch.float32)


def _level(scores: torch.Tensor) -> torch.Tensor:
    """int32 of `LEVEL_BITS` bits, in the order of comparable scores."""
    rounded = _rounded(scores) >> DROPPED_BITS
    return torch.where(rounded < 0, -(1 << (LEVEL_BITS - 1)) - rounded, rounded)


def _rounded(scores: torch.Tensor) -> torch.Tensor:
    """The bits of float32 as int32, of which the `LEVEL_BITS` first are rounded and the others arbitrary."""
    return scores.float().view(torch.int32) + (1 << (DROPPED_BITS - 1))  # rounds the magnitude: the sign is its own bit
