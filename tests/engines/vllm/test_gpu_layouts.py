"""The layout adapters on caches of the shape and strides that vLLM's attention backends declare, without their device.

FlashAttention and Triton import on CPU and are asked; FlashInfer does not without its package, so what it declares in
vLLM 0.32.0 is written down here. Blocks are written as the backends write them (they split the transposed cache).
"""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import customize_attention_spec

from harness.engines.vllm.layout import CpuLayout
from harness.engines.vllm.paged import PagedValues, SlotAddress, split_slots, take
from policies import Phase, build_policy
from tests.gpu.caches import BLOCK, CPU, NUM_HEADS, NUM_LAYERS, World, allocate, spec_of, write_as_cpu_backend

FLASHINFER_ON_BLACKWELL = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)  # elsewhere it takes any, like the others
BACKENDS = [FlashAttentionBackend, TritonAttentionBackend]
LAYOUTS = list(
    dict.fromkeys([*(layout for backend in BACKENDS for layout in get_supported_kv_cache_layouts([backend])),
                   *FLASHINFER_ON_BLACKWELL])
)  # fmt: skip
NUM_BLOCKS = 40
POLICIES = {
    "random": build_policy("random", budget=2 * BLOCK, block_size=BLOCK),
    "random-block": build_policy("random", budget=2 * BLOCK, block_size=BLOCK, options={"granularity": "block"}),
    "paged_eviction": build_policy("paged_eviction", budget=3 * BLOCK, block_size=BLOCK),
    "paged_eviction-global": build_policy(
        "paged_eviction_literal", budget=2 * BLOCK, block_size=BLOCK, options={"decode_scope": "global"}
    ),
    "keydiff": build_policy("keydiff", budget=2 * BLOCK, block_size=BLOCK),
}


@pytest.fixture(params=LAYOUTS, ids=lambda layout: layout.name)
def layout(request):
    return request.param


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.get_name())
def test_backends_take_the_plugins_layers_as_they_are(backend):
    """The runner refuses specs of another type, and blocks that the backend would split."""
    plain = FullAttentionSpec(block_size=BLOCK, num_kv_heads=NUM_HEADS, head_size=64, dtype=torch.bfloat16)
    assert type(customize_attention_spec(backend, plain)) is FullAttentionSpec
    assert backend.supports_block_size(16)
    assert backend.supports_block_size(32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_a_backend_writes_is_read(layout, dtype):
    world = World(POLICIES["random"], allocate(layout, NUM_BLOCKS, spec_of(dtype)))
    for request, count in (("a", 1), ("b", BLOCK), ("c", 5 * BLOCK + 3)):
        world.append(request, count)
    world.check()


@pytest.mark.parametrize("name", POLICIES)
def test_an_eviction_keeps_what_it_should_and_touches_nothing_else(layout, name):
    """Requests of equal and of other lengths, some of them bystanders, all layers in one buffer."""
    world = World(POLICIES[name], allocate(layout, NUM_BLOCKS, spec_of(torch.bfloat16)))
    lengths = {"a": 6 * BLOCK, "b": 6 * BLOCK, "c": 5 * BLOCK + 7, "bystander": 4 * BLOCK + 5}
    for request, count in lengths.items():
        world.append(request, count)
    world.evict(["a", "b", "c"], Phase.PREFILL_END)
    world.check()
    assert world.resident("a") <= POLICIES[name].budget < world.resident("bystander")
    for _ in range(2 * BLOCK):
        for request in ("a", "b", "c"):
            world.append(request, 1)
        world.evict(["a", "b", "c"], Phase.DECODE)
    world.check()
    assert world.resident("a") <= POLICIES[name].budget + BLOCK


def test_keys_are_rewritten_beside_their_values(layout):
    """What follows the last token in its block is the next token's place, or another layer's memory in the buffer."""
    world = World(POLICIES["random"], allocate(layout, NUM_BLOCKS, spec_of(torch.float32)))
    world.append("a", 2 * BLOCK + 5)
    world.append("b", BLOCK + 1)
    pages = world.layout.grid.numbers(torch.tensor([world.tables["a"]]), slice(1, 2))
    keys, values = (read(pages, 2 * BLOCK + 5) for read in (world.layout.read_keys, world.layout.read_values))
    world.layout.write_keys(pages, -keys)
    assert torch.equal(world.layout.read_keys(pages, 2 * BLOCK + 5), -keys)
    assert torch.equal(world.layout.read_values(pages, 2 * BLOCK + 5), values)
    world.layout.write_keys(pages, keys)
    world.check()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("attend"), st.sampled_from("abc"), st.integers(1, 3 * BLOCK)),
        st.tuples(st.just("decode"), st.sampled_from(["a", "ab", "abc", "bc"]), st.integers(1, BLOCK + 2)),
        st.tuples(st.just("finish"), st.sampled_from("abc"), st.just(0)),
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@example([("attend", "a", 33), ("finish", "a", 0), ("attend", "a", 33)], "paged_eviction-global", "cpu")
@given(steps=steps, name=st.sampled_from(sorted(POLICIES)), place=st.sampled_from(["cpu", *LAYOUTS]))
def test_any_sequence_of_evictions_leaves_what_plain_lists_say(steps, name, place):
    if place == "cpu":
        caches = allocate(KVCacheLayout.LBHNC, NUM_BLOCKS, spec_of(torch.float32))
        world = World(POLICIES[name], caches, CpuLayout, write_as_cpu_backend)
    else:
        world = World(POLICIES[name], allocate(place, NUM_BLOCKS, spec_of(torch.float32)))
    for action, requests, count in steps:
        if action == "attend":
            world.append(requests, count)
            world.evict([requests], Phase.PREFILL_END)
        elif action == "decode":
            for _ in range(count):
                alive = [request for request in requests if request in world.held]
                for request in alive:
                    world.append(request, 1)
                world.evict(alive, Phase.DECODE)
        elif requests in world.held:
            world.release(requests)
    world.check()


moves = st.lists(st.tuples(st.sampled_from(["write", "add", "move"]), st.integers(0, 2**31)), max_size=10)


@settings(max_examples=100, deadline=None)
@given(moves=moves, num_heads=st.sampled_from([1, NUM_HEADS]), num_tokens=st.integers(1, 3 * BLOCK))
def test_paged_values_follow_a_dictionary(moves, num_heads, num_tokens):
    """Two requests; a value may be set for all layers and heads, added to by layer, and moved within its request."""
    paged = PagedValues(NUM_LAYERS, 8, num_heads, BLOCK, torch.float32, CPU)
    table = torch.tensor([[5, 0, 7], [2, 6, 1]])
    plain: dict[tuple[int, int, int, int], float] = {}
    for action, seed in moves:
        random = torch.Generator().manual_seed(seed)
        if action == "write":
            slots = torch.randperm(num_tokens, generator=random)[: 1 + num_tokens // 3]
            row, value = seed % 2, float(seed % 97)
            paged.write(table[row, slots // BLOCK] * BLOCK + slots % BLOCK, torch.full((len(slots),), value))
            for slot in slots.tolist():
                plain.update({(n, row, h, slot): value for n in range(NUM_LAYERS) for h in range(num_heads)})
        elif action == "add":
            layer, more = seed % NUM_LAYERS, torch.randint(9, (2, num_heads, num_tokens), generator=random).float()
            paged.add(paged.grid.numbers(table, slice(layer, layer + 1))[0], more)
            for row, head, slot in torch.cartesian_prod(*map(torch.arange, more.shape)).tolist():
                place = (layer, row, head, slot)
                plain[place] = plain.get(place, 0.0) + more[row, head, slot].item()
        else:
            shape = (NUM_LAYERS, 2, num_heads)
            source, target = (torch.rand(*shape, num_tokens, generator=random).argsort(dim=-1) for _ in range(2))
            columns = [split_slots(slots, BLOCK) for slots in (source, target)]
            paged.move(*(SlotAddress(take(paged.grid.numbers(table), column), offset) for column, offset in columns))
            old = dict(plain)
            for n, row, head, index in torch.cartesian_prod(*map(torch.arange, source.shape)).tolist():
                place = (n, row, head, index)
                plain[n, row, head, target[place].item()] = old.get((n, row, head, source[place].item()), 0.0)
    found = paged.read(paged.grid.numbers(table), num_tokens)
    for place in torch.cartesian_prod(*map(torch.arange, found.shape)).tolist():
        assert found[tuple(place)].item() == plain.get(tuple(place), 0.0)
