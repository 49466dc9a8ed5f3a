"""Scores that are kept beside the cache, for policies whose score of a token never changes.

Without them every eviction would read all resident keys and values again; with them each token is read once.

Letters: L layers, N requests, H heads (1 where all share one choice), T resident tokens, B slots a block.
"""

from collections.abc import Iterable

import torch

from harness.engines.vllm.paged import PagedValues


class KeptScores:
    """One score a slot of the pool; slots behind a request's last eviction have none yet."""

    def __init__(self, values: PagedValues) -> None:
        """`values`: float32, where the scores lie."""
        self.values = values
        self._num_scored: dict[str, int] = {}

    def num_old_blocks(self, request_id: str) -> int:
        """Leading blocks of the request whose slots all have a score."""
        return self._num_scored.get(request_id, 0) // self.values.grid.block_size

    def complete(self, pages: torch.Tensor, num_old_blocks: int, scores: torch.Tensor) -> torch.Tensor:
        """Add the scores [L, N, H, T'] of the slots behind `num_old_blocks`; pages int64 [L, N, H, W].

        Returns:
            Those of all slots, [L, N, H, T].
        """
        self.values.store(pages[..., num_old_blocks:], scores)
        return self.values.read(pages, num_old_blocks * self.values.grid.block_size + scores.shape[-1])

    def evicted(self, request_ids: Iterable[str], num_keep: int) -> None:
        """The requests' first `num_keep` slots hold what was kept, and its scores."""
        self._num_scored.update(dict.fromkeys(request_ids, num_keep))

    def forget(self, request_id: str) -> None:
        """The request is finished or preempted."""
        self._num_scored.pop(request_id, None)
