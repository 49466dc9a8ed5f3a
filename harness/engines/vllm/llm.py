"""The vLLM engine as the experiment sees it."""

import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from vllm import EngineArgs, SamplingParams
from vllm.outputs import RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine

from harness.engines.contract import (
    BlockUsageSample,
    EngineStats,
    EvictionRecord,
    GenerationRequest,
    GenerationResult,
    mean_over_time,
)
from harness.engines.vllm.arguments import EngineShape, eviction_arguments
from harness.engines.vllm.ragged.kept_tokens import join_kept, join_read
from harness.engines.vllm.settings import CONFIG_KEY, EvictionSettings
from harness.engines.vllm.trace import read_trace
from policies.selection import SCORE_BITS

WAITING_PER_SEQUENCE = 2


class VllmEngine:
    """vLLM with the eviction plugin; implements `harness.engines.contract.Engine`.

    Call `harness.engines.vllm.environment.prepare_environment` before this module is imported.
    """

    def __init__(self, shape: EngineShape, settings: EvictionSettings) -> None:
        """Load the model and allocate the KV pool.

        Raises:
            ValueError: the policy refuses its settings, or they do not fit the engine.
        """
        self.policy = policy = settings.build_policy(shape.block_size)
        if policy.evicts and policy.prefill == "chunked" and policy.prefill_chunk > shape.max_num_batched_tokens:
            raise ValueError(
                f"policy.options.prefill_chunk={policy.prefill_chunk} is larger than "
                f"engine.max_num_batched_tokens={shape.max_num_batched_tokens}, so no chunk could be scheduled whole. "
                "Lower the chunk or raise engine.max_num_batched_tokens."
            )
        self._trace_folder = tempfile.TemporaryDirectory(prefix="kv-trace-")
        self._trace = Path(self._trace_folder.name) / "steps.jsonl"
        self._max_waiting = shape.max_num_seqs * WAITING_PER_SEQUENCE
        arguments = eviction_arguments(shape, replace(settings, trace=str(self._trace)))
        self.llm_engine = LLMEngine.from_engine_args(EngineArgs(**arguments))

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[GenerationResult]:
        """Continue prompts greedily; results come as they finish.

        Requests are taken from the iterable a few at a time, so that it may tokenise lazily.
        """
        pending = iter(requests)
        running: dict[str, tuple[GenerationRequest, float]] = {}
        while True:
            for request in islice(pending, self._max_waiting - len(running)):
                running[request.request_id] = (request, time.perf_counter())
                prompt = {"prompt_token_ids": request.prompt_token_ids}
                self.llm_engine.add_request(request.request_id, prompt, sampling_params(request))
            if not running:
                self.llm_engine.collective_rpc("record_resident")
                return
            for output in self.llm_engine.step():
                if output.finished:
                    request, arrival = running.pop(output.request_id)
                    yield _result(request, output, time.perf_counter() - arrival)

    def stats(self) -> EngineStats:
        """See `harness.engines.contract.Engine`; read from the scheduler's trace and from the workers."""
        shape, changes = read_trace(self._trace)
        steps, last = [change for change in changes if change.running], changes[-1] if changes else None
        seconds = self.llm_engine.collective_rpc("eviction_seconds")
        usage = [BlockUsageSample(step.t_s, step.blocks, step.running, step.prefilling) for step in changes]
        mean_blocks, measured_s = mean_over_time(usage)
        return EngineStats(
            block_size=shape.block_size,
            num_blocks=shape.num_blocks,
            bytes_per_block=shape.bytes_per_block,
            peak_blocks=max((step.blocks for step in steps), default=0),
            mean_blocks=mean_blocks,
            free_blocks_at_end=shape.num_blocks - 1 - (last.blocks if last else 0),
            num_steps=len(steps),
            num_evictions=last.num_evictions if last else 0,
            num_evicted_tokens=last.num_evicted_tokens if last else 0,
            num_preemptions=last.num_preemptions if last else 0,
            eviction_time_s=max(total for total, _ in seconds),
            decode_eviction_time_s=max(decoding for _, decoding in seconds),
            measured_s=measured_s,
            block_usage=usage,
            score_bits=SCORE_BITS,
            kept=join_kept(self.llm_engine.collective_rpc("kept_tokens")),
            read=join_read(self.llm_engine.collective_rpc("read_tokens")),
        )

    def close(self) -> None:
        """Shut the engine down and wait for its processes."""
        self.llm_engine.engine_core.shutdown()
        self._trace_folder.cleanup()


def sampling_params(request: GenerationRequest) -> SamplingParams:
    """Greedy, with every field that could otherwise come from elsewhere spelled out."""
    return SamplingParams(
        n=1,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        max_tokens=request.max_new_tokens,
        min_tokens=request.min_new_tokens,
        stop_token_ids=[] if request.ignore_eos else list(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        detokenize=False,
    )


def _result(request: GenerationRequest, output: RequestOutput, e2e_s: float) -> GenerationResult:
    completion = output.outputs[0]
    token_ids = list(completion.token_ids)
    if completion.finish_reason == "stop" and token_ids and token_ids[-1] in request.stop_token_ids:
        token_ids.pop()
    return GenerationResult(
        request_id=request.request_id,
        token_ids=token_ids,
        finish_reason=completion.finish_reason,
        num_prompt_tokens=len(request.prompt_token_ids),
        eviction=EvictionRecord(**output.kv_transfer_params[CONFIG_KEY]),
        ttft_s=output.metrics.first_token_latency,
        e2e_s=e2e_s,
    )
