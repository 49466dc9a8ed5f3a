"""Makes a stock `vllm serve` evict (entry point `vllm.general_plugins`).

Inert unless `--additional-config '{"kv_eviction": {...}}'` is given. Then scheduler and worker are filled in and what
eviction cannot live with is switched off, or refused if it was asked for.
"""

import atexit
import functools
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.engines.vllm.settings import CONFIG_KEY, parse_settings

if TYPE_CHECKING:
    from vllm import EngineArgs
    from vllm.config import VllmConfig

OWN_CLASSES = "harness.engines.vllm."


def register() -> None:
    """Called by vLLM once in each of its processes, before any engine is configured."""
    from vllm.engine.arg_utils import EngineArgs

    stock = EngineArgs.create_engine_config
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def create_engine_config(self: "EngineArgs", *args: Any, **kwargs: Any) -> "VllmConfig":
        if CONFIG_KEY in (self.additional_config or {}) and not _is_configured(self):
            configure(self)
        return stock(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_engine_config


def configure(arguments: "EngineArgs") -> None:
    """Fill in the plugin's classes.

    Raises:
        ValueError: the settings cannot be used. Refusals of other engine settings follow when the engine starts.
    """
    from vllm.config import CacheConfig, CUDAGraphMode

    from harness.engines.vllm.arguments import plugin_arguments, watches_attention

    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    settings = parse_settings(arguments.additional_config[CONFIG_KEY])
    _refuse(arguments)
    if settings.counters is None:
        settings = replace(settings, counters=_counter_file())
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


def _is_configured(arguments: "EngineArgs") -> bool:
    """Whether these arguments come from `plugin_arguments` already."""
    return str(arguments.scheduler_cls).startswith(OWN_CLASSES)


def _refuse(arguments: "EngineArgs") -> None:
    """Raise ValueError for what no longer shows in the configuration that the engine gets."""
    if arguments.scheduler_cls is not None:
        raise ValueError(f"KV eviction brings its own scheduler; remove scheduler_cls={arguments.scheduler_cls}.")
    if arguments.data_parallel_size > 1:
        raise ValueError(
            f"KV eviction cannot run: data_parallel_size={arguments.data_parallel_size}; use 1, or one server each."
        )
    if arguments._api_process_count > 1:
        raise ValueError(
            f"KV eviction cannot run: api_server_count={arguments._api_process_count}, and each server would count "
            "evictions again; use 1."
        )


def _counter_file() -> str:
    """A file that is gone when this process ends."""
    handle, path = tempfile.mkstemp(prefix="kv-eviction-counters-")
    os.close(handle)
    atexit.register(Path(path).unlink, missing_ok=True)
    return path
