"""Worker and runner for vLLM's CUDA build (model runner V1)."""

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from harness.engines.vllm.layout import InterleavedLayout
from harness.engines.vllm.observers import PAGED_SIGNALS
from harness.engines.vllm.prompt_rows import rows_of_state
from harness.engines.vllm.ragged.refusals import layouts_of_pages
from harness.engines.vllm.ragged.runner import RaggedRunning
from harness.engines.vllm.runner import EvictionRunning
from harness.engines.vllm.slices import transient_bytes
from harness.engines.vllm.worker import EvictionReporting, is_ragged
from policies import Policy, Signal

GIB = 1 << 30
POSITION_BYTES = torch.int32.itemsize
SIGNAL_BYTES = torch.float32.itemsize


class EvictionGPUModelRunner(EvictionRunning, GPUModelRunner):
    """CUDA runner that evicts."""

    layout_class = InterleavedLayout

    def memory_for_cache(self, available: int) -> int:
        """Of `available` bytes those that the KV cache may take; the rest is for what the plugin keeps beside it."""
        specs = self.get_kv_cache_spec()
        if not specs or self.eviction_policy.is_idle:
            return available
        spec = next(iter(specs.values()))
        num_query_heads = self.model_config.get_num_attention_heads(self.parallel_config)
        num_rows = rows_of_state(self.eviction_policy, self.max_num_reqs)
        per_block, fixed = bytes_beside(self.eviction_policy, spec, num_query_heads, num_rows)
        per_page, pages, shared = self.bytes_of_pages(spec)
        per_block += per_page * spec.num_kv_heads
        kept = (fixed + pages) * len(specs) + shared
        share = spec.page_size_bytes / (spec.page_size_bytes + per_block)
        left = available - kept - transient_bytes(self.device)
        if left <= 0:
            raise ValueError(
                f"policy={self.eviction_policy.name} keeps {kept / GIB:.1f} GiB of what its requests "
                f"asked for, {num_rows} rows of it, and {available / GIB:.1f} GiB are left on this device. "
                "Lower max_num_seqs, raise gpu_memory_utilization, or use another policy."
            )
        return int(left * share)


class RaggedGPUModelRunner(RaggedRunning, EvictionGPUModelRunner):
    """CUDA runner whose layers and heads keep unequally many tokens."""


class EvictionGPUWorker(EvictionReporting, Worker):
    """`worker_cls` on CUDA."""

    model_runner: EvictionGPUModelRunner

    def _make_model_runner(self) -> EvictionGPUModelRunner:
        runner = RaggedGPUModelRunner if is_ragged(self.vllm_config) else EvictionGPUModelRunner
        return runner(self.vllm_config, self.device)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """As stock; of these the one in which pages of single KV heads can be told apart, where a policy needs them."""
        supported = super().get_supported_kv_cache_layouts()
        return layouts_of_pages(supported) if is_ragged(self.vllm_config) else supported

    def determine_available_memory(self) -> int:
        """As stock, less what the plugin keeps beside the cache. A size that the user gave is the cache's alone."""
        available = super().determine_available_memory()
        if self.cache_config.kv_cache_memory_bytes is not None:
            return available
        return self.model_runner.memory_for_cache(available)


def bytes_beside(policy: Policy, spec: FullAttentionSpec, num_query_heads: int, num_rows: int) -> tuple[int, int]:
    """What compactor and observers allocate for one layer.

    Args:
        policy: names its signals.
        spec: the layer's cache.
        num_query_heads: query heads of this rank.
        num_rows: see `rows_of_state`.

    Returns:
        Bytes a block, and bytes whatever the number of blocks.
    """
    per_slot = POSITION_BYTES * (spec.num_kv_heads if policy.per_head else 1)
    if policy.scores_stay:
        per_slot += SIGNAL_BYTES * (spec.num_kv_heads if policy.per_head else 1)
    if policy.cache_positions and spec.dtype.itemsize < torch.float32.itemsize:
        per_slot += spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
    per_slot += SIGNAL_BYTES * spec.num_kv_heads * len(policy.signals & PAGED_SIGNALS)
    query, fixed = num_query_heads * spec.head_size, 0
    if Signal.WINDOW_QUERIES in policy.signals:
        fixed += num_rows * policy.query_window * query * spec.dtype.itemsize
    if Signal.NEWEST_ATTENTION in policy.signals:
        fixed += num_rows * query * spec.dtype.itemsize
    if Signal.ATTENTION_MASS in policy.signals and not policy.by_page:
        fixed += num_rows * query * spec.dtype.itemsize
    if Signal.QUERY_MOMENTS in policy.signals:
        fixed += num_rows * query * (1 + spec.head_size) * SIGNAL_BYTES
    return per_slot * spec.block_size, fixed
