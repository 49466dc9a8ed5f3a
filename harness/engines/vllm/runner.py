"""Runner side: applies plans before anything new is written, and turns logical into resident lengths."""

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from harness.engines.vllm.compaction import Compactor, Victim
from harness.engines.vllm.kv_cache import EvictingAttentionSpec
from harness.engines.vllm.layout import CacheLayout
from harness.engines.vllm.observers import QUERY_SIGNALS, Observers, watch
from harness.engines.vllm.plan import StepPlan, most_after_eviction
from harness.engines.vllm.prompt_rows import rows_of_state
from harness.engines.vllm.refusals import refuse_layers, refuse_rotary
from harness.engines.vllm.retention import Resident, RetentionLog
from harness.engines.vllm.rotation import inverse_frequencies, rotary_of
from harness.engines.vllm.settings import read_settings
from harness.engines.vllm.signals.batch import StepPages
from harness.engines.vllm.step_batch import step_batch
from harness.engines.vllm.windows import with_full_cache
from policies import Phase, Signal

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as _Base
else:
    _Base = object


class EvictionRunning(_Base):
    """Mixin over a vLLM V1 model runner.

    Positions and `num_computed_tokens` stay logical. One integer a request, `num_evicted`, makes them resident in the
    slot mapping, in the sequence lengths that attention sees, and (scheduler side) in block counts.
    """

    layout_class: type[CacheLayout]

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._settings = settings = read_settings(vllm_config)
        self.eviction_policy = settings.model_policy(vllm_config, vllm_config.cache_config.block_size)
        self._num_evicted = self._make_buffer(self.max_num_reqs, dtype=torch.int32)
        self._num_resident: dict[str, int] = {}
        self._num_seen: dict[str, int] = {}
        self._observers: Observers | None = None
        self._retention: RetentionLog | None = None
        self.compactor: Compactor | None = None

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """As stock, with every layer evictable.

        Raises:
            ValueError: a layer is not plain full attention.
        """
        policy = self.eviction_policy.for_prompt(self.max_model_len)
        bound = None
        if policy.evicts and policy.prefill == "chunked":
            bound = most_after_eviction(policy, self.max_model_len) + policy.prefill_chunk
        stock = super().get_kv_cache_spec()
        stock = with_full_cache(stock, policy.is_idle, self.max_model_len)
        refuse_layers(stock)
        if self.shared_kv_cache_layers:
            raise ValueError("KV eviction moves the tokens of every layer, and this model's layers share their caches")
        return {name: EvictingAttentionSpec.from_full(spec, bound, policy) for name, spec in stock.items()}

    def initialize_kv_cache(
        self,
        kv_cache_config: KVCacheConfig,
        is_profiling: bool = False,
        kv_cache_allocation_context: AbstractContextManager | None = None,
    ) -> None:
        """As stock; then bind the compactor to the caches, unless they only serve to measure CUDA graphs.

        Raises:
            ValueError: attention works in a way that eviction cannot follow.
        """
        super().initialize_kv_cache(kv_cache_config, is_profiling, kv_cache_allocation_context)
        (group,) = self.kv_cache_config.kv_cache_groups
        block_size = group.kv_cache_spec.block_size
        # vLLM may have changed the block size for the backend
        self.eviction_policy = self._settings.model_policy(self.vllm_config, block_size)
        if is_profiling or self.eviction_policy.is_idle:
            return
        if self._kernel_block_sizes != [block_size]:
            raise ValueError(
                f"engine.block_size={block_size} is split by the attention backend into {self._kernel_block_sizes}. "
                "Use that size."
            )
        context = self.compilation_config.static_forward_context
        self._bind([context[name] for name in group.layer_names])

    def _bind(self, layers: Sequence[torch.nn.Module]) -> None:
        """Set up what works on the caches of these layers."""
        if any(getattr(layer.impl, "alibi_slopes", None) is not None for layer in layers):
            raise ValueError("KV eviction reorders slots, and ALiBi takes positions from them. Use another model.")
        layout = self.layout_class([layer.kv_cache for layer in layers])
        self._prepare_layers(layers, layout)
        if self.eviction_policy.signals & QUERY_SIGNALS:
            self._watch(layers, layout)
        self.compactor = self._make_compactor(
            layout=layout,
            observers=self._observers,
            inv_freq=inverse_frequencies(self._rotary(layers)) if self.eviction_policy.cache_positions else None,
            average_over_ranks=_average_over_tensor_parallel_ranks,
        )
        if self._settings.retention is not None:
            folder = self._settings.retention if get_tp_group().rank_in_group == 0 else None
            self._retention = RetentionLog(folder, self.compactor, self.eviction_policy)

    def _prepare_layers(self, layers: Sequence[torch.nn.Module], layout: CacheLayout) -> None:
        """Change how layers call attention, before anything watches it; nothing where all heads keep equally many."""

    def bytes_of_pages(self, spec: EvictingAttentionSpec) -> tuple[int, int, int]:
        """What is kept of pages: for one layer, bytes a page and bytes whatever their number; bytes for all layers."""
        return 0, 0, 0

    def _make_compactor(self, **parts: Any) -> Compactor:
        return Compactor(self.eviction_policy, **parts)

    def _rotary(self, layers: Sequence[torch.nn.Module]) -> torch.nn.Module:
        rotary = rotary_of(self.model)
        refuse_rotary(rotary, layers[0].head_size)
        return rotary

    def _watch(self, layers: Sequence[torch.nn.Module], layout: CacheLayout) -> None:
        """Show the queries of every attention layer to the observers that the policy needs.

        Raises:
            ValueError: attention would be replayed from full CUDA graphs, where nothing can be watched.
        """
        mode = self.compilation_config.cudagraph_mode
        if mode.has_full_cudagraphs():
            raise ValueError(
                f"policy={self.eviction_policy.name} watches attention, which cudagraph_mode={mode.name} replays "
                "unseen. Use cudagraph_mode=PIECEWISE or enforce_eager."
            )
        needs_rotary = Signal.QUERY_MOMENTS in self.eviction_policy.signals
        self._observers = Observers(
            self.eviction_policy,
            layout,
            num_rows=rows_of_state(self.eviction_policy, self.max_num_reqs),
            scale=layers[0].impl.scale,
            rotary=self._rotary(layers) if needs_rotary else None,
        )
        for index, layer in enumerate(layers):
            layer.impl = watch(layer.impl, index, self._observers)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        """Evict as planned, then update the batch as stock."""
        plan: StepPlan = scheduler_output.kv_eviction
        if self._observers is not None:
            self._observers.end_step()
        if plan.evictions:
            self._evict(plan)
        self.record_resident(scheduler_output.finished_req_ids)
        if self._retention is not None:
            self._record_prompts(scheduler_output.preempted_req_ids or ())
        for request_id in chain(scheduler_output.finished_req_ids, scheduler_output.preempted_req_ids or ()):
            self._num_resident.pop(request_id, None)
            self._num_seen.pop(request_id, None)
            if self._observers is not None:
                self._observers.forget(request_id)
            if self.compactor is not None:
                self.compactor.forget(request_id)
        return super()._update_states(scheduler_output)

    def _evict(self, plan: StepPlan) -> None:
        """Compact the cache and cut the block rows of the planned requests."""
        block_size = self.eviction_policy.block_size
        victims = []
        for request_id, eviction in plan.evictions.items():
            block_ids = self.requests[request_id].block_ids[0]
            resident = self._num_resident[request_id]
            if resident != eviction.num_before or len(block_ids) != math.ceil(resident / block_size):
                raise RuntimeError(
                    f"eviction plan for {request_id} starts from {eviction.num_before} resident tokens; the worker has "
                    f"{resident} in {len(block_ids)} blocks of {block_size}"
                )
            if eviction.copies:
                self._exchange(request_id, block_ids, eviction.copies)
            victims.append(Victim(request_id, eviction, tuple(block_ids)))
        self.compactor.evict(victims)
        table = self.input_batch.block_table[0]
        for victim in victims:
            num_keep = self._num_kept(plan, victim)
            num_blocks = math.ceil((num_keep + victim.eviction.spare_block) / block_size)
            self._num_resident[victim.request_id] = num_keep
            del self.requests[victim.request_id].block_ids[0][num_blocks:]
            row = self.input_batch.req_id_to_index.get(victim.request_id)
            if row is not None:
                table.block_table.np[row, num_blocks : table.num_blocks_per_row[row]] = 0  # as vLLM leaves free rows
                table.num_blocks_per_row[row] = num_blocks
            if victim.eviction.phase is not Phase.PREFILL_END:
                continue
            if self._observers is not None:
                self._observers.prompt_evicted(victim.request_id)
            if self._retention is not None:
                self._retention.prompt_evicted(self._resident(victim.request_id))

    def _num_kept(self, plan: StepPlan, victim: Victim) -> int:
        """Tokens of a victim that stayed."""
        return self.compactor.num_kept(victim)

    def _exchange(self, request_id: str, block_ids: list[int], copies: dict[int, int]) -> None:
        """Put copies in the place of blocks that others may read."""
        self.compactor.copy_blocks([block_ids[index] for index in copies], list(copies.values()))
        row = self.input_batch.req_id_to_index.get(request_id)
        for index, block in copies.items():
            block_ids[index] = block
            if row is not None:
                self.input_batch.block_table[0].block_table.np[row, index] = block

    def record_resident(self, request_ids: Iterable[str] | None = None) -> None:
        """Write down what is resident of finished requests; of all that are left when the engine is idle."""
        if self._retention is None:
            return
        wanted = self._num_resident.keys() if request_ids is None else request_ids
        ended = [request_id for request_id in wanted if request_id in self._num_resident]
        self._retention.end(map(self._resident, ended))
        for request_id in ended:
            del self._num_resident[request_id]

    def _record_prompts(self, preempted: Iterable[str]) -> None:
        """Write down the prompts that the last step has read and that nothing is evicted from."""
        for request_id in preempted:
            self._retention.forget(request_id)
        for request_id in self._retention.prompts:
            self._retention.prompt(self._resident(request_id))

    def _resident(self, request_id: str) -> Resident:
        state, resident = self.requests[request_id], self._num_resident[request_id]
        seen = self._num_seen[request_id]
        return Resident(request_id, state.num_prompt_tokens, state.block_ids[0], resident, seen)

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray) -> Any:
        """As stock; then lower lengths and slots of evicted requests and index the new tokens' positions."""
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        if self.compactor is None:
            return prepared
        num_reqs, total = self.input_batch.num_reqs, scheduler_output.total_num_scheduled_tokens
        plan: StepPlan = scheduler_output.kv_eviction
        if self._retention is not None:
            self._note_prompts(plan, self.optimistic_seq_lens_cpu[:num_reqs].tolist())
        positions = self.positions[:total]
        places = self._lower_lengths(plan, num_reqs, positions) if plan.num_evicted else positions
        self._write_positions(plan, positions, places)
        if self.eviction_policy.cache_positions:
            positions.copy_(places)
        lengths = self.optimistic_seq_lens_cpu[:num_reqs].tolist()
        self._num_resident.update(zip(self.input_batch.req_ids, lengths, strict=True))
        if self._observers is not None:
            self._observers.begin_step(step_batch(self, plan, lengths, self._step_pages()))
        return prepared

    def _slot_mapping(self, num_tokens: int) -> torch.Tensor:
        """int64 [tokens], stock slots of this step's tokens."""
        return self.input_batch.block_table[0].slot_mapping.gpu[:num_tokens]

    def _write_positions(self, plan: StepPlan, positions: torch.Tensor, places: torch.Tensor) -> None:
        """Write `positions` int64 [tokens] beside this step's tokens; `places` are their slots in their requests."""
        self.compactor.wrote(self._slot_mapping(len(positions)), positions)

    def _note_prompts(self, plan: StepPlan, num_seen: list[int]) -> None:
        """Remember how far every request of this step gets, and which prompts end in it."""
        for request_id, seen in zip(self.input_batch.req_ids, num_seen, strict=True):
            self._num_seen[request_id] = seen
            if request_id in plan.prefilling and seen >= self.requests[request_id].num_prompt_tokens:
                self._retention.read_prompt(request_id)

    def _step_pages(self) -> StepPages | None:
        """Where this step's pages are looked up; None where they follow from blocks."""
        return None

    def _lower_lengths(self, plan: StepPlan, num_reqs: int, positions: torch.Tensor) -> torch.Tensor:
        """Make lengths and slots resident; returns the places int64 [tokens] of the new tokens in their requests."""
        evicted = self._num_evicted
        evicted.np[:num_reqs] = [plan.num_evicted.get(request_id, 0) for request_id in self.input_batch.req_ids]
        evicted.copy_to_gpu(num_reqs)
        self.optimistic_seq_lens_cpu[:num_reqs] -= evicted.cpu[:num_reqs]
        self.seq_lens[:num_reqs] -= evicted.gpu[:num_reqs]
        places = positions - evicted.gpu[self.req_indices.gpu[: len(positions)]]
        self.input_batch.block_table.compute_slot_mapping(num_reqs, self.query_start_loc.gpu[: num_reqs + 1], places)
        return places


def _average_over_tensor_parallel_ranks(scores: torch.Tensor) -> torch.Tensor:
    """Of whatever strides; some backends add in place and take nothing else than contiguous tensors."""
    group = get_tp_group()
    if group.world_size == 1:
        return scores
    return group.all_reduce(scores.clone(memory_format=torch.contiguous_format)) / group.world_size
