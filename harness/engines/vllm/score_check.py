"""A policy's scores, checked: another package's policy may be wrong, and should be told so by name."""

import torch

from policies import Policy, View
from policies.selection import reduce_heads


def checked_scores(policy: Policy, view: View, num_heads: int) -> torch.Tensor:
    """Scores [N, H or 1, T] of the tokens in `view`, one row where all heads share a choice.

    Args:
        policy: scores.
        view: N rows, one layer of one request each, with T tokens.
        num_heads: H of the cache.

    Raises:
        RuntimeError: the policy raised, or gave something of another shape or kind; names the policy.
    """
    where = f"in layer {view.layer}" if isinstance(view.layer, int) else "in several layers at once"
    try:
        scores = policy.score(view)
    except Exception as error:
        message = f"policy {policy.name} failed {where}: {type(error).__name__}: {error}"
        raise RuntimeError(message) from error
    num_requests, _, num_tokens = view.positions.shape
    allowed = [(num_requests, heads, num_tokens) for heads in (num_heads, 1)]
    if not isinstance(scores, torch.Tensor) or tuple(scores.shape) not in allowed or not scores.is_floating_point():
        kind = f"{scores.dtype} {list(scores.shape)}" if isinstance(scores, torch.Tensor) else repr(type(scores))
        raise RuntimeError(
            f"policy {policy.name} gave scores of {kind} {where}; score() has to return float32 "
            f"[{num_requests}, {num_heads}, {num_tokens}] (requests, KV heads, tokens), or 1 in place of the heads."
        )
    return reduce_heads(policy, scores)


class ScoreWatch:
    """Finds out whether scores were finite, without ever waiting for the device: it may learn of it some steps late."""

    EVERY = 64

    def __init__(self) -> None:
        self._steps = 0
        self._reported = False
        self._seen: torch.Tensor | None = None

    def look(self, all_finite: torch.Tensor) -> bool:
        """Called once a step with the device's bool, which never turns back to True.

        Returns:
            True once: in the step in which bad scores were first seen.
        """
        self._steps += 1
        if self._reported or self._steps % self.EVERY:
            return False
        if self._seen is None:
            self._seen = torch.ones((), dtype=torch.bool, pin_memory=all_finite.is_cuda)
        self._reported = not self._seen.item()
        self._seen.copy_(all_finite, non_blocking=True)
        return self._reported
