"""Who works when: every variant carries the load once, then every variant once more, so that ratios hold on a machine
whose speed drifts.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence

from harness.bench.config import Plan, Variant
from harness.bench.load import warmup_load
from harness.bench.measure import collect, usage_between
from harness.bench.records import Repeat
from harness.bench.servers import Builder, Server
from harness.engines.vllm.traffic import TimedRequest
from harness.errors import UserError


class Ready:
    """A warm engine.

    Attributes:
        engine_start_s, warmup_s: seconds it took.
    """

    def __init__(self, variant: Variant, build: Builder, warmup: Sequence[TimedRequest]) -> None:
        """Build the engine and let it answer `warmup`."""
        start = time.perf_counter()
        self.variant = variant
        self.server: Server = build(variant)
        self.engine_start_s = time.perf_counter() - start
        try:
            self.warmup_s = max(timing.token_s[-1] for timing in collect(warmup, self.server.serve(warmup)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the engine."""
        self.server.close()


def run_interleaved(plan: Plan, load: Sequence[TimedRequest], build: Builder) -> Iterator[Repeat]:
    """Measure every variant `repeats` times in turn; every other round goes backwards, against a steady drift.

    Raises:
        UserError: an engine does not start, or a policy that had to evict did not.
    """
    start = time.perf_counter()
    warmup = warmup_load(plan, load)
    with contextlib.ExitStack() as stack:
        kept: list[Ready] = []
        if plan.config.side_by_side:
            for variant in plan.variants:
                kept.append(Ready(variant, build, warmup))
                stack.callback(kept[-1].close)
        for number in range(plan.config.repeats):
            order = range(len(plan.variants))
            for index in reversed(order) if number % 2 else order:
                began_s = time.perf_counter() - start
                if kept:
                    yield measure(kept[index], number, load, began_s)
                else:
                    with contextlib.closing(Ready(plan.variants[index], build, warmup)) as ready:
                        yield measure(ready, number, load, began_s)


def measure(ready: Ready, number: int, load: Sequence[TimedRequest], began_s: float) -> Repeat:
    """Let one engine carry the load once.

    Raises:
        UserError: a policy that had to evict did not.
    """
    before = ready.server.stats()
    timings = collect(load, ready.server.serve(load))
    after = ready.server.stats()
    repeat = Repeat(
        variant=ready.variant,
        number=number,
        load=load,
        timings=timings,
        began_s=began_s,
        engine_start_s=ready.engine_start_s,
        warmup_s=ready.warmup_s,
        before=before,
        after=after,
        usage=[] if before is None or after is None else usage_between(before, after),
    )
    _check_evictions(repeat)
    return repeat


def _check_evictions(repeat: Repeat) -> None:
    from harness.engines.prompt_plans import prompt_plans

    plan_of = prompt_plans(repeat.variant.config)
    if plan_of is None or repeat.before is None or repeat.after is None:
        return
    lengths = {len(timed.request.prompt_token_ids) for timed in repeat.load}
    if repeat.after.num_evictions == repeat.before.num_evictions and any(
        plan_of(length).planned_tokens < length for length in lengths
    ):
        raise UserError(
            f"{repeat.variant.label} evicted nothing, although it has to from prompts of {max(lengths)} tokens: this "
            "would measure a full cache. Mend the policy or the engine plugin."
        )
