"""`python -m tests.engines.vllm.schedule_cost`: what `schedule()` costs, with the plugin and without.

Stock and evicting scheduler take turns; prints the median processor milliseconds of a decode step and their ratio.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    from harness.engines.vllm.environment import prepare_environment

    prepare_environment(in_process=True)

from vllm.v1.core.sched.scheduler import Scheduler

from harness.engines.vllm.arguments import EngineShape
from harness.engines.vllm.settings import EvictionSettings
from tests.engines.vllm.schedulers import add_request, answer, build_scheduler
from tests.tiny_llama import save_tiny_llama

BLOCK, LONGEST, NUM_BLOCKS, PROMPT, BUDGET = 16, 2048, 40_000, 300, 256


def ready(shape: EngineShape, settings: EvictionSettings | None) -> Scheduler:
    """A scheduler whose requests have all been read."""
    scheduler = build_scheduler(shape, settings, NUM_BLOCKS)
    for index in range(shape.max_num_seqs):
        add_request(scheduler, f"r{index}", PROMPT + index % BLOCK, LONGEST - PROMPT - BLOCK)
    while scheduler.waiting or any(request.is_prefill_chunk for request in scheduler.running):
        answer(scheduler, scheduler.schedule())
    return scheduler


def step(scheduler: Scheduler) -> float:
    """Processor seconds of one `schedule()`; other work on the machine does not count."""
    start = time.thread_time()
    output = scheduler.schedule()
    seconds = time.thread_time() - start
    answer(scheduler, output)
    return seconds


def measure(shape: EngineShape, settings: EvictionSettings, num_steps: int) -> tuple[float, float]:
    """Median seconds of a decode step: stock, evicting."""
    schedulers = [ready(shape, each) for each in (None, settings)]
    times: list[list[float]] = [[], []]
    for _ in range(num_steps):
        for scheduler, seconds in zip(schedulers, times, strict=True):
            seconds.append(step(scheduler))
    stock, ours = (statistics.median(seconds) for seconds in times)
    return stock, ours


def main() -> None:
    """Print one line a policy and number of requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--policies", nargs="+", default=["full", "paged_eviction_literal", "h2o"])
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_llama(Path(folder) / "tiny")
        for name in arguments.policies:
            settings = EvictionSettings(name, budget=None if name == "full" else BUDGET, reserve=False)
            for count in arguments.requests:
                shape = EngineShape(
                    model=str(model), dtype="float32", max_model_len=LONGEST, block_size=BLOCK, max_num_seqs=count,
                    max_num_batched_tokens=8192, kv_cache_gib=0.1,
                )  # fmt: skip
                stock, ours = measure(shape, settings, arguments.steps)
                print(f"{name}, {count} requests: stock {stock * 1e3:.2f} ms, ours {ours * 1e3:.2f} ms, "
                      f"{ours / stock:.2f}x", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
