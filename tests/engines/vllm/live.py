"""Helpers that run a real vLLM engine in this process and look inside it."""

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from vllm import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from harness.engines.contract import EngineStats, GenerationRequest, GenerationResult
from harness.engines.vllm.arguments import EngineShape, stock_arguments
from harness.engines.vllm.llm import VllmEngine, sampling_params
from harness.engines.vllm.plan import most_after_eviction
from harness.engines.vllm.settings import EvictionSettings
from policies import Phase, Policy, Unit


@dataclass(frozen=True)
class LiveDecision:
    """One eviction as the worker carried it out; `kept` are sorted positions by layer and head."""

    phase: Phase
    num_before: int
    num_keep: int
    kept: list[list[list[int]]]


@dataclass
class LiveRun:
    """Everything a test wants to know about a run."""

    results: dict[str, GenerationResult] = field(default_factory=dict)
    decisions: dict[str, list[LiveDecision]] = field(default_factory=dict)
    stats: EngineStats | None = None

    def texts(self) -> dict[str, list[int]]:
        """Generated token ids by request."""
        return {request_id: result.token_ids for request_id, result in self.results.items()}


def scheduler_of(engine: LLMEngine) -> Scheduler:
    """The scheduler of an in-process engine."""
    return engine.engine_core.engine_core.scheduler


def runner_of(engine: LLMEngine) -> CPUModelRunner:
    """The model runner of an in-process engine."""
    return engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


@contextmanager
def live_engine(shape: EngineShape, settings: EvictionSettings) -> Iterator[VllmEngine]:
    """An engine that is shut down at the end."""
    engine = VllmEngine(shape, settings)
    try:
        yield engine
    finally:
        engine.close()


def record_decisions(engine: VllmEngine) -> dict[str, list[LiveDecision]]:
    """From now on collect what every eviction kept, by the request's id in the caller's eyes."""
    return record_decisions_of(runner_of(engine.llm_engine))


def record_decisions_of(runner: CPUModelRunner) -> dict[str, list[LiveDecision]]:
    """`record_decisions` of one runner, whose engine may be in another process."""
    decisions: dict[str, list[LiveDecision]] = {}
    compactor = runner.compactor
    evict = compactor.evict

    def evict_and_look(victims):
        evict(victims)
        for victim in victims:
            eviction = victim.eviction
            num_keep = getattr(compactor, "measured", {}).get(victim.request_id, eviction.num_keep)
            if num_keep == eviction.num_before:
                continue
            kept = compactor.resident_positions(victim.request_id, victim.block_ids, num_keep)
            name = victim.request_id.rpartition("-")[0]
            decision = LiveDecision(eviction.phase, eviction.num_before, num_keep, kept)
            decisions.setdefault(name, []).append(decision)

    compactor.evict = evict_and_look
    return decisions


def record_logits(engine: VllmEngine) -> dict[str, list[torch.Tensor]]:
    """From now on collect the logits [V] of every step of every request, by its id in the caller's eyes."""
    logits: dict[str, list[torch.Tensor]] = defaultdict(list)
    runner = runner_of(engine.llm_engine)
    compute_logits = runner.model.compute_logits

    def compute_and_look(*args, **kwargs):
        rows = compute_logits(*args, **kwargs)
        for request_id, row in zip(runner.input_batch.req_ids, rows, strict=True):
            logits[request_id.rpartition("-")[0]].append(row.float().clone())
        return rows

    runner.model.compute_logits = compute_and_look
    return logits


def run_live(shape: EngineShape, settings: EvictionSettings, requests: list[GenerationRequest]) -> LiveRun:
    """Run all requests together."""
    with live_engine(shape, settings) as engine:
        run = LiveRun()
        if runner_of(engine.llm_engine).compactor is not None:
            run.decisions = record_decisions(engine)
        run.results = {result.request_id: result for result in engine.generate(requests)}
        run.stats = engine.stats()
        return run


def run_stock(shape: EngineShape, requests: list[GenerationRequest]) -> dict[str, list[int]]:
    """Generated token ids of stock vLLM with the same engine settings and no plugin."""
    engine = LLMEngine.from_engine_args(EngineArgs(**stock_arguments(shape)))
    try:
        for request in requests:
            engine.add_request(
                request.request_id, {"prompt_token_ids": request.prompt_token_ids}, sampling_params(request)
            )
        texts = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    texts[output.request_id] = list(output.outputs[0].token_ids)
        return texts
    finally:
        engine.engine_core.shutdown()


def assert_blocks_match_lengths(scheduler: Scheduler, runner: CPUModelRunner, policy: Policy) -> None:
    """Every running request holds exactly the blocks of its resident tokens, in the scheduler and in the worker."""
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    held = 0
    for request in scheduler.running:
        resident = request.num_computed_tokens - manager.num_evicted.get(request.request_id, 0)
        blocks = [block.block_id for block in manager.req_to_blocks[request.request_id]]
        spare = request.request_id in manager.num_evicted  # evicted, and then not scheduled
        assert (
            math.ceil(resident / policy.block_size) <= len(blocks) <= math.ceil((resident + spare) / policy.block_size)
        )
        assert len(set(blocks)) == len(blocks)
        assert runner.requests[request.request_id].block_ids[0] == blocks
        if policy.evicts and policy.decode_unit is not Unit.NONE and scheduler._states[request.request_id].prefilled:
            own = policy.for_prompt(request.num_prompt_tokens)
            assert resident <= most_after_eviction(own, request.num_computed_tokens) + policy.block_size
        held += len(blocks)
    pool = scheduler.kv_cache_manager.block_pool
    assert held == pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()


def assert_pages_have_one_owner(runner: CPUModelRunner, scheduler: Scheduler) -> int:
    """Every page of a request's blocks belongs to one layer and head, and holds no token twice.

    Returns:
        Requests that were looked at, those that were evicted from.
    """
    table, grid, positions = runner.compactor.table, runner.compactor._layout.grid, runner.compactor.positions
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    num_seen = 0
    for request in scheduler.running:
        name = request.request_id
        if not manager.num_evicted.get(name) or name not in runner.requests:
            continue
        num_seen += 1
        blocks = runner.requests[name].block_ids[0]
        row = table.hold([name], [blocks])
        counts = table.num_pages(row, len(blocks))[:, 0]
        pages = table.read(row, table.longest([name]))[:, 0]
        owned = [
            pages[layer, head, : counts[layer, head]] for layer in range(len(pages)) for head in range(len(pages[0]))
        ]
        bag = grid.numbers(torch.tensor([blocks])).flatten()
        assert torch.cat(owned).sort().values.tolist() == bag.sort().values.tolist()
        resident = runner._num_resident[name]
        for mine, count in zip(owned, counts.flatten().tolist(), strict=True):
            held = positions.read(mine, resident + (count - len(blocks)) * grid.block_size)
            assert len(held.unique()) == len(held), "no token twice"
            assert held.max() < request.num_computed_tokens
    return num_seen


def make_asynchronous(arguments: dict) -> LLMEngine:
    """An engine with asynchronous scheduling, which vLLM's CPU platform switches off while it builds its config."""
    config = EngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
    config.scheduler_config.async_scheduling = True
    return LLMEngine.from_vllm_config(config)
