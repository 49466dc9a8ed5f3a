"""What unequal counts cannot live with beyond what eviction cannot, each by name and with a remedy."""

from collections.abc import Sequence

import torch
from vllm import envs
from vllm.config import CUDAGraphMode
from vllm.v1.worker.utils import AttentionGroup

from harness.engines.vllm.layout import CacheLayout
from harness.engines.vllm.paged import PageGrid
from policies import Policy, Signal
from policies.views import ReadSignal

PAGED_LAYOUT = "LBHNC"
NAMES = (None, PAGED_LAYOUT, "HND")
"""What VLLM_KV_CACHE_LAYOUT may be; HND is vLLM's older name for it."""


def layouts_of_pages(supported: Sequence[str]) -> list[str]:
    """Of the layouts that an engine supports the one in which a page of one KV head is one run of memory.

    Raises:
        ValueError: the user asked for another, or the attention backend does not support it.
    """
    if envs.VLLM_KV_CACHE_LAYOUT not in NAMES:
        raise ValueError(
            f"VLLM_KV_CACHE_LAYOUT={envs.VLLM_KV_CACHE_LAYOUT} mixes KV heads, which this policy keeps apart. Unset it "
            f"or set it to {PAGED_LAYOUT}."
        )
    if PAGED_LAYOUT not in supported:
        raise ValueError(
            f"the attention backend supports the KV cache layouts {', '.join(supported)}, and this policy needs "
            f"{PAGED_LAYOUT}. Choose attention_backend=FLASH_ATTN, or a policy with equal counts."
        )
    return [PAGED_LAYOUT]


def refuse_ragged(
    policy: Policy,
    layers: Sequence[torch.nn.Module],
    groups: Sequence[AttentionGroup],
    layout: CacheLayout,
    mode: CUDAGraphMode,
) -> None:
    """Check that the attention backend and its cache can be addressed page by page.

    Raises:
        ValueError: names the first thing that is in the way.
    """
    grid = layout.grid
    dense = PageGrid.dense(grid.num_layers, grid.num_blocks, grid.num_heads, grid.block_size, grid.device)
    backend = groups[0].backend
    problems = {
        f"the KV cache lies in strides {tuple(layers[0].kv_cache.stride())} of blocks, heads, slots and numbers, where "
        "pages of single KV heads are not one run of memory; unset VLLM_KV_CACHE_LAYOUT or set it to LBHNC": (
            grid != dense or not layout.pages.is_contiguous()
        ),
        f"its layers use several attention backends ({', '.join(sorted(g.backend.get_name() for g in groups))})": (
            len(groups) > 1
        ),
        f"cudagraph_mode={mode.name} replays attention with the shapes of a model whose heads hold equally many; "
        "use cudagraph_mode=PIECEWISE or enforce_eager": mode.has_full_cudagraphs(),
        f"attention backend {backend.get_name()} writes keys and values inside its kernel; use FLASH_ATTN": (
            backend.forward_includes_kv_cache_update
        ),
        f"attention backend {backend.get_name()} plans with the width of stock block tables; use FLASH_ATTN": (
            backend.get_builder_cls().requires_block_table_width
        ),
        "it bounds the keys of pages, and evicts from them": (
            policy.evicts and ReadSignal.PAGE_BOUNDS in policy.read_signals
        ),
        "it rotates keys by their place among those that stay, which differs by head": policy.cache_positions,
        "it asks for signals that are kept for equal counts alone (key_directions, newest_attention)": bool(
            policy.signals & {Signal.KEY_DIRECTIONS, Signal.NEWEST_ATTENTION}
        ),
        "the model's attention has a sink for each query head": any(
            getattr(layer.impl, "sinks", None) is not None for layer in layers
        ),
    }
    for problem, present in problems.items():
        if present:
            raise ValueError(f"policy={policy.name} needs a page table for each layer and head: {problem}.")
