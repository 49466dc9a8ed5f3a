"""Scheduler side: decides how many tokens stay, shrinks block lists, tells the workers.

The decision is a pure function of lengths (`Policy.plan`), taken at the top of `schedule()`, so nothing has to come
back from the workers and asynchronous scheduling stays on. Freed blocks may be handed out in the same step: workers
compact before they write.
"""

from dataclasses import asdict, dataclass
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from harness.engines.contract import EvictionRecord
from harness.engines.vllm.counters import CounterFile
from harness.engines.vllm.kv_cache import EvictingAttentionManager
from harness.engines.vllm.plan import Eviction, StepPlan, most_after_eviction, peak_resident_tokens, plan_of_lengths
from harness.engines.vllm.prompt_rows import prompt_rows
from harness.engines.vllm.refusals import refuse_chunks
from harness.engines.vllm.settings import CONFIG_KEY, read_settings
from harness.engines.vllm.trace import PoolShape, StepUsage, TraceWriter
from policies import Phase, Policy


@dataclass(slots=True)
class _RequestState:
    """What the scheduler remembers of a request.

    Attributes:
        policy: with the budget of its prompt.
        prefilled: the prompt has been attended; falls back when the request is preempted.
        num_evictions, num_evicted_tokens: so far, those before a preemption included.
        peak_tokens: the most tokens that were resident at once.
    """

    policy: Policy
    prefilled: bool = False
    num_evictions: int = 0
    num_evicted_tokens: int = 0
    peak_tokens: int = 0


@dataclass(slots=True)
class Totals:
    """Counts since the engine started."""

    num_evictions: int = 0
    num_evicted_tokens: int = 0
    num_preemptions: int = 0


class EvictionScheduling:
    """Mixin over a vLLM scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = read_settings(self.vllm_config)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        if len(managers) != 1 or not isinstance(managers[0], EvictingAttentionManager):
            raise ValueError("KV eviction needs a model whose layers all use full attention with one KV geometry")
        self._manager: EvictingAttentionManager = managers[0]
        self._policy = settings.model_policy(self.vllm_config, self._manager.block_size)
        if self._policy.measured and isinstance(self, AsyncScheduler):
            raise ValueError(
                f"policy={self._policy.name} lets the data decide how many tokens stay, and the scheduler learns it "
                "after the step. Set async_scheduling=False."
            )
        refuse_chunks(self._policy, self.scheduler_config, self.vllm_config.model_config.is_multimodal_model)
        self._reserve = settings.reserve
        self._spare_blocks = not self._policy.by_page  # there the worker's pages fill the blocks that stay
        self._states: dict[str, _RequestState] = {}
        self._plan = plan_of_lengths(self._policy)
        self._prompt_waits = False
        self._rows = prompt_rows(self._policy, self.scheduler_config.max_num_seqs)
        self._watched: set[str] = set()
        self._totals = Totals()
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
        policy = self._policy.for_prompt(request.num_prompt_tokens)
        self._states.setdefault(request.request_id, _RequestState(policy))
        self._promise(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Evict, then schedule as stock; the plan travels as `SchedulerOutput.kv_eviction`."""
        self._prompt_waits = False
        evictions = {} if self._policy.is_idle else self._evict_running()
        self._forget_unwatched()
        output = super().schedule(throttle_prefills)
        for request_id in output.preempted_req_ids or ():
            self._totals.num_preemptions += 1
            evictions.pop(request_id, None)
            if request_id in self._states:  # one that was reset (pause, sleep) may have been aborted since
                self._forget_progress(request_id)
        if not self._policy.measured:
            self._count(evictions)
        output.kv_eviction, num_prefilling = self._plan_of(evictions, output.num_scheduled_tokens)
        self._trace_pool(len(output.num_scheduled_tokens), num_prefilling)
        return output

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Pin chunk borders: in chunked mode a chunk is scheduled whole or not at all.

        Otherwise the border, and with it the answer, would depend on which requests share the batch. A chunk that does
        not fit keeps later ones back, so that no prompt overtakes another.
        """
        num_new_tokens = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        remaining = request.num_tokens - num_computed_tokens
        if self._rows is not None and num_new_tokens and not self._take_row(request):
            self._prompt_waits = True
            return 0
        if self._policy.prefill != "chunked" or not self._policy.evicts or remaining <= 1:
            return num_new_tokens
        chunk = min(remaining, self._policy.prefill_chunk)
        self._prompt_waits |= num_new_tokens < chunk
        return 0 if self._prompt_waits else chunk

    def _evict_running(self) -> dict[str, Eviction]:
        """Plan this step's evictions and free their blocks; prompts whose end was attended are noted."""
        evictions = {}
        num_evicted, states, plan = self._manager.num_evicted, self._states, self._plan
        block_size = self._manager.block_size
        for request in self.running:
            request_id = request.request_id
            state = states[request_id]
            phase = Phase.DECODE if state.prefilled and not request.is_prefill_chunk else self._prompt_phase(request)
            if phase is None or (request.num_output_placeholders and self._is_last_step_scheduled(request)):
                continue
            seen = request.num_computed_tokens
            before = seen - num_evicted.get(request_id, 0)
            keep = plan(state.policy.budget, phase, before, seen)
            if keep < before:
                spare, copies = False, None
                if not self._policy.measured:  # else the workers tell what left, in `update_from_output`
                    spare = phase is Phase.DECODE and self._spare_blocks
                    copies = self._manager.evict(request_id, before, keep, -(-(keep + spare) // block_size))
                    if copies is None:  # no block to be had in the place of shared ones: again in the next step
                        state.prefilled = state.prefilled and phase is not Phase.PREFILL_END
                        continue
                evictions[request_id] = Eviction(phase, before, keep, seen, spare, copies, state.policy.budget)
                if phase is Phase.PREFILL_END:
                    self._watched.discard(request_id)
            if phase is Phase.PREFILL_END:
                self._promise(request)
        self._manager.free_cut()
        return evictions

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """As stock; where the data decide how many tokens stay, free what the workers found that can leave."""
        for request_id, kept in getattr(model_runner_output, "kv_kept", {}).items():
            eviction = scheduler_output.kv_eviction.evictions[request_id]._replace(num_keep=kept)
            if kept < eviction.num_before and request_id in self.requests:
                self._manager.evict_measured(request_id, eviction.num_before, kept)
                self._count({request_id: eviction})
        return super().update_from_output(scheduler_output, model_runner_output)

    def _prompt_phase(self, request: Request) -> Phase | None:
        """The decision that is due before the next tokens of a request that has not decoded yet are scheduled."""
        if request.is_prefill_chunk:
            return Phase.PREFILL_CHUNK if self._policy.prefill == "chunked" else None
        self._states[request.request_id].prefilled = True
        return Phase.PREFILL_END

    @staticmethod
    def _is_last_step_scheduled(request: Request) -> bool:
        """True if the request cannot be scheduled again: its last token is in flight (asynchronous scheduling)."""
        placeholders = request.num_output_placeholders
        last = request.num_prompt_tokens + request.max_tokens
        return placeholders > 0 and request.num_computed_tokens + 2 - placeholders >= last

    def _take_row(self, request: Request) -> bool:
        """Whether it has started or may: its prompt will not be evicted from, or the workers have a row for it."""
        budget, length = self._states[request.request_id].policy.budget, request.num_tokens
        if request.num_computed_tokens or self._plan(budget, Phase.PREFILL_END, length, length) == length:
            return True
        if len(self._watched) >= self._rows and request.request_id not in self._watched:
            return False
        self._watched.add(request.request_id)
        return True

    def _forget_unwatched(self) -> None:
        """Rows of requests that are gone, were preempted, or could not start in the step in which they took one."""
        for request_id in list(self._watched):
            if request_id not in self.requests or not self.requests[request_id].num_computed_tokens:
                self._watched.discard(request_id)

    def _promise(self, request: Request) -> None:
        """Keep room for what the request may still grow to: its peak, or without `reserve` only what is soon certain.

        A prompt read in chunks starts with little: counted by that, too many would be admitted and preempted.
        """
        state = self._states[request.request_id]
        policy, prefilled = state.policy, state.prefilled
        if self._reserve:
            total = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
            prompt = 0 if prefilled else request.num_tokens
            self._manager.expect(request.request_id, peak_resident_tokens(policy, prompt, request.num_tokens, total))
        elif policy.evicts and policy.prefill == "chunked":
            most = most_after_eviction(policy, request.num_tokens)
            peak = min(request.num_tokens, most + policy.prefill_chunk)
            if prefilled:
                peak = min(request.num_tokens, most) + policy.block_size
            self._manager.expect(request.request_id, peak)

    def _forget_progress(self, request_id: str) -> None:
        """A preempted request is recomputed from the start, its output so far included, and evicted as a prompt."""
        self._states[request_id].prefilled = False
        self._promise(self.requests[request_id])

    def _count(self, evictions: dict[str, Eviction]) -> None:
        """Add what was evicted to the records of the requests and of the engine."""
        for request_id, eviction in evictions.items():
            for record in (self._states[request_id], self._totals):
                record.num_evictions += 1
                record.num_evicted_tokens += eviction.num_before - eviction.num_keep

    def _plan_of(self, evictions: dict[str, Eviction], scheduled: dict[str, int]) -> tuple[StepPlan, int]:
        """The plan of a step, and how many of its requests read a prompt; peaks are noted on the way."""
        requests, states, evicted = self.requests, self._states, self._manager.num_evicted
        num_evicted, prefilling, num_reading = {}, [], 0
        for request_id, count in scheduled.items():
            request, state = requests[request_id], states[request_id]
            seen = resident = request.num_computed_tokens
            if gone := evicted.get(request_id):
                num_evicted[request_id] = gone
                resident -= gone
            if resident > state.peak_tokens:
                state.peak_tokens = resident
            if not state.prefilled and (self._rows is None or request_id in self._watched):
                prefilling.append(request_id)
            if count > 1 or seen - count < request.num_prompt_tokens:
                num_reading += 1
        return StepPlan(evictions, num_evicted, frozenset(prefilling)), num_reading

    def _trace_pool(self, running: int, prefilling: int) -> None:
        """Publish the state of the pool. The null block is not counted."""
        pool, totals = self.kv_cache_manager.block_pool, self._totals
        counts = (totals.num_evictions, totals.num_evicted_tokens, totals.num_preemptions)
        num_blocks = pool.num_gpu_blocks - 1
        blocks = num_blocks - pool.get_num_free_blocks()
        if self._trace is not None:
            self._trace.add(StepUsage(self._trace.now(), blocks, running, prefilling, *counts))
        if self._counters is not None:
            self._counters.write(*counts, blocks, num_blocks)

    def _num_resident(self, request: Request) -> int:
        return request.num_computed_tokens - self._manager.num_evicted.get(request.request_id, 0)

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """As stock; what eviction did to the request travels to the front end beside its last output."""
        request_id = request.request_id
        state = self._states.pop(request_id)
        record = EvictionRecord(
            num_evictions=state.num_evictions,
            num_evicted_tokens=state.num_evicted_tokens,
            peak_resident_tokens=state.peak_tokens,
            final_resident_tokens=self._num_resident(request),
            peak_blocks=cdiv(state.peak_tokens, self._manager.block_size),
            num_preemptions=request.num_preemptions,
        )
        params, ec_params = super()._free_request(request, delay_free_blocks)
        self._manager.forget(request_id)
        self._trace_pool(running=0, prefilling=0)
        if self._trace is not None:
            self._trace.flush()
        return {**(params or {}), CONFIG_KEY: asdict(record)}, ec_params


class EvictionScheduler(EvictionScheduling, Scheduler):
    """`scheduler_cls` for synchronous scheduling."""


class AsyncEvictionScheduler(EvictionScheduling, AsyncScheduler):
    """`scheduler_cls` for asynchronous scheduling."""
