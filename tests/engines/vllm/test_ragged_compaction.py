"""Evictions with unequal counts on paged caches, without an engine: every token keeps its own key and value."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM (make setup)")

from itertools import chain
from types import SimpleNamespace

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.utils import CpuGpuBuffer

from harness.engines.vllm.groups import Victim
from harness.engines.vllm.layout import CpuLayout, InterleavedLayout
from harness.engines.vllm.plan import Eviction
from harness.engines.vllm.ragged.compaction import RaggedCompactor
from harness.engines.vllm.ragged.refusals import refuse_ragged
from harness.engines.vllm.ragged.steps import HeadSteps
from harness.engines.vllm.ragged.table import PageTable
from policies import Phase
from policies.registry import build_policy
from tests.engines.vllm.ragged_policies import registered
from tests.gpu.caches import BLOCK, HEAD_SIZE, NUM_HEADS, NUM_LAYERS, allocate, spec_of

CPU = torch.device("cpu")
POOL, BUDGET = 40, 4 * BLOCK


def make_buffer(*size, dtype):
    return CpuGpuBuffer(*size, dtype=dtype, device=CPU, pin_memory=False)


class World:
    """A pool, its compactor, and the positions that each layer and head of every request should hold."""

    def __init__(self, name, layout_class, options=None):
        with registered():
            self.policy = build_policy(name, budget=BUDGET, block_size=BLOCK, options=options or {})
        self.layout = layout_class(allocate(KVCacheLayout.LBHNC, POOL, spec_of(torch.float32)))
        table = PageTable(self.layout.grid, 4, POOL)
        self.steps = HeadSteps(table, 256, BLOCK, make_buffer)
        self.compactor = RaggedCompactor(
            self.policy, self.layout, observers=None, inv_freq=None, average_over_ranks=lambda s: s, table=table
        )
        self.free = list(range(1, POOL))
        self.blocks, self.seen, self.resident, self.held = {}, {}, {}, {}

    def content(self, name, positions):
        """Key and value [2, L, H, n, D] of positions int64 [L, H, n], different for every token, layer and head."""
        owner = torch.arange(NUM_LAYERS * NUM_HEADS).view(NUM_LAYERS, NUM_HEADS, 1) * 1000 + ord(name) * 10000
        number = (owner + positions)[..., None] * torch.linspace(1, 2, HEAD_SIZE)
        return torch.stack([number.sin(), number.cos()])

    def append(self, counts):
        """One step with so many new tokens of each request."""
        names, places, positions, request_of = list(counts), [], [], []
        for index, (name, count) in enumerate(counts.items()):
            first = self.resident.setdefault(name, 0)
            seen = self.seen.setdefault(name, 0)
            held = self.blocks.setdefault(name, [])
            rows = self.held.setdefault(name, [[[] for _ in range(NUM_HEADS)] for _ in range(NUM_LAYERS)])
            while len(held) * BLOCK < first + count:
                held.append(self.free.pop(0))
            places += range(first, first + count)
            positions += range(seen, seen + count)
            request_of += [index] * count
            for row in (row for layer in rows for row in layer):
                row.extend(range(seen, seen + count))
            self.resident[name], self.seen[name] = first + count, seen + count
        starts = np.cumsum([0, *counts.values()]).astype(np.int32)
        lengths = torch.tensor([self.resident[name] for name in names], dtype=torch.int32)
        self.steps.begin(
            names, [self.blocks[name] for name in names], starts, lengths, torch.tensor(request_of),
            torch.tensor(places),
        )  # fmt: skip
        self.write(names, torch.tensor(positions), torch.tensor(request_of))
        self.compactor.positions.put(self.steps.slots, torch.tensor(positions))

    def write(self, names, positions, request_of):
        for index, name in enumerate(names):
            mine = request_of == index
            keys, values = self.content(name, positions[mine].expand(NUM_LAYERS, NUM_HEADS, -1))
            slots = self.steps.slots[:, mine].transpose(1, 2)
            if isinstance(self.layout, CpuLayout):
                self.layout._keys[slots // BLOCK, :, slots % BLOCK] = keys
                self.layout._values[slots // BLOCK, slots % BLOCK] = values
            else:
                self.layout.pages[slots // BLOCK, slots % BLOCK] = torch.cat([keys, values], dim=-1)

    def evict(self, names, phase):
        victims = []
        for name in names:
            before, seen = self.resident[name], self.seen[name]
            keep = self.policy.plan(phase, before, seen)
            if keep < before:
                victims.append(Victim(name, Eviction(phase, before, keep, seen), tuple(self.blocks[name])))
        self.compactor.evict(victims)
        for victim in victims:
            name, keep = victim.request_id, victim.eviction.num_keep
            found = self.compactor.resident_positions(name, victim.block_ids, keep)
            rows = list(chain.from_iterable(found))
            for old, new in zip(chain.from_iterable(self.held[name]), rows, strict=True):
                assert set(new) <= set(old)
                assert len(new) % BLOCK == keep % BLOCK
            assert sum(map(len, rows)) == keep * NUM_LAYERS * NUM_HEADS
            self.held[name], self.resident[name] = found, keep
            cut = self.blocks[name][-(-keep // BLOCK) :]
            del self.blocks[name][-(-keep // BLOCK) :]
            self.free += cut
            self.layout.pages[self.layout.grid.numbers(torch.tensor([cut])).flatten()] = float("nan")
        return len(victims)

    def release(self, name):
        self.free += self.blocks.pop(name)
        self.compactor.forget(name)
        for record in (self.seen, self.resident, self.held):
            del record[name]

    def check(self):
        for name, rows in self.held.items():
            row = self.steps.table.hold([name], [self.blocks[name]])
            pages = self.steps.table.read(row, self.steps.table.longest([name]))[:, 0]
            for layer in range(NUM_LAYERS):
                for head in range(NUM_HEADS):
                    expected = rows[layer][head]
                    found = self.compactor.positions.read(pages[layer, head], len(expected)).long()
                    assert sorted(found.tolist()) == sorted(expected)
                    keys, values = self.content(name, found.expand(NUM_LAYERS, NUM_HEADS, -1))[:, layer, head]
                    assert torch.equal(self.layout.read_keys(pages[layer, head], len(expected)), keys)
                    assert torch.equal(self.layout.read_values(pages[layer, head], len(expected)), values)


@pytest.mark.parametrize("layout_class", [CpuLayout, InterleavedLayout])
@pytest.mark.parametrize("name", ["ragged_random", "ragged_paged"])
def test_tokens_keep_their_keys_and_values_through_many_evictions(name, layout_class):
    world = World(name, layout_class)
    world.append({"a": 150, "b": 70})
    world.evict("ab", Phase.PREFILL_END)
    world.check()
    world.append({"b": 1, "c": 130})
    world.evict("c", Phase.PREFILL_END)
    num_evictions = 0
    for step in range(3 * BLOCK + 5):
        if step == 40:
            world.release("a")
            world.append({"d": 99})
            world.evict("d", Phase.PREFILL_END)
        batch = [other for other in ("c", "a", "b") if other in world.held]
        world.append(dict.fromkeys(batch, 1))
        num_evictions += world.evict(batch, Phase.DECODE)
        if step % 8 == 0:
            world.check()
    world.check()
    assert num_evictions >= 6
    counts = {len(row) for layer in world.held["c"] for row in layer}
    assert len(counts) > 1, "heads keep unequally many"


@pytest.mark.parametrize("layout_class", [CpuLayout, InterleavedLayout])
def test_a_prompt_in_chunks_is_evicted_from_after_each(layout_class):
    world = World("ragged_random", layout_class, {"prefill": "chunked", "prefill_chunk": 2 * BLOCK})
    for _ in range(6):
        world.append({"a": 2 * BLOCK})
        world.evict("a", Phase.PREFILL_CHUNK)
        world.check()
    assert world.resident["a"] == BUDGET


def test_memory_beside_the_cache_is_what_is_allocated():
    steps = World("ragged_random", CpuLayout).steps
    held = [steps.table.pages, steps.table.surplus, steps._lengths, steps._slots]
    assert NUM_LAYERS * HeadSteps.bytes_a_layer(4, NUM_HEADS, POOL, 256) == sum(tensor.nbytes for tensor in held)


def refuse(
    layout=KVCacheLayout.LBHNC, mode=CUDAGraphMode.PIECEWISE, sinks=None, backend=FlashAttentionBackend, **extra
):
    caches = allocate(layout, POOL, spec_of(torch.float32))
    layers = [SimpleNamespace(kv_cache=cache, impl=SimpleNamespace(sinks=sinks)) for cache in caches]
    with registered():
        policy = build_policy("ragged_random", budget=BUDGET, block_size=BLOCK, options={})
    groups = [SimpleNamespace(backend=backend)] * extra.get("num_groups", 1)
    refuse_ragged(policy, layers, groups, InterleavedLayout(caches), mode)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"layout": KVCacheLayout.LBNHC}, "policy=ragged_random .* VLLM_KV_CACHE_LAYOUT or set it to LBHNC"),
        ({"layout": KVCacheLayout.BLHNC}, "VLLM_KV_CACHE_LAYOUT"),
        (
            {"mode": CUDAGraphMode.FULL_AND_PIECEWISE},
            "cudagraph_mode=FULL_AND_PIECEWISE .* use cudagraph_mode=PIECEWISE",
        ),
        ({"sinks": torch.zeros(4)}, "a sink for each query head"),
        ({"num_groups": 2}, "several attention backends"),
    ],
    ids=str,
)
def test_what_pages_cannot_live_with_is_refused(setting, message):
    refuse()
    with pytest.raises(ValueError, match=message):
        refuse(**setting)


def test_queries_are_ordered_by_request_and_head():
    world = World("ragged_random", CpuLayout)
    world.append({"a": 3, "b": 1, "c": 2})
    order = world.steps.query_order
    token, head = order // NUM_HEADS, order % NUM_HEADS
    assert token.tolist() == [0, 1, 2, 0, 1, 2, 3, 3, 4, 5, 4, 5]
    assert head.tolist() == [0, 0, 0, 1, 1, 1, 0, 1, 0, 0, 1, 1]
    assert world.steps._starts.cpu[: 3 * NUM_HEADS + 1].tolist() == [0, 3, 6, 7, 8, 10, 12]
    world.append({"a": 1, "b": 1, "c": 1})
    assert world.steps.query_order is None
