"""What eviction cannot live with, each by name and with a remedy. Silence here would be wrong text later."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from harness.engines.vllm.private_names import missing_names
from policies import Policy, Signal

if TYPE_CHECKING:
    from vllm.config import SchedulerConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

OF_WHOLE_PROMPTS = frozenset({Signal.ATTENTION_MASS, Signal.SQUARED_ATTENTION, Signal.QUERY_MOMENTS})
CPU_VERSIONS, CUDA_VERSIONS = ("0.32.0",), ("0.32.0", "0.33.0")


def refuse_settings(vllm_config: "VllmConfig", policy: Policy, reserve: bool) -> None:
    """Check the engine's own settings.

    Args:
        vllm_config: the engine's.
        policy: evicts.
        reserve: see `EvictionSettings.reserve`.

    Raises:
        ValueError: names the first that is not supported.
    """
    refuse_version()
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    no_prefix = why_no_prefix_caching(policy)
    _raise_first(
        {
            f"prefix caching is on, but {no_prefix}; set enable_prefix_caching=False": (
                no_prefix is not None and cache.enable_prefix_caching
            ),
            "speculative decoding is on; remove speculative_config": vllm_config.speculative_config is not None,
            "a KV connector is configured; remove kv_transfer_config": vllm_config.kv_transfer_config is not None,
            f"kv_cache_dtype={cache.cache_dtype} is quantised; use kv_cache_dtype=auto": (
                cache.cache_dtype not in ("auto", "float16", "bfloat16", "float32")
            ),
            f"pipeline_parallel_size={parallel.pipeline_parallel_size}; use 1": parallel.pipeline_parallel_size > 1,
            f"decode_context_parallel_size={parallel.decode_context_parallel_size}; use 1": (
                parallel.decode_context_parallel_size > 1
            ),
            f"prefill_context_parallel_size={parallel.prefill_context_parallel_size}; use 1": (
                parallel.prefill_context_parallel_size > 1
            ),
            f"data_parallel_size={parallel.data_parallel_size}; use 1, or one server each": (
                parallel.data_parallel_size > 1
            ),
            "dual batch overlap splits the batch; remove enable_dbo": parallel.use_ubatching,
            "model runner V2 is in use; set VLLM_USE_V2_MODEL_RUNNER=0": vllm_config.use_v2_model_runner,
            f"runner={vllm_config.model_config.runner_type}; a pooling model generates nothing to evict for": (
                vllm_config.model_config.runner_type != "generate"
            ),
            "admission does not ask for a request's whole length, as reserve needs; leave out "
            "--no-scheduler-reserve-full-isl or set reserve to false": (
                reserve and not vllm_config.scheduler_config.scheduler_reserve_full_isl
            ),
        }
    )


def why_no_prefix_caching(policy: Policy) -> str | None:
    """Why prompts may not start from blocks that another request has filled; None if they may."""
    if policy.is_idle:
        return None
    if watched := policy.signals & OF_WHOLE_PROMPTS:
        names = ", ".join(sorted(signal.value for signal in watched))
        return f"policy={policy.name} watches {names} of the whole prompt, which tokens found in the cache never show"
    if policy.prefill == "chunked":
        return "a prompt found in the cache would move the borders of prefill=chunked"
    if policy.by_page:
        return f"policy={policy.name} gives layers and heads pages of their own, also in blocks that others read"
    return None


def refuse_version() -> None:
    """Check that the plugin was written for the installed vLLM.

    Raises:
        ValueError: names the version, those that will do, and what the plugin needs and does not find.
    """
    import vllm
    from vllm.platforms import current_platform

    known = CPU_VERSIONS if current_platform.is_cpu() else CUDA_VERSIONS
    installed = vllm.__version__.partition("+")[0]
    if installed in known:
        return
    missing = ", ".join(missing_names()) or "nothing, by name"
    raise ValueError(
        f"KV eviction cannot run: vLLM {installed} is installed, and the plugin hooks into the inside of "
        f"{' and '.join(known)}. Install vllm=={known[0]}. (Missing from {installed}: {missing}.)"
    )


def refuse_chunks(policy: Policy, config: "SchedulerConfig", is_multimodal: bool) -> None:
    """Check that pinned prompt chunks can be scheduled whole: one that never can would wait for ever.

    Raises:
        ValueError: names the setting in the way.
    """
    if not policy.evicts or policy.prefill != "chunked":
        return
    chunk = policy.prefill_chunk
    most = config.max_num_scheduled_tokens or config.max_num_batched_tokens
    threshold = config.long_prefill_token_threshold
    name = f"prefill_chunk={chunk} cannot be scheduled whole"
    _raise_first(
        {
            f"{name} in steps of {most} tokens; lower it or raise max_num_batched_tokens": chunk > most,
            f"{name} with long_prefill_token_threshold={threshold}; use 0 or {chunk} for that": 0 < threshold < chunk,
            f"{name} where images cut prompts; use prefill=after": is_multimodal,
        }
    )


def refuse_layers(specs: Mapping[str, "KVCacheSpec"]) -> None:
    """Check that all layers keep plain keys and values of one shape.

    Raises:
        ValueError: names the layer and what it has.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    for layer, spec in specs.items():
        if type(spec) is not FullAttentionSpec or spec.sliding_window or spec.attention_chunk_size or spec.non_causal:
            raise ValueError(
                f"KV eviction supports full causal attention only; layer {layer} has {type(spec).__name__}"
                f"(sliding_window={getattr(spec, 'sliding_window', None)}). Use a model without such layers, "
                "policy=full, or a context (max_model_len) that is not longer than the window."
            )
        packed = spec.num_head_slots not in (None, spec.num_kv_heads) or spec.state_content_bytes is not None
        if packed or spec.tokens_per_state != 1 or spec.head_size_v != spec.head_size:
            raise ValueError(
                f"the attention backend packs keys and values of layer {layer} in a way of its own, which KV eviction "
                "cannot take apart. Choose another attention backend."
            )
        if spec.kv_quant_mode != KVQuantMode.NONE:
            raise ValueError(
                f"the KV cache of layer {layer} is quantised ({spec.kv_quant_mode.name}), by the checkpoint if not by "
                "kv_cache_dtype. Use another checkpoint or kv_cache_dtype=auto."
            )
    shapes = {(spec.num_kv_heads, spec.head_size, spec.block_size, spec.dtype) for spec in specs.values()}
    if len(shapes) > 1:
        raise ValueError(
            "KV eviction needs layers with one KV geometry; this model's have (KV heads, head size, block size, dtype) "
            f"{sorted(shapes, key=str)}. Use another model."
        )


def refuse_cpu_kernels(layers: Sequence[torch.nn.Module]) -> None:
    """Check that vLLM's CPU attention laid its cache out as `CpuLayout` reads it.

    Raises:
        ValueError: names the kernels.
    """
    if other := sorted({layer.isa for layer in layers} - {"vec"}):
        raise ValueError(
            f"vLLM's CPU attention uses its {', '.join(other)} kernels here, whose cache KV eviction cannot read; it "
            "reads that of vec. Use dtype=float32, a block size of 32 and a model with a head size that 32 divides."
        )


def refuse_rotary(rotary: torch.nn.Module, head_size: int) -> None:
    """Check that we can turn keys as the model does.

    Raises:
        ValueError: names the kind of rotary embedding.
    """
    from vllm.model_executor.layers.rotary_embedding import Llama3RotaryEmbedding, RotaryEmbedding

    plain = type(rotary) in (RotaryEmbedding, Llama3RotaryEmbedding) and rotary.is_neox_style
    if not plain or rotary.rotary_dim != head_size:
        raise ValueError(
            f"this policy turns keys or queries by hand, as Llama's rotary embedding does; the model has "
            f"{type(rotary).__name__}(rotary_dim={rotary.rotary_dim} of {head_size}, "
            f"is_neox_style={rotary.is_neox_style}). Use another policy."
        )


def _raise_first(problems: Mapping[str, bool]) -> None:
    for problem, present in problems.items():
        if present:
            raise ValueError(f"KV eviction cannot run: {problem}.")
