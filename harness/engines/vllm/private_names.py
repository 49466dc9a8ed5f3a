"""The inside of vLLM that the plugin leans on, in one table, so that another version's breakage is one message."""

import ast
import importlib
import inspect
import textwrap
from functools import cache

RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
WORKER = "vllm.v1.worker.gpu_worker:Worker"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"

NAMES = {
    RUNNER: (
        "__init__", "get_kv_cache_spec", "initialize_kv_cache", "_update_states", "_prepare_inputs",
        "_build_attention_metadata", "_get_slot_mappings", "_dummy_run", "sample_tokens", "attn_groups",
        "max_num_tokens", "max_model_len", "_make_buffer", "_kernel_block_sizes", "max_num_reqs",
        "shared_kv_cache_layers", "kv_cache_config", "compilation_config", "model_config", "parallel_config", "model",
        "device", "requests", "input_batch", "positions", "seq_lens", "optimistic_seq_lens_cpu", "req_indices",
        "query_start_loc", "vllm_config",
    ),
    "vllm.v1.worker.gpu_input_batch:InputBatch": (
        "req_ids", "req_id_to_index", "num_reqs", "block_table", "num_computed_tokens_cpu", "num_prompt_tokens",
    ),
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": ("block_ids", "num_prompt_tokens", "num_tokens"),
    "vllm.v1.worker.block_table:BlockTable": (
        "block_table", "slot_mapping", "num_blocks_per_row", "compute_slot_mapping", "get_device_tensor",
    ),
    "vllm.v1.worker.block_table:MultiGroupBlockTable": ("compute_slot_mapping", "__getitem__"),
    "vllm.v1.utils:CpuGpuBuffer": ("cpu", "gpu", "np", "copy_to_gpu"),
    WORKER: (
        "__init__", "_make_model_runner", "determine_available_memory", "get_supported_kv_cache_layouts",
        "execute_model", "model_runner", "cache_config",
        "vllm_config",
    ),
    SCHEDULER: (
        "__init__", "add_request", "schedule", "update_from_output", "_reserve_prefill_lookahead",
        "_free_request", "running", "requests",
        "kv_cache_manager", "kv_cache_config", "scheduler_config", "vllm_config", "max_model_len",
    ),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": ("_update_after_schedule",),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "num_scheduled_tokens", "total_num_scheduled_tokens", "finished_req_ids", "preempted_req_ids",
    ),
    "vllm.v1.request:Request": (
        "num_computed_tokens", "num_prompt_tokens", "num_tokens", "max_tokens", "num_output_placeholders",
        "is_prefill_chunk", "num_preemptions",
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager": ("coordinator", "block_pool"),
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": ("single_type_managers",),
    "vllm.v1.core.block_pool:BlockPool": (
        "free_blocks", "num_gpu_blocks", "get_num_free_blocks", "get_new_blocks", "is_block_writable",
        "_maybe_evict_cached_block",
    ),
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager": (
        "__init__", "find_longest_cache_hit", "get_num_blocks_to_allocate", "allocate_new_blocks",
        "pop_blocks_for_free", "cache_blocks", "req_to_blocks", "block_pool", "block_size", "enable_caching",
    ),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": (
        "merge", "max_memory_usage_bytes", "page_size_bytes", "sliding_window", "attention_chunk_size", "non_causal",
        "num_head_slots", "state_content_bytes", "tokens_per_state", "head_size_v", "kv_quant_mode",
    ),
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry": ("check_kv_cache_spec_registry", "register"),
    "vllm.engine.arg_utils:EngineArgs": ("create_engine_config", "_api_process_count", "additional_config"),
    "vllm.config:VllmConfig": ("use_v2_model_runner", "additional_config", "compute_hash"),
    "vllm.model_executor.layers.rotary_embedding:RotaryEmbedding": ("_compute_inv_freq", "cos_sin_cache"),
    "vllm.v1.attention.backend:AttentionImpl": ("forward",),
    "vllm.v1.attention.backend:AttentionMetadataBuilder": ("build", "requires_block_table_width"),
    "vllm.v1.worker.utils:AttentionGroup": ("backend", "layer_names", "get_metadata_builder"),
    "vllm.v1.metrics.loggers:StatLoggerBase": ("record", "log_engine_initialized"),
}  # fmt: skip


def missing_names(names: dict[str, tuple[str, ...]] = NAMES) -> list[str]:
    """What the installed vLLM does not have: "module:Class" or "module:Class.name"."""
    missing = []
    for place, wanted in names.items():
        module, _, attribute = place.partition(":")
        try:
            owner = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError):
            missing.append(place)
            continue
        missing += [f"{place}.{name}" for name in wanted if name not in names_of(owner)]
    return missing


@cache
def names_of(owner: type) -> frozenset[str]:
    """Attributes of a class and what its own methods set on `self`."""
    names = set(dir(owner))
    for cls in owner.__mro__[:-1]:
        names |= set(vars(cls).get("__annotations__", {}))
        if cls.__module__.startswith("vllm"):
            names |= _set_on_self(cls)
    return frozenset(names)


def _set_on_self(cls: type) -> set[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
