"""A deterministic engine without a model: answers depend on the prompt alone, so a resumed run must equal a whole one.

Choose it with `engine.name=tests.scripted_engine:ScriptedEngine`. Its faults are set by environment variables:
SCRIPTED_CRASH_AFTER=N raises after N answers, SCRIPTED_NEVER_EVICT=N ignores a policy of budget N, SCRIPTED_ABORT=task
ends the answers of a task with "abort", SCRIPTED_DROP=task never gives them, SCRIPTED_DELAY_S=s waits before each
answer, SCRIPTED_KILLED_BUDGET=N dies of SIGKILL, as by the out-of-memory killer, at the second request if that is the
budget.
"""

import hashlib
import os
import signal
import time
from collections.abc import Iterable, Iterator

from harness.config import HarnessConfig
from harness.engines.contract import (
    BlockUsageSample,
    EngineStats,
    EvictionRecord,
    GenerationRequest,
    GenerationResult,
    mean_over_time,
)
from harness.engines.prompt_plans import prompt_plans

BYTES_PER_TOKEN = 4
FIRST_LETTER, NUM_LETTERS = 66, 26


class ScriptedEngine:
    """Implements `harness.engines.contract.Engine`."""

    def __init__(self, config: HarnessConfig, model_path: str) -> None:
        budget = config.policy.budget
        self._budget = None if os.environ.get("SCRIPTED_NEVER_EVICT") == str(budget) else budget
        self._plan_of = None if self._budget is None else prompt_plans(config)
        self._block_size = config.engine.block_size
        self._peaks: list[int] = []
        self._evicted = 0

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[GenerationResult]:
        """Answer one request after the other, in the order given."""
        crash_after = int(os.environ.get("SCRIPTED_CRASH_AFTER", "-1"))
        for number, request in enumerate(requests):
            if number == crash_after:
                raise RuntimeError("scripted crash")
            if number == 1 and os.environ.get("SCRIPTED_KILLED_BUDGET") == str(self._budget):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(float(os.environ.get("SCRIPTED_DELAY_S", "0")))
            task = request.request_id.split("/")[0]
            if task != os.environ.get("SCRIPTED_DROP"):
                yield self._answer(request, "abort" if task == os.environ.get("SCRIPTED_ABORT") else "stop")

    def stats(self) -> EngineStats:
        """One step an answer."""
        blocks = [-(-peak // self._block_size) for peak in self._peaks]
        usage = [BlockUsageSample(float(step), count, 1) for step, count in enumerate(blocks)]
        mean_blocks, measured_s = mean_over_time(usage)
        return EngineStats(
            block_size=self._block_size,
            num_blocks=1000,
            bytes_per_block=self._block_size * BYTES_PER_TOKEN,
            peak_blocks=max(blocks, default=0),
            mean_blocks=mean_blocks,
            free_blocks_at_end=1000,
            num_steps=len(blocks),
            num_evictions=self._evicted,
            num_evicted_tokens=self._evicted,
            num_preemptions=0,
            eviction_time_s=0.0,
            measured_s=measured_s,
            block_usage=usage,
        )

    def close(self) -> None:
        """Nothing to release."""

    def _answer(self, request: GenerationRequest, finish_reason: str) -> GenerationResult:
        num_prompt = len(request.prompt_token_ids)
        num_evicted = 0 if self._plan_of is None else num_prompt - self._plan_of(num_prompt).planned_tokens
        self._peaks.append(num_prompt)
        self._evicted += num_evicted > 0
        digest = hashlib.sha256(repr(request.prompt_token_ids).encode()).digest()
        return GenerationResult(
            request_id=request.request_id,
            token_ids=[FIRST_LETTER + byte % NUM_LETTERS for byte in digest[: min(8, request.max_new_tokens)]],
            finish_reason=finish_reason,
            num_prompt_tokens=num_prompt,
            eviction=EvictionRecord(
                num_evictions=int(num_evicted > 0),
                num_evicted_tokens=num_evicted,
                peak_resident_tokens=num_prompt,
                final_resident_tokens=num_prompt - num_evicted,
                peak_blocks=-(-num_prompt // self._block_size),
            ),
            ttft_s=0.5,
            e2e_s=1.0,
        )
