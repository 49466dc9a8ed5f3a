"""The reference as an engine: one request at a time, no batching, no pool."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.engines.contract import (
    BlockUsageSample,
    EngineStats,
    EvictionRecord,
    GenerationRequest,
    GenerationResult,
    KeptTokens,
    ReadTokens,
    mean_over_time,
)
from harness.engines.hf.cache import CacheShape
from harness.engines.hf.generate import run_reference
from harness.engines.hf.selection import SCORE_BITS
from harness.engines.hf.trace import ReferenceTrace, Retained
from harness.errors import UserError
from harness.retention import RetentionRecord, append_retention
from policies.base import Phase, Policy
from policies.prompt_share import for_model
from policies.registry import build_policy

FULL_BLOCK_SIZE = 32
"""Block size in the statistics of a run without a policy: the smallest that vLLM's CPU build takes."""


class ReferenceEngine:
    """Implements `harness.engines.contract.Engine` on a Hugging Face model.

    Memory is counted as blocks that the resident tokens would fill; the "pool" is the largest number ever in use.
    """

    def __init__(
        self,
        model_path: str,
        policy: Policy | None = None,
        dtype: str = "float32",
        revision: str | None = None,
        retention: Path | None = None,
    ) -> None:
        """Load the model.

        Args:
            model_path: folder or hub id of a causal LM.
            policy: what to evict; None keeps everything.
            dtype: of the weights and the cache; attention itself is float32 always.
            revision: of a model on the hub.
            retention: run folder in which the positions kept are recorded for every request; None for no record.

        Raises:
            UserError: the model cannot be loaded.
            ValueError: an option of the policy does not fit the model.
        """
        try:
            self._model = AutoModelForCausalLM.from_pretrained(model_path, revision=revision, dtype=dtype).eval()
        except (OSError, ValueError) as error:
            raise UserError(
                f"model.path={model_path} cannot be loaded ({error}). Give a folder with config.json and weights."
            ) from error
        policy = policy or build_policy("full", budget=None, block_size=FULL_BLOCK_SIZE)
        shape = CacheShape.of(self._model.config)
        policy = for_model(policy, shape.num_layers, shape.num_kv_heads)
        self._policy = policy.for_vocabulary(lambda: token_texts(model_path, revision))
        self._retention = None if policy.is_idle else retention
        self._bytes_per_block = self._count_block_bytes()
        self._usage: list[BlockUsageSample] = []
        self._records: list[EvictionRecord] = []
        self._kept: list[list[list[int]]] = []
        self._read: ReadTokens | None = None
        self._eviction_s = 0.0
        self._start_s: float | None = None

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[GenerationResult]:
        """Yield one result a request, in the order of the requests."""
        for request in requests:
            arrival_s = time.perf_counter()
            trace = run_reference(
                self._model,
                self._policy,
                request.prompt_token_ids,
                request.max_new_tokens,
                stop_token_ids=request.stop_token_ids,
                min_new_tokens=request.min_new_tokens,
                ignore_eos=request.ignore_eos,
                retention=self._retention is not None,
            )
            e2e_s = time.perf_counter() - arrival_s
            record = self._account(trace, arrival_s)
            if self._retention is not None:
                self._write(request, trace.retained)
            yield GenerationResult(
                request_id=request.request_id,
                token_ids=trace.token_ids,
                finish_reason=trace.finish_reason,
                num_prompt_tokens=len(request.prompt_token_ids),
                eviction=record,
                ttft_s=trace.ttft_s,
                e2e_s=e2e_s,
            )

    def stats(self) -> EngineStats:
        """Counts since the engine was built."""
        blocks = [sample.blocks for sample in self._usage]
        mean_blocks, measured_s = mean_over_time(self._usage)
        peak_blocks = max(blocks, default=0)
        return EngineStats(
            block_size=self._policy.block_size,
            num_blocks=peak_blocks,
            bytes_per_block=self._bytes_per_block,
            peak_blocks=peak_blocks,
            mean_blocks=mean_blocks,
            free_blocks_at_end=peak_blocks,
            num_steps=len(blocks),
            num_evictions=sum(record.num_evictions for record in self._records),
            num_evicted_tokens=sum(record.num_evicted_tokens for record in self._records),
            num_preemptions=0,
            eviction_time_s=self._eviction_s,
            measured_s=measured_s,
            block_usage=list(self._usage),
            score_bits=SCORE_BITS,
            kept=KeptTokens.over(self._kept),
            read=self._read,
        )

    def close(self) -> None:
        """Release the model."""
        del self._model

    def _account(self, trace: ReferenceTrace, arrival_s: float) -> EvictionRecord:
        """Add a finished request to the statistics and sum up what eviction did to it."""
        if self._start_s is None:
            self._start_s = arrival_s + trace.steps[0].end_s
        offset_s = arrival_s - self._start_s
        self._usage += [
            BlockUsageSample(offset_s + step.end_s, self._num_blocks(step.num_resident), running=1)
            for step in trace.steps
        ]
        peak = max(step.num_resident for step in trace.steps)
        record = EvictionRecord(
            num_evictions=len(trace.decisions),
            num_evicted_tokens=sum(decision.num_resident_before - decision.num_keep for decision in trace.decisions),
            peak_resident_tokens=peak,
            final_resident_tokens=_mean_length(trace.resident_positions),
            peak_blocks=self._num_blocks(peak),
        )
        self._records.append(record)
        of_prompt = [decision.counts for decision in trace.decisions if decision.phase is not Phase.DECODE]
        if self._policy.allocation == "ragged" and of_prompt:
            self._kept.append(of_prompt[-1])
        if trace.read is not None:
            self._read = trace.read if self._read is None else self._read + trace.read
        self._eviction_s += trace.eviction_s
        return record

    def _write(self, request: GenerationRequest, retained: Retained) -> None:
        """Append what was retained of a request, as the vLLM engine does."""
        num_lists = None if self._policy.per_head else 1
        moments = (("prefill_end", retained.prompt), ("end", retained.end))
        records = [
            RetentionRecord(
                request.request_id, len(request.prompt_token_ids), moment, [heads[:num_lists] for heads in layers]
            )
            for moment, layers in moments
        ]
        append_retention(self._retention, records)

    def _num_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` fill, the last one perhaps in part."""
        return -(-num_tokens // self._policy.block_size)

    def _count_block_bytes(self) -> int:
        """Keys and values of one block in all layers."""
        shape = CacheShape.of(self._model.config)
        num_numbers = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * self._policy.block_size
        return num_numbers * self._model.dtype.itemsize


def token_texts(model_path: str, revision: str | None) -> list[str]:
    """The text of every token id of the model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(model_path, revision=revision)
    return [tokenizer.decode([token]) for token in range(len(tokenizer))]


def _mean_length(rows: list[list[list[int]]]) -> int:
    """Tokens that a layer and KV head holds on average."""
    lengths = [len(positions) for heads in rows for positions in heads]
    return sum(lengths) // len(lengths)
