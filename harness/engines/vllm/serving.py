"""vLLM under a serving load: with the plugin, or stock to compare it with."""

import time
from collections import deque
from collections.abc import Iterator, Sequence

from vllm import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from harness.engines.contract import EngineStats, GenerationRequest
from harness.engines.vllm.arguments import EngineShape, stock_arguments
from harness.engines.vllm.llm import VllmEngine, sampling_params
from harness.engines.vllm.settings import EvictionSettings
from harness.engines.vllm.traffic import TimedRequest, TokenEvent


class Server:
    """An engine that takes requests as they arrive and tells of every token."""

    def __init__(self, shape: EngineShape, settings: EvictionSettings | None) -> None:
        """Load the model and allocate the KV pool.

        Args:
            shape: the engine.
            settings: the policy; None for stock vLLM without the plugin.

        Raises:
            ValueError: the policy refuses its settings, or they do not fit the engine.
        """
        self._evicting = None if settings is None else VllmEngine(shape, settings)
        self._llm = (
            LLMEngine.from_engine_args(EngineArgs(**stock_arguments(shape)))
            if self._evicting is None
            else self._evicting.llm_engine
        )

    def serve(self, requests: Sequence[TimedRequest]) -> Iterator[TokenEvent]:
        """Continue prompts greedily, each from its arrival on; tokens come as the engine makes them.

        Requests enter the engine between two of its steps, so one may wait for the step under way.
        """
        waiting = deque(sorted(requests, key=lambda timed: timed.at_s))
        num_running = 0
        start = time.perf_counter()
        while waiting or num_running:
            now = time.perf_counter() - start
            while waiting and waiting[0].at_s <= now:
                self._add(waiting.popleft().request)
                num_running += 1
            if not num_running:
                time.sleep(waiting[0].at_s - now)
                continue
            outputs = self._llm.step()
            now = time.perf_counter() - start
            for output in outputs:
                num_running -= output.finished
                yield TokenEvent(output.request_id, now, len(output.outputs[0].token_ids), output.finished)

    def _add(self, request: GenerationRequest) -> None:
        params = sampling_params(request)
        params.output_kind = RequestOutputKind.DELTA
        self._llm.add_request(request.request_id, {"prompt_token_ids": request.prompt_token_ids}, params)

    def stats(self) -> EngineStats | None:
        """Counts since the engine was built; None for stock vLLM, which does not keep them."""
        return None if self._evicting is None else self._evicting.stats()

    def close(self) -> None:
        """Shut the engine down and wait for its processes."""
        if self._evicting is None:
            self._llm.engine_core.shutdown()
        else:
            self._evicting.close()
