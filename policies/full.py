"""Full cache: nothing is evicted. The reference that every other row of a table is compared with."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from policies.base import Phase, Policy, View


@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Keep everything. Needs nothing, costs nothing; memory grows with every token."""

    name: ClassVar[str] = "full"
    evicts: ClassVar[bool] = False
    takes_budget: ClassVar[bool] = False

    def plan(self, phase: Phase, num_resident: int, num_seen: int | None = None) -> int:
        """All tokens stay."""
        return num_resident

    def score(self, view: View) -> torch.Tensor:
        """Never called by an engine; all tokens weigh the same."""
        return torch.ones_like(view.positions, dtype=torch.float32)
