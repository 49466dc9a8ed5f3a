"""kvpress as an engine: its presses on the same prompts, one request at a time, in an environment of their own."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.engines.contract import (
    BlockUsageSample,
    EngineStats,
    EvictionRecord,
    GenerationRequest,
    GenerationResult,
    KeptTokens,
    mean_over_time,
)
from harness.engines.kvpress.presses import Press
from harness.engines.kvpress.process import INTERPRETER, WORKER, WorkerProcess


class KvpressEngine:
    """Implements `harness.engines.contract.Engine` on a kvpress worker.

    A request's resident tokens are the real lengths of the worker's cache, as a mean over layers, rounded up: a press
    prunes each layer as soon as it was attended, so that only one layer at a time holds the whole prompt. Memory is
    counted as blocks that these tokens would fill; the "pool" is the largest number ever in use. Tokens that a press
    masks but keeps in memory count as evicted and as resident.
    """

    def __init__(
        self,
        model_path: str,
        press: Press | None,
        budget: int | None,
        dtype: str,
        block_size: int,
        revision: str | None = None,
        interpreter: Path = INTERPRETER,
        worker: Path = WORKER,
        budget_of: Callable[[int], int] | None = None,
    ) -> None:
        """Start the worker and load the model.

        Args:
            model_path: folder or hub id of a causal LM.
            press: what compresses; None for the full cache.
            budget: prompt tokens that stay; None for the full cache, and with `budget_of`.
            dtype: of weights and cache.
            block_size: unit of the statistics.
            revision: of a model on the hub.
            interpreter, worker: as in `WorkerProcess`.
            budget_of: tokens of a prompt -> those that stay, where that is a share.

        Raises:
            UserError: the environment is missing, or the worker refuses the press or dies.
        """
        self._block_size, self._budget_of = block_size, budget_of
        self._worker = WorkerProcess(_arguments(model_path, press, budget, dtype, revision), interpreter, worker)
        versions = ", ".join(f"{name} {version}" for name, version in self._worker.hello["versions"].items())
        print(f"peer: {versions}", flush=True)
        self._bytes_per_token: int = self._worker.hello["bytes_per_token"]
        self._usage: list[BlockUsageSample] = []
        self._records: list[EvictionRecord] = []
        self._kept: list[list[list[int]]] = []
        self._press_s = 0.0
        self._start_s: float | None = None

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[GenerationResult]:
        """Yield one result a request, in the order of the requests.

        Raises:
            UserError: the worker died.
        """
        for request in requests:
            arrival_s = time.perf_counter()
            reply = self._worker.ask(self._line(request))
            yield GenerationResult(
                request_id=reply["request_id"],
                token_ids=reply["token_ids"],
                finish_reason=reply["finish_reason"],
                num_prompt_tokens=len(request.prompt_token_ids),
                eviction=self._account(len(request.prompt_token_ids), reply, arrival_s),
                ttft_s=reply["ttft_s"],
                e2e_s=reply["e2e_s"],
            )

    def stats(self) -> EngineStats:
        """Counts since the engine was built; a step is one forward."""
        mean_blocks, measured_s = mean_over_time(self._usage)
        peak_blocks = max((record.peak_blocks for record in self._records), default=0)
        return EngineStats(
            block_size=self._block_size,
            num_blocks=peak_blocks,
            bytes_per_block=self._bytes_per_token * self._block_size,
            peak_blocks=peak_blocks,
            mean_blocks=mean_blocks,
            free_blocks_at_end=peak_blocks,
            num_steps=len(self._usage),
            num_evictions=sum(record.num_evictions for record in self._records),
            num_evicted_tokens=sum(record.num_evicted_tokens for record in self._records),
            num_preemptions=0,
            eviction_time_s=self._press_s,
            measured_s=measured_s,
            block_usage=list(self._usage),
            kept=KeptTokens.over(self._kept) if any(map(_is_unequal, self._kept)) else None,
        )

    def close(self) -> None:
        """End the worker."""
        self._worker.close()

    def _line(self, request: GenerationRequest) -> dict[str, Any]:
        """A request as the worker takes it."""
        own = {} if self._budget_of is None else {"budget": self._budget_of(len(request.prompt_token_ids))}
        return {
            "request_id": request.request_id,
            "prompt_token_ids": request.prompt_token_ids,
            "max_new_tokens": request.max_new_tokens,
            "stop_token_ids": [] if request.ignore_eos else list(request.stop_token_ids),
            "min_new_tokens": request.min_new_tokens,
            **own,
        }

    def _account(self, num_prompt_tokens: int, reply: dict[str, Any], arrival_s: float) -> EvictionRecord:
        """Add a finished request to the statistics and sum up what the press did to it."""
        num_layers, kept_by_head = len(reply["kept_tokens"]), reply["kept_by_head"]
        kept, final, peak = (
            _ceil(total, num_layers)
            for total in (sum(reply["kept_tokens"]), sum(reply["final_tokens"]), reply["prompt_peak_tokens"])
        )
        if self._start_s is None:
            self._start_s = arrival_s + reply["ttft_s"]
        self._add_usage(arrival_s - self._start_s, peak, range(kept + 1, final + 1), reply)
        record = EvictionRecord(
            num_evictions=int(reply["compressed"]),
            num_evicted_tokens=num_prompt_tokens - _ceil(sum(map(sum, kept_by_head)), sum(map(len, kept_by_head))),
            peak_resident_tokens=max(peak, final),
            final_resident_tokens=final,
            peak_blocks=self._num_blocks(max(peak, final)),
        )
        self._records.append(record)
        if reply["compressed"]:
            self._kept.append(kept_by_head)
        self._press_s += reply["press_s"]
        return record

    def _add_usage(self, offset_s: float, prompt: int, decode: Sequence[int], reply: dict[str, Any]) -> None:
        """Add a row a forward, as other engines do: `prompt` tokens, then those of each decode step.

        The worker does not time single steps, so they share the time after the first token evenly.
        """
        first_s = offset_s + reply["ttft_s"]
        step_s = (reply["e2e_s"] - reply["ttft_s"]) / max(len(decode), 1)
        self._usage.append(BlockUsageSample(first_s, self._num_blocks(prompt), running=1, prefilling=1))
        self._usage += [
            BlockUsageSample(first_s + number * step_s, self._num_blocks(length), running=1)
            for number, length in enumerate(decode, start=1)
        ]

    def _num_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` fill, the last one perhaps in part."""
        return _ceil(num_tokens, self._block_size)


def _arguments(model_path: str, press: Press | None, budget: int | None, dtype: str, revision: str | None) -> list[str]:
    arguments = [model_path, "--dtype", dtype]
    if revision is not None:
        arguments += ["--revision", revision]
    if press is not None:
        arguments += ["--press", json.dumps(press)]
        if budget is not None:
            arguments += ["--budget", str(budget)]
    return arguments


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _is_unequal(counts: list[list[int]]) -> bool:
    """Whether layers or heads keep unequally many tokens."""
    return len({count for heads in counts for count in heads}) > 1
