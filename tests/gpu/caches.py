"""Paged KV caches as vLLM allocates them, and beside them what they should hold, in plain lists.

Letters: L layers, N requests, H KV heads, T resident tokens, B slots a block, D head size.
"""

from collections.abc import Callable, Iterable

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, compute_layout_strides
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from harness.engines.vllm.compaction import Compactor, Victim
from harness.engines.vllm.kv_cache import EvictingAttentionSpec
from harness.engines.vllm.layout import CacheLayout, InterleavedLayout
from harness.engines.vllm.plan import Eviction
from policies import Phase, Policy, View
from policies.selection import reduce_heads, select
from policies.views import key_directions

NUM_LAYERS, NUM_HEADS, BLOCK, HEAD_SIZE = 3, 2, 16, 32
CPU = torch.device("cpu")
Write = Callable[[torch.Tensor, int, torch.Tensor, torch.Tensor], None]


def spec_of(dtype: torch.dtype) -> EvictingAttentionSpec:
    """A layer of the plugin's kind."""
    return EvictingAttentionSpec(block_size=BLOCK, num_kv_heads=NUM_HEADS, head_size=HEAD_SIZE, dtype=dtype)


def allocate(layout: KVCacheLayout, num_blocks: int, spec: EvictingAttentionSpec) -> list[torch.Tensor]:
    """One [num_blocks, H, B, 2 D] view a layer over the one buffer that vLLM's own allocator makes for `layout`."""
    names = [f"layer.{index}" for index in range(NUM_LAYERS)]
    layer_stride, block_stride, *_ = compute_layout_strides(spec, num_blocks, NUM_LAYERS, layout)
    tensor = KVCacheTensor(
        size=spec.page_size_bytes * num_blocks * NUM_LAYERS,
        layers=names,
        layer_stride=layer_stride,
        block_stride=block_stride,
    )
    config = KVCacheConfig(num_blocks, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(names, spec)])
    caches = allocate_kv_cache(config, CPU, layout, [spec.block_size])
    return [caches[name] for name in names]


def write_as_cuda_backend(cache: torch.Tensor, slot: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """FlashAttention, Triton and FlashInfer split the last axis of the transposed cache; key, value [H, D]."""
    keys, values = cache.transpose(1, 2).split(HEAD_SIZE, dim=-1)
    keys[slot // BLOCK, slot % BLOCK], values[slot // BLOCK, slot % BLOCK] = key, value


def write_as_cpu_backend(cache: torch.Tensor, slot: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """vLLM's `vec` kernels: a block of a head is its keys [D, B], then its values [B, D]."""
    flat = cache.view(cache.shape[0], NUM_HEADS, 2 * BLOCK * HEAD_SIZE)[slot // BLOCK]
    flat[:, slot % BLOCK : BLOCK * HEAD_SIZE : BLOCK] = key
    start = BLOCK * HEAD_SIZE + slot % BLOCK * HEAD_SIZE
    flat[:, start : start + HEAD_SIZE] = value


class World:
    """A pool that several requests share, its compactor, and what every slot should hold.

    Attributes:
        held: request -> positions of its tokens, in slot order, by layer and head.
        tables: request -> its physical blocks.
    """

    def __init__(
        self,
        policy: Policy,
        caches: list[torch.Tensor],
        adapter: type[CacheLayout] = InterleavedLayout,
        write: Write = write_as_cuda_backend,
    ) -> None:
        """An empty pool.

        Args:
            policy: evicts.
            caches: one a layer.
            adapter: how the plugin sees a cache.
            write: how the attention backend writes the key and value [H, D] of a token into a slot of a cache.
        """
        self.policy, self.caches, self._write = policy, caches, write
        self.layout = adapter(caches)
        self.compactor = Compactor(
            policy, self.layout, observers=None, inv_freq=None, average_over_ranks=lambda scores: scores
        )
        self._random = torch.Generator().manual_seed(0)
        self._free = torch.randperm(len(caches[0]), generator=self._random).tolist()
        self.held: dict[str, list[list[list[int]]]] = {}
        self.tables: dict[str, list[int]] = {}
        self.seen: dict[str, int] = {}
        self._tokens: dict[str, torch.Tensor] = {}

    def resident(self, request: str) -> int:
        """Tokens of the request that are in the cache."""
        return len(self.held[request][0][0])

    def append(self, request: str, count: int) -> None:
        """Attend `count` more tokens of the request."""
        if request not in self.held:
            self.held[request] = [[[] for _ in range(NUM_HEADS)] for _ in range(NUM_LAYERS)]
            self.tables[request], self.seen[request] = [], 0
            self._tokens[request] = torch.empty(2, NUM_LAYERS, NUM_HEADS, 0, HEAD_SIZE, dtype=self.caches[0].dtype)
        new = torch.randn(2, NUM_LAYERS, NUM_HEADS, count, HEAD_SIZE, generator=self._random)
        self._tokens[request] = torch.cat([self._tokens[request], new.to(self.caches[0].dtype)], dim=3)
        for _ in range(count):
            place, position = self.resident(request), self.seen[request]
            if place == len(self.tables[request]) * BLOCK:
                self.tables[request].append(self._free.pop())
            self._write_token(request, self.tables[request][place // BLOCK] * BLOCK + place % BLOCK, position)
            self.seen[request] += 1

    def _write_token(self, request: str, slot: int, position: int) -> None:
        keys, values = self._tokens[request][..., position, :]
        for layer, cache in enumerate(self.caches):
            self._write(cache, slot, keys[layer], values[layer])
            for head in range(NUM_HEADS):
                self.held[request][layer][head].append(position)
        self.compactor.positions.write(torch.tensor([slot]), torch.tensor([position]))

    def release(self, request: str) -> None:
        """The request is finished; its blocks go to whoever asks next."""
        self._free += self.tables.pop(request)
        self.compactor.forget(request)
        for record in (self.held, self.seen, self._tokens):
            del record[request]

    def tokens(self, request: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Positions int64 [L, H, T], keys and values [L, H, T, D] that the lists say are resident."""
        positions = torch.tensor(self.held[request])
        keys, values = self._tokens[request].gather(3, positions[None, ..., None].expand(2, -1, -1, -1, HEAD_SIZE))
        return positions, keys, values

    def evict(self, requests: Iterable[str], phase: Phase) -> None:
        """Evict as the policy plans, then cut the lists to the same tokens, in whatever order the slots now have."""
        victims, expected = [], {}
        for request in requests:
            before = self.resident(request)
            keep = self.policy.plan(phase, before)
            if keep < before:
                expected[request] = self._kept(request, phase, keep)
                eviction = Eviction(phase, before, keep, self.seen[request])
                victims.append(Victim(request, eviction, list(self.tables[request])))
        self.compactor.evict(victims)
        for victim in victims:
            self._cut(victim, expected[victim.request_id])

    def _kept(self, request: str, phase: Phase, num_keep: int) -> torch.Tensor:
        """Mask [L, H or 1, T] of what stays by the policy's own score of the listed tokens."""
        positions, keys, values = self.tokens(request)
        rows = positions if self.policy.per_head else positions[:, :1]
        seen = torch.tensor([self.seen[request]])
        views = [
            View(layer, NUM_LAYERS, phase, rows[layer][None], seen, BLOCK, values=v[None], **key_directions(k[None]))
            for layer, (k, v) in enumerate(zip(keys, values, strict=True))
        ]
        scores = torch.stack([reduce_heads(self.policy, self.policy.score(view)) for view in views])
        return select(self.policy, phase, scores, rows[:, None], seen, num_keep)[:, 0]

    def _cut(self, victim: Victim, kept: torch.Tensor) -> None:
        request, num_keep = victim.request_id, victim.eviction.num_keep
        found = self.compactor.positions_of(torch.tensor([self.tables[request]]), num_keep)[:, 0]
        for layer in range(NUM_LAYERS):
            for head in range(NUM_HEADS):
                row = head if self.policy.per_head else 0
                old, new = self.held[request][layer][head], found[layer, row].tolist()
                assert sorted(new) == sorted(p for p, stays in zip(old, kept[layer, row], strict=True) if stays)
                self.held[request][layer][head] = new
        needed = -(-num_keep // BLOCK)
        self._free += self.tables[request][needed:]
        del self.tables[request][needed:]

    def check(self) -> None:
        """Every resident token of every request is where the lists say, with its own key and value."""
        for request in self.held:
            table = torch.tensor([self.tables[request]])
            positions, keys, values = self.tokens(request)
            rows = self.compactor.positions_of(table, self.resident(request))[:, 0].long()
            assert torch.equal(rows.expand_as(positions), positions)
            pages = self.layout.grid.numbers(table)[:, 0]
            assert torch.equal(self.layout.read_keys(pages, self.resident(request)), keys)
            assert torch.equal(self.layout.read_values(pages, self.resident(request)), values)
