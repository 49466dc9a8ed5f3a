"""Scheduler side: decides how many tokens stay, shrinks block lists, tells the workers.

The decision is a pure function of lengths (`Policy.plan`), taken at the top of `schedule()`, so nothing has to come
back from the workers and asynchronous scheduling stays on. Freed blocks may be handed out in the same step: workers
compact before they write.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from harness.engines.contract import EvictionRecord
from harness.engines.vllm.counters import CounterFile, Counters
from harness.engines.vllm.kv_cache import EvictingAttentionManager
from harness.engines.vllm.plan import Eviction, StepPlan
from harness.engines.vllm.refusals import refuse_chunks
from harness.engines.vllm.settings import CONFIG_KEY, read_settings
from harness.engines.vllm.trace import PoolShape, StepUsage, TraceWriter
from policies import Phase, Policy, Unit


@dataclass
class _RequestState:
    """What the scheduler remembers of a request. `prefilled` falls back when the request is preempted."""

    record: EvictionRecord = field(default_factory=EvictionRecord)
    prefilled: bool = False


class EvictionScheduling:
    """Mixin over a vLLM scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = read_settings(self.vllm_config)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        if len(managers) != 1 or not isinstance(managers[0], EvictingAttentionManager):
            raise ValueError("KV eviction needs a model whose layers all use full attention with one KV geometry")
        self._manager: EvictingAttentionManager = managers[0]
        self._policy = settings.build_policy(self._manager.block_size)
        refuse_chunks(self._policy, self.scheduler_config, self.vllm_config.model_config.is_multimodal_model)
        self._reserve = settings.reserve
        self._states: dict[str, _RequestState] = {}
        self._totals = EvictionRecord()
        self._trace = TraceWriter(settings.trace, self._pool_shape()) if settings.trace else None
        self._counters = CounterFile(settings.counters) if settings.counters else None

    def _pool_shape(self) -> PoolShape:
        num_blocks = self.kv_cache_config.num_blocks
        size = sum(tensor.size for tensor in self.kv_cache_config.kv_cache_tensors)
        return PoolShape(self._manager.block_size, num_blocks, size // num_blocks)

    def add_request(self, request: Request) -> None:
        """As stock; from here on the request's peak is known."""
        super().add_request(request)
        if request.request_id not in self.requests:
            return
        self._states.setdefault(request.request_id, _RequestState())
        if self._reserve:
            self._manager.expect(request.request_id, self._peak_tokens(request, prefilled=False))

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Evict, then schedule as stock; the plan travels as `SchedulerOutput.kv_eviction`."""
        evictions = self._evict_running() if self._policy.evicts else {}
        output = super().schedule(throttle_prefills)
        for request_id in output.preempted_req_ids or ():
            evictions.pop(request_id, None)
            if request_id in self._states:  # one that was reset (pause, sleep) may have been aborted since
                self._forget_progress(request_id)
        evicted = self._manager.num_evicted
        scheduled = output.num_scheduled_tokens
        output.kv_eviction = StepPlan(
            evictions,
            {request_id: evicted[request_id] for request_id in scheduled if request_id in evicted},
            frozenset(request_id for request_id in scheduled if not self._states[request_id].prefilled),
        )
        self._record_step(evictions, output)
        return output

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Pin chunk borders: in chunked mode a chunk is scheduled whole or not at all.

        Otherwise the border, and with it the answer, would depend on which requests share the batch.
        """
        num_new_tokens = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        remaining = request.num_tokens - num_computed_tokens
        if self._policy.prefill != "chunked" or not self._policy.evicts or remaining <= 1:
            return num_new_tokens
        chunk = min(remaining, self._policy.prefill_chunk)
        return chunk if num_new_tokens >= chunk else 0

    def _evict_running(self) -> dict[str, Eviction]:
        """Plan and account this step's evictions."""
        evictions = {}
        for request in self.running:
            phase = self._phase(request)
            if phase is None or self._is_last_step_scheduled(request):
                continue
            request_id, seen = request.request_id, request.num_computed_tokens
            before = seen - self._manager.num_evicted.get(request_id, 0)
            keep = self._policy.plan(phase, before)
            if keep < before:
                self._manager.evict(request_id, before, keep)
                evictions[request_id] = Eviction(phase, before, keep, seen)
            if phase is Phase.PREFILL_END and self._reserve:
                self._manager.expect(request_id, self._peak_tokens(request, prefilled=True))
        return evictions

    def _phase(self, request: Request) -> Phase | None:
        """The decision that is due before the request's next tokens are scheduled."""
        state = self._states[request.request_id]
        if request.is_prefill_chunk:
            return Phase.PREFILL_CHUNK if self._policy.prefill == "chunked" else None
        if state.prefilled:
            return Phase.DECODE
        state.prefilled = True
        return Phase.PREFILL_END

    @staticmethod
    def _is_last_step_scheduled(request: Request) -> bool:
        """True if the request cannot be scheduled again: its last token is in flight (asynchronous scheduling)."""
        placeholders = request.num_output_placeholders
        last = request.num_prompt_tokens + request.max_tokens
        return placeholders > 0 and request.num_computed_tokens + 2 - placeholders >= last

    def _peak_tokens(self, request: Request, prefilled: bool) -> int:
        """The most tokens of the request that can be resident at once from now on."""
        prompt = request.num_tokens
        total = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        return peak_resident_tokens(self._policy, 0 if prefilled else prompt, prompt, total)

    def _forget_progress(self, request_id: str) -> None:
        """A preempted request is recomputed from the start, its output so far included, and evicted as a prompt."""
        self._states[request_id].prefilled = False
        if self._reserve:
            self._manager.expect(request_id, self._peak_tokens(self.requests[request_id], prefilled=False))

    def _record_step(self, evictions: dict[str, Eviction], output: SchedulerOutput) -> None:
        """Update the records of the requests that moved, and the trace."""
        for request_id, eviction in evictions.items():
            state = self._states[request_id]
            state.record = _add_eviction(state.record, eviction)
            self._totals = _add_eviction(self._totals, eviction)
        for request_id in output.num_scheduled_tokens:
            state = self._states[request_id]
            resident = self._num_resident(self.requests[request_id])
            blocks = len(self._manager.req_to_blocks[request_id])
            state.record = replace(
                state.record,
                peak_resident_tokens=max(state.record.peak_resident_tokens, resident),
                peak_blocks=max(state.record.peak_blocks, blocks),
            )
        if preempted := len(output.preempted_req_ids or ()):
            self._totals = replace(self._totals, num_preemptions=self._totals.num_preemptions + preempted)
        scheduled = output.num_scheduled_tokens
        self._trace_pool(len(scheduled), sum(self._reads_prompt(name, count) for name, count in scheduled.items()))

    def _reads_prompt(self, request_id: str, num_scheduled: int) -> bool:
        """Whether the tokens just scheduled are a prompt's, or recomputed after a preemption."""
        request = self.requests[request_id]
        return num_scheduled > 1 or request.num_computed_tokens - num_scheduled < request.num_prompt_tokens

    def _trace_pool(self, running: int, prefilling: int) -> None:
        """Publish the state of the pool. The null block is not counted."""
        pool, totals = self.kv_cache_manager.block_pool, self._totals
        counts = (totals.num_evictions, totals.num_evicted_tokens, totals.num_preemptions)
        num_blocks = pool.num_gpu_blocks - 1
        blocks = num_blocks - pool.get_num_free_blocks()
        if self._trace is not None:
            self._trace.add(StepUsage(self._trace.now(), blocks, running, prefilling, *counts))
        if self._counters is not None:
            self._counters.write(Counters(*counts, blocks, num_blocks))

    def _num_resident(self, request: Request) -> int:
        return request.num_computed_tokens - self._manager.num_evicted.get(request.request_id, 0)

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """As stock; what eviction did to the request travels to the front end beside its last output."""
        request_id = request.request_id
        record = replace(
            self._states.pop(request_id).record,
            final_resident_tokens=self._num_resident(request),
            num_preemptions=request.num_preemptions,
        )
        params, ec_params = super()._free_request(request, delay_free_blocks)
        self._manager.forget(request_id)
        self._trace_pool(running=0, prefilling=0)
        if self._trace is not None:
            self._trace.flush()
        return {**(params or {}), CONFIG_KEY: asdict(record)}, ec_params


def peak_resident_tokens(policy: Policy, num_prefill: int, num_prompt: int, num_total: int) -> int:
    """The most tokens of one request and layer that are resident at once.

    Args:
        policy: decides what stays.
        num_prefill: tokens still to be attended as a prompt, 0 once that is done.
        num_prompt: tokens of the prompt (and output so far).
        num_total: the most tokens that the request can reach.
    """
    if not policy.evicts:
        return num_total
    prefill = num_prefill
    if policy.prefill == "chunked":
        prefill = min(num_prefill, policy.budget + policy.prefill_chunk)
    after_prefill = policy.plan(Phase.PREFILL_END, num_prompt)
    growth = num_total - num_prompt
    if policy.decode_unit is Unit.NONE:
        return max(prefill, after_prefill + growth)
    slack = 1 if policy.decode_unit is Unit.TOKEN else policy.block_size
    return max(prefill, min(after_prefill + growth, policy.budget + slack))


def _add_eviction(record: EvictionRecord, eviction: Eviction) -> EvictionRecord:
    return replace(
        record,
        num_evictions=record.num_evictions + 1,
        num_evicted_tokens=record.num_evicted_tokens + eviction.num_before - eviction.num_keep,
    )


class EvictionScheduler(EvictionScheduling, Scheduler):
    """`scheduler_cls` for synchronous scheduling."""


class AsyncEvictionScheduler(EvictionScheduling, AsyncScheduler):
    """`scheduler_cls` for asynchronous scheduling."""
