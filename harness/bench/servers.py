"""Engines of a load test. vLLM is imported only when one is built."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from harness.bench.config import Variant
from harness.engines.choose import engine_shape
from harness.engines.contract import EngineStats
from harness.engines.vllm.traffic import TimedRequest, TokenEvent
from harness.errors import UserError


class Server(Protocol):
    """Carries a load; `harness.engines.vllm.serving.Server` is the real one."""

    def serve(self, requests: Sequence[TimedRequest]) -> Iterator[TokenEvent]:
        """Continue every prompt from its arrival on, telling of every token."""
        ...

    def stats(self) -> EngineStats | None:
        """Counts since the engine was built; None for stock vLLM."""
        ...

    def close(self) -> None:
        """Release the model and the KV pool."""
        ...


Builder = Callable[[Variant], Server]


def vllm_builder(model_path: str, load_format: str) -> Builder:
    """Builds vLLM engines that load the model at `model_path`; `prepare_engine` comes first."""

    def build(variant: Variant) -> Server:
        try:
            return _build(variant, model_path, load_format)
        except (ValueError, RuntimeError) as error:
            raise UserError(
                f"the engine of {variant.label} did not start: {error} "
                "Check engine.block_size, engine.num_kv_blocks and engine.kv_cache_gib, and what else uses the memory."
            ) from error

    return build


def _build(variant: Variant, model_path: str, load_format: str) -> Server:
    from harness.engines.vllm.serving import Server as VllmServer
    from harness.engines.vllm.settings import EvictionSettings

    config, policy = variant.config, variant.config.policy
    shape = replace(engine_shape(config, model_path), load_format=load_format)
    settings = EvictionSettings(policy.name, policy.budget, policy.options, reserve=config.engine.reserve)
    return VllmServer(shape, None if variant.is_stock else settings)
