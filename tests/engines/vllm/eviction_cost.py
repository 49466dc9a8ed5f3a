"""What evicting while decoding costs a step: `python -m tests.engines.vllm.eviction_cost [POLICY ...]`.

No model and no engine: compactor and observers on caches of SmolLM2's shape (30 layers, 3 KV heads, 9 query heads, head
size 64, blocks of 32), one thread, CPU time of the main thread. Where attention is watched, each layer's cache is read
before, untimed, as its kernel does. Requests hold the budget, so that every step evicts (of
policies that evict blocks, one step in 32: their cost is that of such a step divided by 32).
"""

import argparse
import time

import torch

from harness.engines.vllm.allocator import keep_freed_memory
from harness.engines.vllm.compaction import Compactor, Victim
from harness.engines.vllm.layout import CpuLayout
from harness.engines.vllm.observers import QUERY_SIGNALS, Observers
from harness.engines.vllm.plan import Eviction
from harness.engines.vllm.signals.batch import StepBatch
from policies import Phase, Policy, Unit, build_policy

NUM_LAYERS, NUM_HEADS, GROUP, HEAD_SIZE, BLOCK = 30, 3, 3, 64, 32
POLICIES = ("paged_eviction", "streaming_llm", "random", "inverse_key_l2", "keydiff", "tova", "h2o")


class Step:
    """One decoding step of `num_requests` requests at the budget, without the model."""

    def __init__(self, policy: Policy, num_requests: int) -> None:
        self._policy = policy
        self._num_before = policy.budget + (BLOCK if policy.decode_unit is Unit.BLOCK else 1)
        width = -(-self._num_before // BLOCK)
        num_blocks = num_requests * width + 1
        caches = torch.randn(NUM_LAYERS, num_blocks, NUM_HEADS, BLOCK, 2 * HEAD_SIZE)
        self._caches = caches.unbind()
        layout = CpuLayout(self._caches)
        watches = policy.signals & QUERY_SIGNALS
        self._observers = (
            Observers(policy, layout, num_rows=num_requests + 1, scale=HEAD_SIZE**-0.5, rotary=None)
            if watches
            else None
        )
        self._compactor = Compactor(
            policy, layout, observers=self._observers, inv_freq=None, average_over_ranks=lambda scores: scores
        )
        self._ids = [f"r{index}" for index in range(num_requests)]
        self._tables = torch.randperm(num_blocks - 1).add_(1)[: num_requests * width].view(num_requests, width)
        self._seen = self._num_before
        self._query = torch.randn(num_requests, NUM_HEADS * GROUP, HEAD_SIZE)
        positions = torch.arange(self._num_before)
        for table in self._tables:
            self._compactor.positions.write(table[positions // BLOCK] * BLOCK + positions % BLOCK, positions)

    def run(self) -> float:
        """Observe the newest token, then evict; seconds of CPU time."""
        start, untimed = time.thread_time(), 0.0
        newest = self._num_before - 1
        slots = self._tables[:, newest // BLOCK] * BLOCK + newest % BLOCK
        self._seen += 1
        self._compactor.positions.write(slots, torch.full_like(slots, self._seen - 1))
        num_requests = len(self._ids)
        if self._observers is not None:
            self._observers.begin_step(
                StepBatch(
                    request_ids=self._ids,
                    starts=list(range(num_requests + 1)),
                    num_seen=[self._seen] * num_requests,
                    num_resident=[self._num_before] * num_requests,
                    prefilling=[False] * num_requests,
                    block_table=self._tables,
                    slot_mapping=slots,
                )
            )
            for layer in range(NUM_LAYERS):
                kernel = time.thread_time()
                self._caches[layer].sum()
                untimed += time.thread_time() - kernel
                self._observers.observe(layer, self._query)
            self._observers.end_step()
        eviction = Eviction(Phase.DECODE, self._num_before, self._policy.budget, self._seen)
        tables = self._tables.tolist()
        self._compactor.evict([Victim(name, eviction, tables[row]) for row, name in enumerate(self._ids)])
        return time.thread_time() - start - untimed


def milliseconds(name: str, budget: int, num_requests: int, repeats: int) -> float:
    """CPU time a step; the median of `repeats`."""
    policy = build_policy(name, budget=budget, block_size=BLOCK)
    step = Step(policy, num_requests)
    step.run()
    spent = [step.run() for _ in range(repeats)]
    share = 1 / BLOCK if policy.decode_unit is Unit.BLOCK else 1
    return 1000 * share * sorted(spent)[repeats // 2]


def main() -> None:
    """Print a line a policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policies", nargs="*", default=POLICIES)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{options.requests} requests, budget {options.budget}, CPU ms a decode step")
    with torch.inference_mode():
        for name in options.policies:
            cost = milliseconds(name, options.budget, options.requests, options.repeats)
            print(f"{name:16s} {cost:8.2f}", flush=True)


if __name__ == "__main__":
    main()
