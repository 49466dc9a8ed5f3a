"""Quest (Tang et al., arXiv 2406.10774): everything is kept, and each step reads the pages that could matter most."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from policies.base import Phase, Policy, View, check_choice, check_multiple
from policies.options import check_range
from policies.page_reading import best_pages
from policies.views import ReadSignal, ReadView

LEAST_PAGES = 3


@dataclass(frozen=True, kw_only=True)
class Quest(Policy):
    """Each decode step of each layer and KV head reads the C / B pages with the greatest bound on q . k.

    Source: the paper, section 3.3; authors' code. The bound of a page is the sum over channels of the greater of q_j
    times the least and q_j times the greatest k_j in it, so no key of the page has a greater product with the query.
    Prompts are attended in full. Nothing is evicted: `policy.budget` is what is **read**, and memory is that of the
    full cache. It is here as the mark of what reading less can reach.

    Costs the bounds, 2 numbers a page and channel, brought up to date as keys are written, and their product with the
    queries in each step.

    Deviations: pages are the engine's blocks (the authors: 16 tokens). Where query heads share a KV head the authors
    let each choose pages for itself; here those of a group read the same pages, see `group`. The newest page is always
    read, as in their kernels; in their evaluation code it competes.

    Attributes:
        budget: tokens that are read, the newest page included; at least three pages, as the authors.
        dense_layers: so many first layers read everything (2, as the authors).
        group: which bound counts where query heads share a KV head: the "max", so that it is still a bound for each of
            them, or the "mean".
    """

    name: ClassVar[str] = "quest"
    evicts: ClassVar[bool] = False
    per_head: ClassVar[bool] = True
    modes: ClassVar[tuple[str, ...]] = ("after",)
    reads_less: ClassVar[bool] = True
    read_signals: ClassVar[frozenset[ReadSignal]] = frozenset({ReadSignal.PAGE_BOUNDS})

    dense_layers: int = 2
    group: Literal["max", "mean"] = "max"

    def __post_init__(self) -> None:
        """Check this policy's own options, then the common ones."""
        check_range("policy.options.dense_layers", self.dense_layers, 0)
        check_choice("policy.options.group", self.group, ("max", "mean"))
        super().__post_init__()
        check_multiple("policy.budget", self.budget, self.block_size, minimum=LEAST_PAGES * self.block_size)

    @property
    def full_read_layers(self) -> int:
        """`dense_layers`."""
        return self.dense_layers

    def plan(self, phase: Phase, num_resident: int, num_seen: int | None = None) -> int:
        """All tokens stay."""
        return num_resident

    def score(self, view: View) -> torch.Tensor:
        """Never called by an engine, as nothing is evicted; all tokens weigh the same."""
        return torch.ones_like(view.positions, dtype=torch.float32)

    def read(self, view: ReadView) -> torch.Tensor:
        """The pages with the greatest bounds, bool [N, H, W]."""
        highest, lowest = (bound.float().transpose(-1, -2) for bound in (view.highest, view.lowest))
        bounds = view.queries.clamp_min(0) @ highest + view.queries.clamp_max(0) @ lowest
        bounds = bounds.amax(dim=2) if self.group == "max" else bounds.mean(dim=2)
        return best_pages(view, bounds, self.budget // self.block_size)
