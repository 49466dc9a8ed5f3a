"""CORM (Dai et al., arXiv 2404.15949): what no recent query found important leaves, however much that is."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from policies.attention import window_attention
from policies.base import Phase, Policy, Ranking, Signal, View
from policies.options import WholePages, check_range
from policies.ragged_selection import num_kept
from policies.shares import page_limits, split_by_wishes


@dataclass(frozen=True, kw_only=True)
class CORM(WholePages, Policy):
    """Score S_i = max over the last `window` queries t of t a_ti; a token stays if S_i >= 1, or if it is recent.

    That is the paper's rule: token i is minor for query t if its attention is below 1 / t, the average over the t
    tokens that t could see, and leaves if it is minor for all of the last `window` queries; the last `protect_last`
    tokens stay. Each KV head keeps its own tokens, those that any query head of its group needs. There is no budget:
    how much stays follows from the data, and is reported. Acts once the prompt was attended and whenever the newest
    block is full.

    Source: the paper's text, method section; no authors' code is known. Window and recent tokens of 256 are from a
    second-hand note. Needs the last queries and the keys; costs their product at each eviction.

    Deviations: the paper remembers for each query what was important when it came; here the last queries are asked anew
    over the tokens that are resident, which makes what is left a little more important. The paper evicts in every step.
    Counts are whole pages, rounded up in each head, and their sum is rounded up to whole blocks of the pool, a page of
    each layer and head; what that leaves over goes to the heads with the fewest pages, for their next best tokens.

    Attributes:
        window: queries that are remembered.
        protect_last: recent tokens that stay.
    """

    name: ClassVar[str] = "corm"
    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.WINDOW_QUERIES, Signal.KEYS})
    allocation: ClassVar[Literal["ragged"]] = "ragged"
    measured: ClassVar[bool] = True
    takes_budget: ClassVar[bool] = False
    per_head: ClassVar[bool] = True
    modes: ClassVar[tuple[str, ...]] = ("after",)

    protect_last: int = 256
    window: int = 256

    def __post_init__(self) -> None:
        """Check this policy's own option, make room for what is protected, then check the common options."""
        check_range("policy.options.window", self.window, 1)
        num_protected = self.protect_first + self.protect_last
        needed = (num_protected // self.block_size + 3) * self.block_size
        object.__setattr__(self, "budget", max(self.budget, needed))
        super().__post_init__()

    @property
    def query_window(self) -> int:
        """`window`."""
        return self.window

    def plan(self, phase: Phase, num_resident: int, num_seen: int | None = None) -> int:
        """The fewest tokens that can stay, those protected; in decode only when the newest block is full."""
        rest = (num_resident - 1) % self.block_size + 1
        if phase is Phase.DECODE and rest < self.block_size:
            return num_resident
        num_pages = -(-max(0, self.protect_first + self.protect_last - rest) // self.block_size)
        return min(num_resident, num_pages * self.block_size + rest)

    def score(self, view: View) -> torch.Tensor:
        """Attention relative to the average, at its greatest; float32 [N, H, T]."""
        window = view.window_queries.shape[2]
        num_visible = view.num_seen[:, None] - window + 1 + torch.arange(window, device=view.positions.device)
        relative = window_attention(view) * num_visible[:, None, None, :, None]
        return relative.amax(dim=(2, 3))

    def demand(self, ranking: Ranking) -> torch.Tensor:
        """Pages that hold all important tokens, as a mean rounded up, int64 [N]."""
        num_layers, _, num_heads = ranking.lengths.shape
        num_rows = num_layers * num_heads
        total = self._pages(ranking).sum(dim=(0, 2))
        return (total + num_rows - 1).div(num_rows, rounding_mode="floor").clamp_min(ranking.mean_pages)

    def split(self, ranking: Ranking) -> torch.Tensor:
        """What each head needs, and a share of what is left over; int64 [L, N, H]."""
        return split_by_wishes(ranking, num_kept(ranking, self._pages(ranking)).double(), over_layers=True)

    def _pages(self, ranking: Ranking) -> torch.Tensor:
        """Pages that hold the important and the protected tokens of each row."""
        least, most = page_limits(ranking)
        num_important = ((ranking.scores >= 1) | ranking.protected).sum(dim=-1)
        pages = (num_important - ranking.rest + ranking.block_size - 1).div(
            ranking.block_size, rounding_mode="floor"
        ) + 1
        return pages.maximum(least).minimum(most)
