"""Worker side of evictions that leave layers and heads unequally many tokens.

Scores come as in the equal case. What differs is how they are applied: the policy splits the pages, every head is
compacted inside its own pages, and pages that lie in blocks about to be cut move into free pages of the others.

Letters: L layers, l of them at once, N requests, H KV heads, W pages a row, T slots, M copies.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from harness.engines.vllm.compaction import Compactor
from harness.engines.vllm.groups import Alike, Group, Part, Victim
from harness.engines.vllm.layout import CacheLayout
from harness.engines.vllm.paged import PagedValues, PageGrid, SlotAddress
from harness.engines.vllm.ragged.kept_tokens import KeptCounts
from harness.engines.vllm.ragged.moves import plan_moves, slots_of
from harness.engines.vllm.ragged.placement import NULL_PAGE, Placement
from harness.engines.vllm.ragged.table import PageTable
from harness.engines.vllm.scoring import Scorer
from harness.engines.vllm.slices import FLOAT_BYTES, cut, rows_at_once
from policies import Phase, View
from policies.ragged_selection import num_kept, rank, select_ragged
from policies.views import Ranking


@dataclass(frozen=True)
class RaggedGroup(Group):
    """Victims that are scored together, and the pages of each layer and head.

    Attributes:
        table_rows: int64 [N], rows of the page table.
        page_numbers: int64 [L, N, H, W].
        num_pages: int64 [L, N, H], pages that are in use.
        lengths: int64 [L, N, H], tokens.
        padded: True if some rows of the group are longer than others.
    """

    table_rows: torch.Tensor
    page_numbers: torch.Tensor
    num_pages: torch.Tensor
    lengths: torch.Tensor
    padded: bool


@dataclass(frozen=True)
class RaggedPart(Part):
    """Some layers of a group, where pages are looked up and do not follow from blocks.

    Attributes:
        numbers: int64 [l, N, H, W].
        lengths: int64 [l, N, H], None where all slots are filled.
    """

    numbers: torch.Tensor | None = None
    lengths: torch.Tensor | None = None

    def pages(self, grid: PageGrid) -> torch.Tensor:
        """Page numbers int64 [l, N, H, W], the same in every buffer."""
        return self.numbers


class RaggedScorer(Scorer):
    """Tells the policy how long each row is."""

    def _view(self, part: RaggedPart, positions: torch.Tensor, layers: slice) -> View:
        view = super()._view(part, positions, layers)
        if part.lengths is None:
            return view
        return replace(view, lengths=part.lengths[layers].flatten(0, 1))


class RaggedCompactor(Compactor):
    """Evicts in place, each layer and head its own number of tokens.

    Attributes:
        table: who holds which page.
        kept_counts: what layers and heads kept of prompts.
        measured: request -> tokens that stayed on average, where the data decide how many.
    """

    def __init__(self, *args: Any, table: PageTable, **kwargs: Any) -> None:
        """As `Compactor`; `table`: who holds which page."""
        super().__init__(*args, **kwargs)
        self.table = table
        self.kept_counts = KeptCounts()
        self.measured: dict[str, int] = {}
        self._placement = Placement(self._layout.grid)
        self._scorer = RaggedScorer(
            self._policy, self._layout, self._observers, self._directions, kwargs["average_over_ranks"]
        )

    def forget(self, request_id: str) -> None:
        """The request is finished or preempted."""
        super().forget(request_id)
        self.table.release(request_id)

    def num_kept(self, victim: Victim) -> int:
        """See `Compactor.num_kept`."""
        return self.measured.pop(victim.request_id, victim.eviction.num_keep)

    def resident_positions(self, request_id: str, block_ids: Sequence[int], num_resident: int) -> list[list[list[int]]]:
        """See `Compactor.resident_positions`."""
        block_size = self._policy.block_size
        blocks = list(block_ids[: -(-num_resident // block_size)])
        row = self.table.hold([request_id], [blocks])
        lengths = num_resident + (self.table.num_pages(row, len(blocks))[:, 0] - len(blocks)) * block_size
        pages = self.table.read(row, self.table.longest([request_id]))[:, 0]
        positions = self.positions.read(pages, pages.shape[-1] * block_size)
        return [
            [row[:length].sort().values.tolist() for row, length in zip(rows, counts, strict=True)]
            for rows, counts in zip(positions, lengths.tolist(), strict=True)
        ]

    def _gather(self, victims: list[Victim], alike: Alike) -> RaggedGroup:
        group = super()._gather(victims, alike)
        blocks = group.block_table.shape[1]
        rows = self.table.hold(group.request_ids, [victim.block_ids for victim in victims])
        num_pages = self.table.num_pages(rows, blocks)
        return RaggedGroup(
            **vars(group),
            table_rows=rows,
            page_numbers=self.table.read(rows, self.table.longest(group.request_ids)),
            num_pages=num_pages,
            lengths=alike.num_before + (num_pages - blocks) * self._policy.block_size,
            padded=not self.table.is_equal(group.request_ids),
        )

    def _evict_group(self, group: RaggedGroup, num_layers: int) -> None:
        """Evict, scoring at most `num_layers` at once."""
        policy, alike = self._policy, group.alike
        width = group.page_numbers.shape[-1]
        num_tokens = width * policy.block_size if group.padded else alike.num_before
        padding = torch.arange(num_tokens, device=self._device) >= group.lengths[..., None]
        positions = self.positions.read(group.page_numbers, num_tokens).long().masked_fill_(padding, -1)
        scores = self._all_scores(group, positions, num_layers)
        self._sum_of_scores += scores.masked_fill(padding, 0).sum(dtype=torch.float64)
        if not policy.measured:
            self._apply(group, positions, scores)
            return
        for part in self._by_demand(group, positions, scores):
            self._apply(*part)

    def _by_demand(
        self, group: RaggedGroup, positions: torch.Tensor, scores: torch.Tensor
    ) -> Iterator[tuple[RaggedGroup, torch.Tensor, torch.Tensor]]:
        """The group in parts that keep equally many tokens, without those that keep all. Waits for the device."""
        alike, block_size = group.alike, self._policy.block_size
        ranking = rank(self._policy, alike.phase, scores, positions, group.lengths, group.num_seen, alike.num_keep)
        members: dict[int, list[int]] = defaultdict(list)
        for index, pages in enumerate(self._policy.demand(ranking).tolist()):
            kept = (pages - 1) * block_size + ranking.rest
            self.measured[group.request_ids[index]] = kept
            if kept < alike.num_before:
                members[kept].append(index)
        for kept, chosen in members.items():
            yield _some(group, chosen, kept), positions[:, chosen], scores[:, chosen]

    def _apply(self, group: RaggedGroup, positions: torch.Tensor, scores: torch.Tensor) -> None:
        """Let the policy split the pages, compact, and clear the blocks that are about to be cut."""
        alike = group.alike
        policy = self._policy.for_budget(alike.budget)
        ranking = rank(policy, alike.phase, scores, positions, group.lengths, group.num_seen, alike.num_keep)
        shares = policy.split(ranking)
        counts = num_kept(ranking, shares)
        if alike.phase is Phase.PREFILL_END and policy.allocation == "ragged":
            self.kept_counts.add(counts)
        self._compact(group, select_ragged(ranking, shares), counts)
        self._give_back(group, shares, ranking)
        if self._kept is not None:
            self._kept.evicted(group.request_ids, alike.num_keep)

    def _all_scores(self, group: RaggedGroup, positions: torch.Tensor, num_layers: int) -> torch.Tensor:
        """float32 [L, N, H, T] of all resident tokens, anything in padding."""
        num_tokens, numbers = positions.shape[-1], group.page_numbers
        lengths = group.lengths if group.padded else None
        asked = replace(group, alike=group.alike._replace(num_before=num_tokens))
        if group.alike.num_old_blocks:
            asked, numbers, positions = self._without_scores(group)
            lengths = None
        scores = []
        for layers in cut(self._num_layers, num_layers):
            part = RaggedPart(
                asked, layers, numbers=numbers[layers], lengths=None if lengths is None else lengths[layers]
            )
            scores.append(self._scorer.scores(part, positions[layers], num_layers))
        joined = torch.cat(scores).expand(-1, -1, self._layout.grid.num_heads, -1)
        if self._kept is None:
            return joined
        self._kept.values.store(numbers, joined)
        return self._kept.values.read(group.page_numbers, num_tokens)

    def _without_scores(self, group: RaggedGroup) -> tuple[RaggedGroup, torch.Tensor, torch.Tensor]:
        """The pages behind those that have scores, equally many of each layer and head, and their positions."""
        alike, block_size = group.alike, self._policy.block_size
        num_tokens = alike.num_before - alike.num_old_blocks * block_size
        num_new = -(-num_tokens // block_size)
        places = group.num_pages[..., None] + torch.arange(-num_new, 0, device=group.num_pages.device)
        numbers = group.page_numbers.gather(-1, places)
        rest = replace(group, alike=alike._replace(num_before=num_tokens, num_old_blocks=0))
        return rest, numbers, self.positions.read(numbers, num_tokens).long()

    def _compact(self, group: RaggedGroup, keep: torch.Tensor, kept: torch.Tensor) -> None:
        """Bring the kept tokens, `kept` int64 [L, N, H] of each row, to the front of the row's own pages."""
        alike, block_size = group.alike, self._policy.block_size
        rows = self._num_layers * self._layout.grid.num_heads
        limit = rows * alike.num_keep
        if alike.phase is Phase.DECODE:
            limit = min(limit, rows * (alike.num_before - alike.num_keep))
        slots = slots_of(group.page_numbers, block_size)[..., : keep.shape[-1]]
        source, target, needed = plan_moves(keep, kept, slots, alike.phase, limit)
        null = NULL_PAGE * block_size
        source, target = (torch.where(needed, moved, null).flatten() for moved in (source, target))
        for values in self._moving():
            for piece in cut(len(source), self._slots_at_once()):
                addresses = (
                    SlotAddress(moved // block_size, moved % block_size) for moved in (source[piece], target[piece])
                )
                values.move(*addresses)

    def _give_back(self, group: RaggedGroup, shares: torch.Tensor, ranking: Ranking) -> None:
        """Clear the blocks that are about to be cut, and write down who holds what."""
        numbers = group.page_numbers
        stays = torch.arange(numbers.shape[-1], device=numbers.device) < shares[..., None]
        placed = self._placement.place(numbers, stays, group.block_table, ranking.mean_pages)
        for values in self._moving():
            for piece in cut(len(placed.source), max(1, self._slots_at_once() // self._policy.block_size)):
                values.copy_pages(placed.source[piece], placed.target[piece])
        self.table.evicted(group.request_ids, group.table_rows, placed.pages, shares, ranking.mean_pages)

    def _moving(self) -> list[CacheLayout | PagedValues]:
        return [self._layout, *self._beside()]

    def _slots_at_once(self) -> int:
        """Tokens that may be copied at once."""
        return rows_at_once(FLOAT_BYTES * 2 * self._layout.head_size, self._device)


def _some(group: RaggedGroup, chosen: list[int], num_keep: int) -> RaggedGroup:
    """Some of a group's requests, which keep `num_keep` tokens on average."""
    return replace(
        group,
        alike=group.alike._replace(num_keep=num_keep),
        request_ids=[group.request_ids[index] for index in chosen],
        rows=None if group.rows is None else group.rows[chosen],
        block_table=group.block_table[chosen],
        num_seen=group.num_seen[chosen],
        table_rows=group.table_rows[chosen],
        page_numbers=group.page_numbers[:, chosen],
        num_pages=group.num_pages[:, chosen],
        lengths=group.lengths[:, chosen],
    )
