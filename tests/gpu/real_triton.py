"""vLLM's Triton kernels on a machine without a GPU; import before anything else of vLLM that uses Triton.

vLLM's CPU build replaces Triton by a placeholder. Here its kernels see the real one, which runs them in its interpreter
if TRITON_INTERPRET=1 is set.
"""

import importlib

import torch
import triton
import triton.language
import vllm.triton_utils

HOPPER = (9, 0)

vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language
torch.cuda.get_device_capability = lambda device=None: HOPPER  # a launcher asks, to choose a tile size

cache_write = importlib.import_module("vllm.v1.attention.ops.triton_reshape_and_cache_flash")
attention = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention")
