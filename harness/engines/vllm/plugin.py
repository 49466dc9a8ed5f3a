"""Makes a stock `vllm serve` evict (entry point `vllm.general_plugins`).

Inert unless `--additional-config '{"kv_eviction": {...}}'` is given. Then scheduler and worker are filled in and what
eviction cannot live with is switched off, or refused if it was asked for.
"""

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.budget import budget_text, is_share
from harness.engines.vllm.counters import temporary_counter_file
from harness.engines.vllm.refusals import why_no_prefix_caching
from harness.engines.vllm.settings import (
    CONFIG_KEY,
    EvictionSettings,
    check_folders,
    parse_settings,
    read_settings,
    refuse_near_misses,
)

if TYPE_CHECKING:
    from vllm import EngineArgs
    from vllm.config import VllmConfig

OWN_CLASSES = "harness.engines.vllm."


def register() -> None:
    """Called by vLLM once in each of its processes, before any engine is configured."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.logger import init_logger

    stock = EngineArgs.create_engine_config
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def create_engine_config(self: "EngineArgs", *args: Any, **kwargs: Any) -> "VllmConfig":
        with _plain_errors(is_server=_is_server(*args, **kwargs)):
            refuse_near_misses(self.additional_config or {})
            evicts = CONFIG_KEY in (self.additional_config or {}) and not _is_configured(self)
            changes = configure(self) if evicts else []
        config = stock(self, *args, **kwargs)
        if evicts:
            with _plain_errors(is_server=_is_server(*args, **kwargs)):
                settings = read_settings(config)
            init_logger(f"vllm.{__name__}").info(start_line(settings, config.cache_config.block_size, changes))
        return config

    EngineArgs.create_engine_config = create_engine_config


def _is_server(usage_context: object = None, *_: Any, **__: Any) -> bool:
    from vllm.usage.usage_lib import UsageContext

    return usage_context is UsageContext.OPENAI_API_SERVER


@contextmanager
def _plain_errors(*, is_server: bool) -> Iterator[None]:
    """A server that refuses its settings ends with one line; vLLM would print its own traceback around it."""
    try:
        yield
    except ValueError as error:
        if is_server:
            raise SystemExit(f"error: {error}") from None
        raise


def configure(arguments: "EngineArgs") -> list[str]:
    """Fill in the plugin's classes.

    Returns:
        What was switched off, in words.

    Raises:
        ValueError: the settings cannot be used. Refusals of other engine settings follow when the engine starts.
    """
    from vllm.config import CacheConfig, CUDAGraphMode

    from harness.engines.vllm.arguments import AdditionalConfig, changes_attention, may_overlap, plugin_arguments

    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    given = arguments.additional_config[CONFIG_KEY]
    settings = parse_settings({"reserve": False, **given} if isinstance(given, dict) else given)
    check_folders(settings)
    block_size = arguments.block_size or CacheConfig.DEFAULT_BLOCK_SIZE
    changes_it = changes_attention(settings, block_size)  # builds the policy, which checks its own settings
    _refuse(arguments)
    if settings.counters is None:
        settings = replace(settings, counters=temporary_counter_file())
    asynchronous = arguments.async_scheduling
    if asynchronous is None:
        asynchronous = may_overlap(settings, block_size)
    for name, value in plugin_arguments(settings, asynchronous=asynchronous).items():
        if name == "additional_config":
            value = AdditionalConfig({**arguments.additional_config, **value})
        setattr(arguments, name, value)
    changes = []
    if arguments.enable_prefix_caching is None:
        arguments.enable_prefix_caching = False
        can_stay = why_no_prefix_caching(settings.build_policy(block_size)) is None
        changes.append("prefix caching" + " (--enable-prefix-caching keeps it)" * can_stay)
    if arguments.compilation_config.cudagraph_mode is None and changes_it:
        arguments.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
        changes.append("full CUDA graphs (attention is watched, or called by head)")
    return changes


def start_line(settings: EvictionSettings, block_size: int, changes: Sequence[str]) -> str:
    """What a server says of itself when it starts."""
    policy = settings.build_policy(block_size)
    admission = "the pool must hold every peak (reserve=true)" if settings.reserve else "as stock vLLM (reserve=false)"
    what = f"budget={_budget(settings)}, prefill={policy.prefill}"
    if not policy.evicts:
        what = "which keeps everything" + f" and reads budget={policy.budget} tokens" * policy.reads_less
    return (
        f"KV eviction is on: policy={policy.name}, {what}, block_size={block_size}; admission: {admission}; "
        f"switched off: {', '.join(changes) or 'nothing'}"
    )


def _budget(settings: EvictionSettings) -> str:
    if settings.budget is None:
        return "none"
    return f"{budget_text(settings.budget)} {'of each prompt' if is_share(settings.budget) else 'tokens'}"


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
