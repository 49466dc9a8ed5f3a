"""Worker side: carries out planned evictions on the paged cache, layer by layer."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from harness.engine.layout import CacheLayout, address
from harness.engine.moves import plan_moves
from harness.engine.plan import Eviction
from policies import Phase, Policy, Signal, View
from policies.selection import reduce_heads, select


@dataclass(frozen=True)
class Victim:
    """A request to compact: its planned eviction and the physical blocks that it held before."""

    request_id: str
    eviction: Eviction
    block_ids: Sequence[int]


class PositionIndex:
    """Original position of the token in every slot of the pool: int32 [L, num_blocks, H or 1, B].

    It is paged like the cache itself, so it needs no clean-up when requests finish or are preempted.
    """

    def __init__(
        self, num_layers: int, num_blocks: int, num_heads: int, block_size: int, device: torch.device
    ) -> None:
        self._index = torch.zeros(num_layers, num_blocks, num_heads, block_size, dtype=torch.int32, device=device)
        self._block_size = block_size
        self._num_heads = num_heads

    def write(self, slot_mapping: torch.Tensor, positions: torch.Tensor) -> None:
        """Record new tokens: physical slots int64 [n] and their positions int64 [n]."""
        blocks, offsets = slot_mapping // self._block_size, slot_mapping % self._block_size
        values = positions.to(torch.int32).view(-1, 1, 1).expand(-1, self._index.shape[0], self._num_heads)
        self._index[:, blocks, :, offsets] = values

    def read(self, block_table: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Positions int64 [L, N, H or 1, T] of the first slots of each request."""
        pages = self._index[:, block_table]
        return pages.transpose(2, 3).flatten(3, 4)[..., :num_tokens].long()

    def move(self, block_table: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Follow the tokens: slots int64 [L, N, H or 1, M]."""
        for layer, page in enumerate(self._index):
            src = address(block_table, source[layer], self._num_heads, self._block_size)
            dst = address(block_table, target[layer], self._num_heads, self._block_size)
            page[dst.block, dst.head, dst.offset] = page[src.block, src.head, src.offset]


class Compactor:
    """Evicts in place. Requests with equal lengths are treated together.

    Attributes:
        seconds: host time spent so far (on CUDA: the time to queue the work).
    """

    def __init__(
        self,
        policy: Policy,
        layouts: Sequence[CacheLayout],
        num_blocks: int,
        device: torch.device,
        average_over_ranks: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Bind the caches of all layers.

        Args:
            policy: scores tokens.
            layouts: one a layer, in model order.
            num_blocks: blocks of the pool.
            device: where the caches lie.
            average_over_ranks: mean of a tensor over the tensor-parallel ranks, for a choice shared by all heads.
        """
        first = layouts[0]
        self._policy = policy
        self._layouts = layouts
        self._device = device
        self._average_over_ranks = average_over_ranks
        num_heads = first.num_heads if policy.per_head else 1
        self.positions = PositionIndex(len(layouts), num_blocks, num_heads, first.block_size, device)
        self.seconds = 0.0
        self._all_finite = torch.ones((), dtype=torch.bool, device=device)

    @property
    def scores_were_finite(self) -> bool:
        """False once a policy gave a score that is not finite. Waits for the device."""
        return bool(self._all_finite)

    @torch.inference_mode()
    def evict(self, victims: Sequence[Victim]) -> None:
        """Compact all victims; their first `num_keep` slots then hold the kept tokens."""
        start = time.perf_counter()
        groups: dict[tuple[Phase, int, int], list[Victim]] = defaultdict(list)
        for victim in victims:
            plan = victim.eviction
            groups[plan.phase, plan.num_before, plan.num_keep].append(victim)
        for (phase, num_before, num_keep), members in groups.items():
            self._evict_group(members, phase, num_before, num_keep)
        self.seconds += time.perf_counter() - start

    def _evict_group(self, victims: list[Victim], phase: Phase, num_before: int, num_keep: int) -> None:
        block_table = self._to_device([list(victim.block_ids) for victim in victims])
        num_seen = self._to_device([victim.eviction.num_seen for victim in victims])
        positions = self.positions.read(block_table, num_before)
        scores = self._scores(phase, block_table, positions, num_seen)
        self._all_finite &= torch.isfinite(scores).all()
        keep = select(self._policy, phase, scores, positions, num_seen, num_keep)
        source, target = plan_moves(keep, num_keep, phase)
        for layer, layout in enumerate(self._layouts):
            layout.move(
                address(block_table, source[layer], layout.num_heads, layout.block_size),
                address(block_table, target[layer], layout.num_heads, layout.block_size),
            )
        self.positions.move(block_table, source, target)

    def _scores(
        self, phase: Phase, block_table: torch.Tensor, positions: torch.Tensor, num_seen: torch.Tensor
    ) -> torch.Tensor:
        """float32 [L, N, H or 1, T], the same on every tensor-parallel rank where heads share one choice."""
        scores = []
        for layer, layout in enumerate(self._layouts):
            view = self._view(layer, layout, phase, block_table, positions[layer], num_seen)
            scores.append(reduce_heads(self._policy, self._policy.score(view)))
        stacked = torch.stack(scores)
        return stacked if self._policy.per_head else self._average_over_ranks(stacked)

    def _view(
        self,
        layer: int,
        layout: CacheLayout,
        phase: Phase,
        block_table: torch.Tensor,
        positions: torch.Tensor,
        num_seen: torch.Tensor,
    ) -> View:
        keys = values = None
        if {Signal.KEYS, Signal.VALUES} & self._policy.signals:
            keys, values = layout.read(block_table, positions.shape[-1])
        return View(
            layer=layer,
            num_layers=len(self._layouts),
            phase=phase,
            positions=positions,
            num_seen=num_seen,
            block_size=layout.block_size,
            keys=keys,
            values=values,
        )

    def _to_device(self, rows: list) -> torch.Tensor:
        """int64 tensor of plain numbers, copied without waiting for the device."""
        host = torch.tensor(rows, dtype=torch.int64)
        if self._device.type == "cpu":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)
