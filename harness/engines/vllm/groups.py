"""Requests that are evicted from together, and the layers of them that are at once.

Letters: L layers, l of them at once, N requests, H KV heads, W blocks of a request, T resident tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from harness.engines.vllm.paged import PageGrid
from harness.engines.vllm.plan import Eviction
from policies import Phase


@dataclass(frozen=True)
class Victim:
    """A request to compact: its planned eviction and the physical blocks that it held before."""

    request_id: str
    eviction: Eviction
    block_ids: Sequence[int]


class Alike(NamedTuple):
    """What victims that are scored together have in common.

    Attributes:
        num_queries: queries that the policy's window holds.
        num_old_blocks: leading blocks whose tokens have a score already.
        num_known: leading tokens whose directions are known.
        budget: see `Eviction`.
    """

    phase: Phase
    num_before: int
    num_keep: int
    num_queries: int
    num_old_blocks: int
    num_known: int = 0
    budget: int = 0


@dataclass(frozen=True)
class Group:
    """Victims that are scored together.

    Attributes:
        rows: int64 [N], where the observers keep what they know of each request.
        num_seen: int64 [N].
        block_table: int64 [N, W].
    """

    alike: Alike
    request_ids: list[str]
    rows: torch.Tensor
    num_seen: torch.Tensor
    block_table: torch.Tensor


@dataclass(frozen=True, eq=False)
class Part:
    """Some layers of a group."""

    group: Group
    layers: slice
    _pages: dict[PageGrid, torch.Tensor] = field(default_factory=dict)

    def pages(self, grid: PageGrid) -> torch.Tensor:
        """Page numbers int64 [l, N, H, W] in a buffer."""
        if grid not in self._pages:
            self._pages[grid] = grid.numbers(self.group.block_table, self.layers)
        return self._pages[grid]


def of_layers(values: torch.Tensor, layers: slice) -> torch.Tensor:
    """Those of `layers` among [L, ...]; values of one layer stand for all, and values of as many layers are theirs."""
    return values if len(values) in (1, layers.stop - layers.start) else values[layers]
