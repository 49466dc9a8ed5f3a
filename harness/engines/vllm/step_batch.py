"""The requests of a step as the observers of attention see them, read from vLLM's runner."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.engines.vllm.plan import StepPlan
from harness.engines.vllm.signals.batch import StepBatch, StepPages

if TYPE_CHECKING:
    from harness.engines.vllm.runner import EvictionRunning


def step_batch(
    runner: "EvictionRunning", plan: StepPlan, num_resident: list[int], pages: StepPages | None
) -> StepBatch:
    """This step's batch, once the runner has prepared its inputs.

    Args:
        runner: holds the batch.
        plan: of this step.
        num_resident: tokens of each request after this step, on average where counts differ.
        pages: where pages are looked up; None where they follow from blocks.
    """
    request_ids, num_reqs = runner.input_batch.req_ids, len(num_resident)
    starts = runner.query_start_loc.np[: num_reqs + 1].tolist()
    num_blocks = math.ceil(max(num_resident) / runner.eviction_policy.block_size)
    table = runner.input_batch.block_table[0]
    return StepBatch(
        request_ids=request_ids,
        starts=starts,
        num_seen=[n + plan.num_evicted.get(name, 0) for name, n in zip(request_ids, num_resident, strict=True)],
        num_resident=num_resident,
        prefilling=[name in plan.prefilling for name in request_ids],
        block_table=table.get_device_tensor(num_reqs)[:, :num_blocks].long(),
        slot_mapping=table.slot_mapping.gpu[: starts[-1]],
        observed=_observed(runner, plan, starts),
        pages=pages,
    )


def _observed(runner: "EvictionRunning", plan: StepPlan, starts: Sequence[int]) -> list[int]:
    """How many of each request's new tokens, the last of them, are a prompt's window or come after the prompt."""
    counts = []
    for index, request_id in enumerate(runner.input_batch.req_ids):
        count = starts[index + 1] - starts[index]
        if request_id in plan.prefilling:
            behind = runner.requests[request_id].num_tokens - runner.eviction_policy.query_window
            seen = int(runner.input_batch.num_computed_tokens_cpu[index]) + count
            count = min(count, max(0, seen - behind))
        counts.append(count)
    return counts
