"""Worker side: carries out planned evictions on the paged cache, as many layers at once as memory allows.

Letters: L layers, l of them at once, N requests, H KV heads, T resident tokens, D head size.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from harness.engines.vllm.groups import Alike, Group, Part, Victim, of_layers
from harness.engines.vllm.host_time import HostTime
from harness.engines.vllm.kept_scores import KeptScores
from harness.engines.vllm.key_directions import KeyDirections
from harness.engines.vllm.layout import CacheLayout
from harness.engines.vllm.moves import Moves, carry_out, plan_moves
from harness.engines.vllm.observers import Observers
from harness.engines.vllm.paged import PagedValues
from harness.engines.vllm.remainders import KeyRemainders
from harness.engines.vllm.rotation import places_lost, turn_back
from harness.engines.vllm.scoring import Scorer
from harness.engines.vllm.slices import bytes_a_head, cut, rows_at_once
from policies import Phase, Policy, Signal
from policies.selection import candidates, item_size, staying


class Compactor:
    """Evicts in place. Requests with equal lengths are treated together.

    Attributes:
        positions: original position of the token in every slot of the pool; of one layer where all choose alike.
        remainders: what rounding leaves of keys that are turned again and again, None where nothing is.
    """

    def __init__(
        self,
        policy: Policy,
        layout: CacheLayout,
        *,
        observers: Observers | None,
        inv_freq: torch.Tensor | None,
        average_over_ranks: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Bind the caches of all layers.

        Args:
            policy: scores tokens.
            layout: the caches.
            observers: signals of the forward pass, None if the policy needs none.
            inv_freq: the model's rotary frequencies float32 [D / 2]; needed for `cache_positions` only.
            average_over_ranks: mean of a tensor over the tensor-parallel ranks, for a choice shared by all heads.
        """
        grid = layout.grid
        self._policy = policy
        self._layout = layout
        self._num_layers = grid.num_layers
        self._observers = observers
        self._inv_freq = inv_freq
        kept = Signal.KEY_DIRECTIONS in policy.signals and layout.multiplies_in_place
        self._directions = KeyDirections(layout) if kept else None
        self._scorer = Scorer(policy, layout, observers, self._directions, average_over_ranks)
        self._device = grid.device
        beside = (
            1 if policy.same_in_all_layers else grid.num_layers,
            grid.num_blocks,
            grid.num_heads if policy.per_head else 1,
            grid.block_size,
        )
        self.positions = PagedValues(*beside, torch.int32, grid.device)
        self._time = HostTime()
        self._kept = KeptScores(PagedValues(*beside, torch.float32, grid.device)) if policy.scores_stay else None
        self.remainders = KeyRemainders(layout) if policy.cache_positions and layout.is_rounded else None
        self._in_all_layers = [layout] if self.remainders is None else [layout, self.remainders]
        self._sum_of_scores = torch.zeros((), dtype=torch.float64, device=grid.device)

    @property
    def finite(self) -> torch.Tensor:
        """Bool on the device, False once a policy gave a score that is not finite."""
        return torch.isfinite(self._sum_of_scores)

    @property
    def scores_were_finite(self) -> bool:
        """False once a policy gave a score that is not finite. Waits for the device."""
        return bool(self.finite)

    @property
    def host_seconds(self) -> tuple[float, float]:
        """Spent so far on evictions and on watching for them; and of that, while decoding."""
        spent = [self._time] if self._observers is None else [self._time, self._observers.time]
        return sum(time.total for time in spent), sum(time.decoding for time in spent)

    @torch.inference_mode()
    def evict(self, victims: Sequence[Victim]) -> None:
        """Compact all victims; their first `num_keep` slots then hold the kept tokens."""
        groups: dict[Alike, list[Victim]] = defaultdict(list)
        for victim in victims:
            plan = victim.eviction
            num_queries = min(self._policy.query_window, plan.num_seen)
            num_old = self._kept.num_old_blocks(victim.request_id) if self._kept else 0
            num_known = self._directions.num_known(victim.request_id) if self._directions else 0
            alike = Alike(
                plan.phase, plan.num_before, plan.num_keep, num_queries, num_old, num_known, budget=plan.budget
            )
            groups[alike].append(victim)
        for alike, members in groups.items():
            with self._time.spent(decoding=alike.phase is Phase.DECODE):
                at_once = self._rows_at_once(alike)
                for requests in cut(len(members), at_once):
                    group = self._gather(members[requests], alike)
                    self._evict_group(group, max(1, at_once // len(group.request_ids)))

    def wrote(self, slot_mapping: torch.Tensor, positions: torch.Tensor) -> None:
        """New tokens at `positions` int64 [n] are in physical slots int64 [n]."""
        self.positions.write(slot_mapping, positions)
        if self.remainders is not None:
            self.remainders.clear(slot_mapping)

    @torch.inference_mode()
    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks, with all that is kept beside them."""
        blocks = self.device_tensor([list(sources), list(targets)])
        for holder in (*self._beside(), *self._in_all_layers):
            source, target = holder.grid.numbers(blocks).unbind(dim=1)
            holder.copy_pages(source, target)

    def forget(self, request_id: str) -> None:
        """The request is finished or preempted."""
        if self._kept is not None:
            self._kept.forget(request_id)
        if self._directions is not None:
            self._directions.forget(request_id)

    def device_tensor(self, rows: list) -> torch.Tensor:
        """int64 tensor of plain numbers, copied without waiting for the device."""
        return async_tensor_h2d(rows, device=self._device, dtype=torch.int64)

    def resident_positions(self, request_id: str, block_ids: Sequence[int], num_resident: int) -> list[list[list[int]]]:
        """Ascending positions of a request's resident tokens by layer and head. Waits for the device.

        Args:
            request_id: the request.
            block_ids: its physical blocks.
            num_resident: tokens that a layer and KV head holds, on average where counts differ.
        """
        blocks = list(block_ids[: -(-num_resident // self._policy.block_size)])
        positions = self.positions_of(self.device_tensor([blocks]), num_resident)
        return positions[:, 0].sort(dim=-1).values.tolist()

    def num_kept(self, victim: Victim) -> int:
        """Tokens that the last eviction left of a victim, on average where counts differ; to be asked once."""
        return victim.eviction.num_keep

    def positions_of(self, block_table: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Original positions int32 [L, N, H or 1, T] of the first T slots of requests with blocks int64 [N, W]."""
        positions = self.positions.read(self.positions.grid.numbers(block_table), num_tokens)
        return positions.expand(self._num_layers, -1, -1, -1)

    def _rows_at_once(self, alike: Alike) -> int:
        """How many requests times layers are compacted at once."""
        grid = self._layout.grid
        queries_a_head = self._observers.queries_a_head(grid.num_heads) if self._observers else 0
        a_head = bytes_a_head(self._policy, self._layout, queries_a_head, alike)
        return rows_at_once(a_head * grid.num_heads, self._device)

    def _gather(self, victims: list[Victim], alike: Alike) -> Group:
        request_ids = [victim.request_id for victim in victims]
        rows = self._observers.rows_of(request_ids) if self._observers else [0] * len(victims)
        numbers = self.device_tensor(
            [[row, victim.eviction.num_seen, *victim.block_ids] for row, victim in zip(rows, victims, strict=True)]
        )
        return Group(alike, request_ids, rows=numbers[:, 0], num_seen=numbers[:, 1], block_table=numbers[:, 2:])

    def _evict_group(self, group: Group, num_layers: int) -> None:
        """Evict, at most `num_layers` at once."""
        slices = list(cut(self._num_layers, num_layers))
        if self._directions is not None:
            self._directions.begin(group.request_ids)
        choices = slices
        if self._policy.same_in_all_layers:
            choices = [slice(0, 1)]
        elif group.alike.phase is Phase.DECODE and self._policy.shared_by_layers:
            choices = [slice(0, self._num_layers)]
        for layers in choices:
            part = Part(group, layers)
            covered = [part] if choices == slices else [Part(group, moved) for moved in slices]
            moves = self._choose(part, covered, num_layers)
            beside = list(self._beside())
            if covered == [part]:
                carry_out(moves, part, [*beside, *self._in_all_layers])
                continue
            carry_out(moves, part, beside)
            for moved in covered:
                carry_out(moves, moved, self._in_all_layers)
        if self._kept is not None:
            self._kept.evicted(group.request_ids, group.alike.num_keep)
        if self._directions is not None:
            self._keep_directions(group)

    def _choose(self, part: Part, covered: Sequence[Part], num_layers: int) -> Moves:
        """Choose in the layers of `part` for those of `covered`, scoring `num_layers` at once."""
        alike = part.group.alike
        policy = self._policy.for_budget(alike.budget)
        positions = self.positions.read(part.pages(self.positions.grid), alike.num_before)
        if self._directions is not None:
            self._directions.add_new(part, alike.num_known)
        scores = self._scorer.scores(part, positions, num_layers)
        self._sum_of_scores += scores.sum(dtype=torch.float64)
        if self._kept is not None:
            scores = self._kept.complete(part.pages(self._kept.values.grid), alike.num_old_blocks, scores)
        ranked = candidates(policy, alike.phase, scores, positions, part.group.num_seen)
        size = item_size(policy, alike.phase)
        rewrites = alike.phase in policy.rewrite_phases
        if rewrites or policy.cache_positions:
            leaving = ranked.lowest((alike.num_before - alike.num_keep) // size)
            stays = staying(leaving, size, alike.num_before)
        if rewrites:
            self._scorer.rewrite(part, positions, stays, num_layers)
        if self._directions is not None and self._one_leaves(alike):
            self._directions.drop(part, ranked.lowest(1))
        if policy.cache_positions:
            lost = places_lost(positions.long(), stays)
            for moved in covered:
                self._turn_back(moved, of_layers(lost, moved.layers))
        return plan_moves(ranked, alike.phase, size, alike.num_before, alike.num_keep)

    def _one_leaves(self, alike: Alike) -> bool:
        """Whether the sum of directions is that of the tokens that stay once a single one was subtracted."""
        policy, is_token = self._policy, item_size(self._policy, alike.phase) == 1
        changed = policy.cache_positions or alike.phase in policy.rewrite_phases
        return is_token and alike.num_before - alike.num_keep == 1 and not changed

    def _keep_directions(self, group: Group) -> None:
        """Keep the sums for the next eviction where they are right, else let it begin anew."""
        if self._one_leaves(group.alike):
            self._directions.end(group.request_ids, group.alike.num_keep)
            return
        for request_id in group.request_ids:
            self._directions.forget(request_id)

    def _beside(self) -> Iterator[PagedValues]:
        """What moves with the tokens."""
        yield self.positions
        if self._kept is not None:
            yield self._kept.values
        if self._directions is not None:
            yield self._directions.inverse
        if self._observers is not None:
            yield from (mass.values for mass in self._observers.sums.values())

    def _turn_back(self, part: Part, places: torch.Tensor) -> None:
        """Rotate the keys that stay to their place among those that stay; `places` int64 [l or 1, N, Hs, T]."""
        pages, num_tokens = part.pages(self._layout.grid), places.shape[-1]
        keys = self._layout.read_keys(pages, num_tokens)
        if self.remainders is None:
            self._layout.write_keys(pages, turn_back(keys, places, self._inv_freq))
            return
        beside = part.pages(self.remainders.grid)
        turned = turn_back(keys.float() + self.remainders.read(beside, num_tokens), places, self._inv_freq)
        rounded = turned.to(self._layout.pages.dtype)
        self._layout.write_keys(pages, rounded)
        self.remainders.store(beside, turned - rounded)
