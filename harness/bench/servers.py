"""Engines of a load test. vLLM is imported only when one is built."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from harness.bench.config import Variant
from harness.config import EngineConfig, ModelConfig
from harness.engine.traffic import TimedRequest, TokenEvent
from harness.engines import engine_shape
from harness.errors import UserError
from harness.generation import EngineStats
from harness.hardware import GIB, inference_device

BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}


class Server(Protocol):
    """Carries a load; `harness.engine.serving.Server` is the real one."""

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
    from harness.engine.serving import Server as VllmServer
    from harness.engine.settings import EvictionSettings

    config, policy = variant.config, variant.config.policy
    shape = replace(
        engine_shape(config, model_path),
        load_format=load_format,
        kv_cache_gib=_pool_gib(config.model, config.engine),
    )
    settings = EvictionSettings(policy.name, policy.budget, policy.options, reserve=config.engine.reserve)
    return VllmServer(shape, None if variant.is_stock else settings)


def _pool_gib(model: ModelConfig, engine: EngineConfig) -> float | None:
    """Size of the pool where blocks are counted. On CPU vLLM would otherwise ask for most of the machine's memory."""
    if engine.num_kv_blocks is None or inference_device() != "cpu":
        return engine.kv_cache_gib
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * BYTES_OF_DTYPE[model.dtype]
    return engine.num_kv_blocks * engine.block_size * per_token / GIB
