"""Makes a stock `vllm serve` evict (entry point `vllm.general_plugins`).

Inert unless `--additional-config '{"kv_eviction": {...}}'` is given. Then scheduler and worker are filled in and what
eviction cannot live with is switched off, or refused if it was asked for.
"""

import functools
import os
import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.engine.settings import CONFIG_KEY, parse_settings

if TYPE_CHECKING:
    from vllm import EngineArgs
    from vllm.config import VllmConfig


def register() -> None:
    """Called by vLLM once in each of its processes, before any engine is configured."""
    from vllm.engine.arg_utils import EngineArgs

    stock = EngineArgs.create_engine_config
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def create_engine_config(self: "EngineArgs", *args: Any, **kwargs: Any) -> "VllmConfig":
        if CONFIG_KEY in (self.additional_config or {}) and self.scheduler_cls is None:
            configure(self)
        return stock(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_engine_config


def configure(arguments: "EngineArgs") -> None:
    """Fill in the plugin's classes.

    Raises:
        ValueError: the settings cannot be used. Refusals of other engine settings follow when the engine starts.
    """
    from vllm.config import CacheConfig, CUDAGraphMode

    from harness.engine.arguments import plugin_arguments, watches_attention

    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    settings = parse_settings(arguments.additional_config[CONFIG_KEY])
    if settings.counters is None:
        handle, path = tempfile.mkstemp(prefix="kv-eviction-counters-")
        os.close(handle)
        settings = replace(settings, counters=path)
    asynchronous = arguments.async_scheduling is not False
    for name, value in plugin_arguments(settings, asynchronous=asynchronous).items():
        if name == "additional_config":
            value = {**arguments.additional_config, **value}
        setattr(arguments, name, value)
    if arguments.enable_prefix_caching is None:
        arguments.enable_prefix_caching = False
    compilation, block_size = arguments.compilation_config, arguments.block_size or CacheConfig.DEFAULT_BLOCK_SIZE
    if compilation.cudagraph_mode is None and watches_attention(settings, block_size):
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
