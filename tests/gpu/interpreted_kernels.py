"""Runs vLLM's own Triton kernels on CPU tensors, in Triton's interpreter, around an eviction.

A process of its own, because Triton reads TRITON_INTERPRET=1 when it is imported. Prints JSON: for each memory layout
the largest error of the attention output after an eviction, and the same error with the lengths before it.
"""

import json

import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

from policies import Phase, build_policy
from tests.gpu import real_triton
from tests.gpu.caches import BLOCK, HEAD_SIZE, NUM_HEADS, NUM_LAYERS, World, allocate, spec_of

GROUP = 2
SCALE = HEAD_SIZE**-0.5
REQUESTS = {"a": 3 * BLOCK + 3, "b": BLOCK}


def write_with_triton(cache: torch.Tensor, slot: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """As `TritonAttentionImpl.do_kv_cache_update`."""
    key_cache, value_cache = cache.transpose(1, 2).split(HEAD_SIZE, dim=-1)
    one = torch.ones(1)
    slots = torch.tensor([slot, -1])  # the second token is padding, as in a CUDA graph
    keys, values = (torch.stack([token, torch.full_like(token, torch.nan)]) for token in (key, value))
    real_triton.cache_write.triton_reshape_and_cache_flash(
        keys, values, key_cache, value_cache, slots, "auto", one, one
    )


def attend_with_triton(world: World, layer: int, query: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Decode attention as `TritonAttentionImpl.forward`; query [N, Q, D]."""
    key_cache, value_cache = world.caches[layer].transpose(1, 2).split(HEAD_SIZE, dim=-1)
    width = max(len(table) for table in world.tables.values()) + 4  # wide enough for the lengths before the eviction
    table = torch.tensor([blocks + [0] * (width - len(blocks)) for blocks in world.tables.values()], dtype=torch.int32)
    out, ones = torch.empty_like(query), torch.ones(len(lengths), NUM_HEADS)
    real_triton.attention.unified_attention(
        q=query, k=key_cache, v=value_cache, out=out, block_table=table, window_size=(-1, -1), causal=True, softcap=0,
        cu_seqlens_q=torch.arange(len(lengths) + 1, dtype=torch.int32), max_seqlen_q=1, softmax_scale=SCALE,
        seqused_k=torch.tensor(lengths, dtype=torch.int32), max_seqlen_k=max(lengths),
        q_descale=None, k_descale=ones, v_descale=ones,
    )  # fmt: skip
    return out


def attend_in_plain_torch(world: World, request: str, layer: int, query: torch.Tensor) -> torch.Tensor:
    """Softmax over exactly the tokens that the lists say are resident; query [Q, D]."""
    _, keys, values = world.tokens(request)
    grouped = query.view(NUM_HEADS, GROUP, HEAD_SIZE)
    weights = (grouped @ keys[layer].transpose(-1, -2) * SCALE).softmax(dim=-1)
    return (weights @ values[layer]).view_as(query)


def errors_after_eviction(layout: KVCacheLayout) -> list[float]:
    """Largest error of all layers and requests: with resident lengths, and with the lengths before the eviction."""
    policy = build_policy("keydiff", budget=2 * BLOCK, block_size=BLOCK)
    world = World(policy, allocate(layout, 16, spec_of(torch.float32)), write=write_with_triton)
    for request, length in REQUESTS.items():
        world.append(request, length)
    world.check()
    world.evict(["a"], Phase.PREFILL_END)
    for request in REQUESTS:
        world.append(request, 1)
    world.check()
    queries = torch.randn(NUM_LAYERS, len(REQUESTS), NUM_HEADS * GROUP, HEAD_SIZE)
    found = []
    for lengths in ([world.resident(name) for name in REQUESTS], [length + 1 for length in REQUESTS.values()]):
        outputs = [attend_with_triton(world, layer, queries[layer], lengths) for layer in range(NUM_LAYERS)]
        errors = [
            outputs[layer][row] - attend_in_plain_torch(world, request, layer, queries[layer, row])
            for layer in range(NUM_LAYERS)
            for row, request in enumerate(REQUESTS)
        ]
        found.append(torch.stack(errors).abs().max().item())
    return found


if __name__ == "__main__":
    print(json.dumps({layout.name: errors_after_eviction(layout) for layout in KVCacheLayout}))
