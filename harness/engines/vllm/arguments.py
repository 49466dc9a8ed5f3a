"""vLLM engine arguments: what the harness fixes, and what the plugin adds."""

import hashlib
import json
from collections import UserDict
from dataclasses import asdict, dataclass
from typing import Any

from vllm.platforms import current_platform

from harness.engines.vllm.observers import QUERY_SIGNALS
from harness.engines.vllm.settings import CONFIG_KEY, EvictionSettings

GIB = 1 << 30
PIECEWISE = "PIECEWISE"


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """Everything about an engine that is not the policy, so that policies differ in nothing else.

    Attributes:
        num_kv_blocks: size of the KV pool in blocks, None to let `kv_cache_gib` decide.
        kv_cache_gib: size of the KV pool, None on CUDA for what vLLM finds free.
        async_scheduling: schedule a step while the one before runs; None for where the policy allows it.
    """

    model: str
    dtype: str
    max_model_len: int
    block_size: int
    revision: str | None = None
    load_format: str = "auto"
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    num_kv_blocks: int | None = None
    kv_cache_gib: float | None = None
    enforce_eager: bool = True
    async_scheduling: bool | None = False
    tensor_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    seed: int = 0


def stock_arguments(shape: EngineShape) -> dict[str, Any]:
    """Arguments of a stock engine: token ids in, token ids out, no defaults supplied by the model."""
    arguments = asdict(shape)
    num_kv_blocks, kv_cache_gib = arguments.pop("num_kv_blocks"), arguments.pop("kv_cache_gib")
    if kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * GIB)
    if num_kv_blocks is not None:
        arguments["num_gpu_blocks_override"] = num_kv_blocks
    return arguments | {
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "use_tqdm_on_load": False,
    }


def eviction_arguments(shape: EngineShape, settings: EvictionSettings) -> dict[str, Any]:
    """Stock arguments plus the plugin."""
    asynchronous = may_overlap(settings, shape.block_size) if shape.async_scheduling is None else shape.async_scheduling
    arguments = stock_arguments(shape) | plugin_arguments(settings, asynchronous=asynchronous)
    if not shape.enforce_eager and changes_attention(settings, shape.block_size):
        arguments["compilation_config"] = {"cudagraph_mode": PIECEWISE}
    return arguments


def changes_attention(settings: EvictionSettings, block_size: int) -> bool:
    """True if the policy needs queries or attention, or a page table for each layer and head.

    Observers run beside the attention kernel, and page tables change its shapes. A full CUDA graph replays the
    kernel alone, so that they would see nothing and no error would tell; piecewise graphs leave attention out.
    """
    policy = settings.build_policy(block_size)
    return bool(policy.signals & QUERY_SIGNALS) or policy.by_page


def may_overlap(settings: EvictionSettings, block_size: int) -> bool:
    """Whether a step may be scheduled before the one before is done: not where the data decide how many tokens stay."""
    return not settings.build_policy(block_size).measured


def plugin_arguments(settings: EvictionSettings, *, asynchronous: bool) -> dict[str, Any]:
    """What turns a stock engine into an evicting one.

    Args:
        settings: policy and accounting.
        asynchronous: schedule a step while the one before runs; vLLM's CPU platform never does.
    """
    on_cpu = current_platform.is_cpu()
    asynchronous = asynchronous and not on_cpu
    scheduler = "AsyncEvictionScheduler" if asynchronous else "EvictionScheduler"
    worker = "cpu.EvictionCPUWorker" if on_cpu else "cuda.EvictionGPUWorker"
    return {
        "async_scheduling": asynchronous,
        "scheduler_cls": f"harness.engines.vllm.scheduler.{scheduler}",
        "worker_cls": f"harness.engines.vllm.{worker}",
        "additional_config": AdditionalConfig({CONFIG_KEY: asdict(settings)}),
    }


class AdditionalConfig(UserDict[str, Any]):
    """vLLM's `additional_config`, of which the plugin's own part stays out of the hash of compiled graphs.

    No policy changes a graph, and temporary paths in the hash would make every start compile anew.
    """

    def compute_hash(self) -> str:
        """vLLM's protocol `SupportsHash`."""
        others = {key: value for key, value in self.data.items() if key != CONFIG_KEY}
        return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()
