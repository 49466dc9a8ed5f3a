"""Who works when: every variant carries the load once, then every variant once more, so that ratios hold on a machine
whose speed drifts.
"""

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence

from harness.bench.config import Plan, Variant
from harness.bench.load import warmup_load
from harness.bench.measure import collect, usage_between
from harness.bench.records import Repeat
from harness.bench.servers import Builder, Server
from harness.engines.vllm.traffic import TimedRequest
from harness.errors import UserError

QUIET_S = 1.5  # vLLM's workers look for work without a pause for a second after their last


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


def run_interleaved(
    plan: Plan, load: Sequence[TimedRequest], build: Builder, done: Collection[tuple[str, int]] = ()
) -> Iterator[Repeat]:
    """Measure every variant `repeats` times in turn; every other round goes backwards, against a steady drift.

    Args:
        plan: the load test.
        load: what every engine is asked.
        build: starts the engine of a variant.
        done: label and number of the repeats that were measured before.

    Raises:
        UserError: an engine does not start, or a policy that had to evict did not.
    """
    start = time.perf_counter()
    warmup = warmup_load(plan, load)
    left = [(variant, number) for variant, number in _in_turn(plan) if (variant.label, number) not in done]
    with contextlib.ExitStack() as stack:
        kept: dict[str, Ready] = {}
        if plan.config.side_by_side and left:
            for variant in plan.variants:
                kept[variant.label] = Ready(variant, build, warmup)
                stack.callback(kept[variant.label].close)
        for variant, number in left:
            if kept:
                time.sleep(QUIET_S)
                yield measure(kept[variant.label], number, load, time.perf_counter() - start)
            else:
                began_s = time.perf_counter() - start
                with contextlib.closing(Ready(variant, build, warmup)) as ready:
                    yield measure(ready, number, load, began_s)


def _in_turn(plan: Plan) -> Iterator[tuple[Variant, int]]:
    for number in range(plan.config.repeats):
        for variant in reversed(plan.variants) if number % 2 else plan.variants:
            yield variant, number


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
