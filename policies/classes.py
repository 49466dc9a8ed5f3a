"""Two classes of heads: some keep everything, the others the budget. Shared by the static policies.

A row is one layer and KV head. A row of the second class keeps C tokens, the newest page as full as everywhere. The
pool frees whole blocks only, a page of each row, so what is left of the last block stays with the second class.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from policies.base import Phase, Policy, Ranking, View
from policies.options import WholePages
from policies.shares import split_by_wishes

NOTHING = -1e9
"""Wish in tokens of a row that should get no page that another one can fill."""
Rows = Sequence[Sequence[bool]]
"""By layer and KV head: whether it keeps everything."""


def with_whole_rows(policy: Policy, whole: Rows, lenders: Sequence[int] | None = None) -> Policy:
    """A copy that knows which rows of the model keep everything, and which layers attend another one's.

    Raises:
        ValueError: all rows do.
    """
    if all(map(all, whole)):
        raise ValueError(f"policy={policy.name} leaves all heads whole, so nothing is evicted. Use policy=full.")
    bound = object.__new__(type(policy))
    vars(bound).update(vars(policy) | {"whole_rows": whole, "lenders": lenders})
    return bound


class WholeRows:
    """Plan and split of a policy, for the classes that `for_model` puts in `whole_rows`.

    A layer that attends another one's keys and values (`Policy.lenders`) keeps one page of its own, the newest, which
    nobody reads: a block of the pool is a page of each layer and head.
    """

    whole_rows: Rows | None = None

    def borrows(self, layer: int) -> bool:
        """Whether a layer attends the keys and values of another."""
        return self.lenders is not None and self.lenders[layer] != layer

    def plan_classes(self, phase: Phase, num_resident: int, num_seen: int | None) -> int:
        """Tokens that a row keeps on average, the whole ones all `num_seen`; in decode only when the newest is full.

        Raises:
            RuntimeError: the policy was not asked `for_model`.
        """
        if self.whole_rows is None:
            raise RuntimeError(f"policy {self.name} is in use without for_model")
        num_seen = num_resident if num_seen is None else num_seen
        rest = (num_seen - 1) % self.block_size + 1
        if phase is Phase.DECODE and rest < self.block_size:
            return num_resident
        pages = (num_seen - rest) // self.block_size + 1
        window = min(pages, self.budget // self.block_size)
        counts = [
            1 if self.borrows(layer) else pages if flag else window
            for layer, flags in enumerate(self.whole_rows)
            for flag in flags
        ]
        mean_pages = -(-sum(counts) // len(counts))
        return min(num_resident, (mean_pages - 1) * self.block_size + rest)

    def split_classes(self, ranking: Ranking) -> torch.Tensor:
        """Everything, or C and what is left over: int64 [L, N, H]."""
        budget = self.budget - self.block_size + ranking.rest
        whole = torch.zeros_like(ranking.lengths, dtype=torch.bool)
        for layer, flags in enumerate(self.whole_rows):
            for head, flag in enumerate(flags):
                whole[layer, :, head] = flag
        wishes = ranking.lengths.double().where(whole, budget)
        for layer in filter(self.borrows, range(len(self.whole_rows))):
            wishes[layer] = NOTHING
        return split_by_wishes(ranking, wishes, over_layers=True)


@dataclass(frozen=True, kw_only=True)
class WindowOrAll(WholeRows, WholePages, Policy):
    """A policy whose second class keeps sinks and a window, by position alone; `for_model` names the first class."""

    allocation: ClassVar[Literal["ragged"]] = "ragged"
    per_head: ClassVar[bool] = True

    def plan(self, phase: Phase, num_resident: int, num_seen: int | None = None) -> int:
        """The mean over both classes."""
        return self.plan_classes(phase, num_resident, num_seen)

    def score(self, view: View) -> torch.Tensor:
        """The position itself, float32 [N, H or 1, T]: exact below 2^24."""
        return view.positions.float()

    def split(self, ranking: Ranking) -> torch.Tensor:
        """Everything, or a window; int64 [L, N, H]."""
        return self.split_classes(ranking)
