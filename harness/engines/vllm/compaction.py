"""Worker side: carries out planned evictions on the paged cache, layer by layer.

Letters: L layers, N requests, H KV heads, T resident tokens, D head size.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from harness.engines.vllm.kept_scores import KeptScores
from harness.engines.vllm.layout import CacheLayout
from harness.engines.vllm.moves import plan_moves
from harness.engines.vllm.observers import Observers
from harness.engines.vllm.paged import PagedValues, address
from harness.engines.vllm.plan import Eviction
from harness.engines.vllm.rotation import places_lost, turn_back
from harness.engines.vllm.score_check import checked_scores
from policies import Phase, Policy, Signal, Unit, View
from policies.selection import select


@dataclass(frozen=True)
class Victim:
    """A request to compact: its planned eviction and the physical blocks that it held before."""

    request_id: str
    eviction: Eviction
    block_ids: Sequence[int]


class _Alike(NamedTuple):
    """What victims that are scored together have in common.

    Attributes:
        num_queries: queries that the policy's window holds.
        num_old_blocks: leading blocks whose tokens have a score already.
    """

    phase: Phase
    num_before: int
    num_keep: int
    num_queries: int
    num_old_blocks: int


@dataclass(frozen=True)
class _Group:
    """Victims that are scored together.

    Attributes:
        rows: int64 [N], where the observers keep what they know of each request; None without observers.
        block_table: int64 [N, blocks].
        num_seen: int64 [N].
        positions: int64 [L, N, H or 1, T].
        mass: float32 [L, N, H, T] if the policy asked for it.
    """

    alike: _Alike
    request_ids: list[str]
    rows: torch.Tensor | None
    block_table: torch.Tensor
    num_seen: torch.Tensor
    positions: torch.Tensor
    mass: torch.Tensor | None


class Compactor:
    """Evicts in place. Requests with equal lengths are treated together.

    Attributes:
        positions: original position of the token in every slot of the pool.
        seconds: host time spent so far (on CUDA: the time to queue the work).
    """

    def __init__(
        self,
        policy: Policy,
        layouts: Sequence[CacheLayout],
        *,
        num_blocks: int,
        observers: Observers | None,
        inv_freq: torch.Tensor | None,
        average_over_ranks: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
    ) -> None:
        """Bind the caches of all layers.

        Args:
            policy: scores tokens.
            layouts: one a layer, in model order.
            num_blocks: blocks of the pool.
            observers: signals of the forward pass, None if the policy needs none.
            inv_freq: the model's rotary frequencies float32 [D / 2]; needed for `cache_positions` only.
            average_over_ranks: mean of a tensor over the tensor-parallel ranks, for a choice shared by all heads.
            device: where the caches lie.
        """
        first = layouts[0]
        self._policy = policy
        self._layouts = layouts
        self._observers = observers
        self._inv_freq = inv_freq
        self._average_over_ranks = average_over_ranks
        self._device = device
        num_heads = first.num_heads if policy.per_head else 1
        self.positions = PagedValues(len(layouts), num_blocks, num_heads, first.block_size, torch.int32, device)
        self.seconds = 0.0
        self._kept: KeptScores | None = None
        if policy.scores_stay:
            self._kept = KeptScores(len(layouts), num_blocks, num_heads, first.block_size, device)
        self._all_finite = torch.ones((), dtype=torch.bool, device=device)

    @property
    def finite(self) -> torch.Tensor:
        """Bool on the device, False once a policy gave a score that is not finite."""
        return self._all_finite

    @property
    def scores_were_finite(self) -> bool:
        """False once a policy gave a score that is not finite. Waits for the device."""
        return bool(self.finite)

    @torch.inference_mode()
    def evict(self, victims: Sequence[Victim]) -> None:
        """Compact all victims; their first `num_keep` slots then hold the kept tokens."""
        start = time.perf_counter()
        groups: dict[_Alike, list[Victim]] = defaultdict(list)
        for victim in victims:
            plan = victim.eviction
            num_queries = min(self._policy.query_window, plan.num_seen)
            num_old = self._kept.num_old_blocks(victim.request_id) if self._kept else 0
            groups[_Alike(plan.phase, plan.num_before, plan.num_keep, num_queries, num_old)].append(victim)
        for alike, members in groups.items():
            self._evict_group(self._gather(members, alike))
        self.seconds += time.perf_counter() - start

    def forget(self, request_id: str) -> None:
        """The request is finished or preempted."""
        if self._kept is not None:
            self._kept.forget(request_id)

    def device_tensor(self, rows: list) -> torch.Tensor:
        """int64 tensor of plain numbers, copied without waiting for the device."""
        return async_tensor_h2d(rows, device=self._device, dtype=torch.int64)

    def _gather(self, victims: list[Victim], alike: _Alike) -> _Group:
        block_table = self.device_tensor([list(victim.block_ids) for victim in victims])
        request_ids = [victim.request_id for victim in victims]
        rows = mass = None
        if self._observers is not None:
            mass = self._observers.mass
            rows = self.device_tensor(self._observers.rows_of(request_ids))
        return _Group(
            alike=alike,
            request_ids=request_ids,
            rows=rows,
            block_table=block_table,
            num_seen=self.device_tensor([victim.eviction.num_seen for victim in victims]),
            positions=self.positions.read(block_table, alike.num_before).long(),
            mass=mass.values.read(block_table, alike.num_before) if mass else None,
        )

    def _evict_group(self, group: _Group) -> None:
        phase, num_keep = group.alike.phase, group.alike.num_keep
        scores = self._scores(group)
        self._all_finite &= torch.isfinite(scores).all()
        if self._kept is not None:
            scores = self._kept.complete(group.block_table, group.alike.num_old_blocks, scores)
        keep = select(self._policy, phase, scores, group.positions, group.num_seen, num_keep)
        if self._policy.cache_positions:
            self._renumber(group, keep)
        source, target = plan_moves(keep, num_keep, phase)
        self._move(group, source, target)
        self.positions.move(group.block_table, source, target)
        if group.mass is not None:
            self._observers.mass.values.move(group.block_table, source, target)
        if self._kept is not None:
            self._kept.values.move(group.block_table, source, target)
            self._kept.evicted(group.request_ids, num_keep)

    def _move(self, group: _Group, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy keys and values of slots [L, N, H or 1, M], block by block where decode evicts whole blocks."""
        first = self._layouts[0]
        by_block = group.alike.phase is Phase.DECODE and self._policy.decode_unit is Unit.BLOCK
        step = first.block_size if by_block else 1
        sources = address(group.block_table, source[..., ::step], first.num_heads, first.block_size)
        targets = address(group.block_table, target[..., ::step], first.num_heads, first.block_size)
        for layer, layout in enumerate(self._layouts):
            copy = layout.copy_blocks if by_block else layout.move
            copy(sources.layer(layer), targets.layer(layer))

    def _renumber(self, group: _Group, keep: torch.Tensor) -> None:
        """Rotate the keys that stay to their place among those that stay."""
        places = places_lost(group.positions, keep)
        for layer, layout in enumerate(self._layouts):
            keys, _ = layout.read(group.block_table, keep.shape[-1])
            layout.write_keys(group.block_table, turn_back(keys, places[layer], self._inv_freq))

    def _scores(self, group: _Group) -> torch.Tensor:
        """float32 [L, N, H or 1, T] of the tokens without a score; equal on all ranks where heads share one choice."""
        scores = [
            checked_scores(self._policy, self._view(group, layer), self._layouts[layer].num_heads)
            for layer in range(len(self._layouts))
        ]
        stacked = torch.stack(scores)
        return stacked if self._policy.per_head else self._average_over_ranks(stacked)

    def _view(self, group: _Group, layer: int) -> View:
        num_old = group.alike.num_old_blocks
        positions = group.positions[layer, ..., num_old * self._policy.block_size :]
        keys = values = None
        if {Signal.KEYS, Signal.VALUES} & self._policy.signals:
            keys, values = self._layouts[layer].read(group.block_table[:, num_old:], positions.shape[-1])
        observed = {}
        if self._observers is not None:
            observed = self._observers.view_fields(layer, group.rows, group.num_seen, group.alike.num_queries)
        return View(
            layer=layer,
            num_layers=len(self._layouts),
            phase=group.alike.phase,
            positions=positions,
            num_seen=group.num_seen,
            block_size=self._policy.block_size,
            keys=keys,
            values=values,
            attention_mass=None if group.mass is None else group.mass[layer],
            **observed,
        )
