"""Block arithmetic of the cache manager in resident instead of logical tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from policies import Policy


@dataclass(frozen=True, kw_only=True)
class EvictingAttentionSpec(FullAttentionSpec):
    """Full attention whose resident tokens may be fewer than the logical ones.

    Attributes:
        max_resident_tokens: bound on the tokens of one request that are resident at once, None for no bound. It lets
            prompts longer than the pool start where the policy evicts during prefill.
        num_watched: newest tokens of a prompt whose queries the policy must see: they are computed anew even if a block
            with them is found in the prefix cache.
        rewrites: the policy changes keys or values in place before tokens move, also in blocks that are cut.
    """

    max_resident_tokens: int | None = None
    num_watched: int = 0
    rewrites: bool = False

    @classmethod
    def from_full(cls, spec: FullAttentionSpec, max_resident_tokens: int | None, policy: Policy) -> Self:
        """The same layer as `spec`, evictable."""
        return cls(
            **_values(spec),
            max_resident_tokens=max_resident_tokens,
            num_watched=policy.query_window,
            rewrites=policy.cache_positions or bool(policy.rewrite_phases),
        )

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """One spec for a group of layers."""
        return replace(specs[0], **_values(FullAttentionSpec.merge(specs)))

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of one layer for the longest request."""
        longest = vllm_config.model_config.max_model_len
        if self.max_resident_tokens is not None:
            longest = min(longest, self.max_resident_tokens)
        return cdiv(longest, self.block_size) * self.page_size_bytes


def _values(spec: FullAttentionSpec) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in fields(spec) if field.init}


class EvictingAttentionManager(FullAttentionManager):
    """Counts blocks by resident tokens and gives back the tail that an eviction cuts.

    The scheduler writes `num_evicted` (through `evict`) and `peak_blocks` (through `expect`).

    With prefix caching, blocks that have a hash or several owners are never rewritten: a request gives them back, still
    good for others, and takes new ones for what it keeps.
    """

    def __init__(self, kv_cache_spec: KVCacheSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self._rewrites = kv_cache_spec.rewrites
        self.num_evicted: dict[str, int] = {}
        self.peak_blocks: dict[str, int] = {}
        self._cut: list[KVCacheBlock] = []

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """As stock, which leaves out a prompt's last token; here as many as the policy watches."""
        longest = max(0, min(max_length, max_length + 1 - kv_cache_spec.num_watched))
        return super().find_longest_cache_hit(
            block_hashes,
            longest,
            kv_cache_group_ids,
            block_pool,
            kv_cache_spec,
            drop_eagle_block,
            alignment_tokens,
            dcp_world_size,
            pcp_world_size,
        )

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Blocks for `num_tokens` logical tokens; at admission also what others were promised and may still take."""
        if apply_admission_cap and request_id in self.peak_blocks:
            return self.peak_blocks[request_id] + self._promised_blocks()
        num_resident = num_tokens - self.num_evicted.get(request_id, 0)
        if not self.enable_caching and (
            blocks := self.req_to_blocks.get(request_id)
        ):  # stock asks about prefixes first
            return max(-(-num_resident // self.block_size) - len(blocks), 0)
        return super().get_num_blocks_to_allocate(
            request_id,
            num_resident,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model,
            apply_admission_cap,
            prefill_end,
        )

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        """As stock, for `num_tokens` logical tokens."""
        num_resident = num_tokens - self.num_evicted.get(request_id, 0)
        if not self.enable_caching and num_resident <= len(self.req_to_blocks[request_id]) * self.block_size:
            return []
        return super().allocate_new_blocks(request_id, num_resident, num_tokens_main_model)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """As stock; a request that comes back starts from nothing."""
        self.num_evicted.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """As stock; blocks of a request that was evicted from hold no prefix."""
        if request.request_id not in self.num_evicted:
            super().cache_blocks(request, num_tokens, retention_interval, replay_boundaries=replay_boundaries)

    def evict(self, request_id: str, num_before: int, num_keep: int, num_left: int) -> dict[int, int] | None:
        """Cut the request's blocks to `num_left`, those of `num_keep` resident tokens or one more.

        `free_cut` hands the rest to others.

        Returns:
            Block ids that took the place of others, by index: they are to be copied first. None if the pool has too few
            for that; then nothing was done.

        Raises:
            RuntimeError: the request does not hold exactly the blocks of `num_before` tokens.
        """
        blocks = self.req_to_blocks[request_id]
        if len(blocks) != -(-num_before // self.block_size):
            raise RuntimeError(
                f"request {request_id} holds {len(blocks)} blocks of {self.block_size}, not those of its "
                f"{num_before} resident tokens"
            )
        copies = {}
        if self.enable_caching:
            copies = self._make_writable(blocks if self._rewrites else blocks[:num_left])
            if copies is None:
                return None
            self._cut += [blocks[index] for index in copies]
            for index, block in copies.items():
                blocks[index] = block
        if len(blocks) > num_left:
            self._cut += reversed(blocks[num_left:])
            del blocks[num_left:]
        self.num_evicted[request_id] = self.num_evicted.get(request_id, 0) + num_before - num_keep
        return {index: block.block_id for index, block in copies.items()}

    def _make_writable(self, blocks: Sequence[KVCacheBlock]) -> dict[int, KVCacheBlock] | None:
        """New blocks, by index, for those that may not be rewritten; None if the pool has too few.

        Where it has too few for all, a block that nobody else holds loses its hash instead.
        """
        pool = self.block_pool
        shared = [index for index, block in enumerate(blocks) if block.ref_cnt > 1]
        hashed = [
            index for index, block in enumerate(blocks) if block.ref_cnt == 1 and not pool.is_block_writable(block)
        ]
        if len(shared) > pool.get_num_free_blocks():
            return None
        if len(shared) + len(hashed) > pool.get_num_free_blocks():
            for index in hashed:
                pool._maybe_evict_cached_block(blocks[index])
            hashed = []
        replaced = sorted(shared + hashed)
        return dict(zip(replaced, pool.get_new_blocks(len(replaced)), strict=True))

    def free_cut(self) -> None:
        """Give what this step's evictions cut back to the pool: none of it may become the copy of another block."""
        if self._cut:
            self.block_pool.free_blocks(self._cut)
            self._cut = []

    def evict_measured(self, request_id: str, num_before: int, num_keep: int) -> None:
        """As `evict`, one step later: blocks that the request has been given since stay at the end of its list."""
        blocks = self.req_to_blocks[request_id]
        num_left, num_held = cdiv(num_keep, self.block_size), cdiv(num_before, self.block_size)
        freed = blocks[num_left:num_held]
        del blocks[num_left:num_held]
        self.block_pool.free_blocks(reversed(freed))
        self.num_evicted[request_id] = self.num_evicted.get(request_id, 0) + num_before - num_keep

    def expect(self, request_id: str, peak_tokens: int) -> None:
        """Promise a request room for `peak_tokens` resident tokens from now on.

        With prefix caching one block more, as an eviction may wait a step for copies of blocks that others hold too.
        """
        self.peak_blocks[request_id] = cdiv(peak_tokens, self.block_size) + self.enable_caching

    def forget(self, request_id: str) -> None:
        """End the promise: the request is finished."""
        self.peak_blocks.pop(request_id, None)

    def _promised_blocks(self) -> int:
        """Blocks that admitted requests may still take. One that several hold counts for each: each may need a copy."""
        if not self.peak_blocks:
            return 0
        promised = sum(
            max(self.peak_blocks.get(request_id, 0), len(blocks))
            for request_id, blocks in self.req_to_blocks.items()
            if blocks
        )
        pool = self.block_pool
        return promised - (pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def register() -> None:
    """Make vLLM know the spec. The built-in specs register lazily and only into an empty registry, so they go first."""
    KVCacheSpecRegistry.check_kv_cache_spec_registry({})
    KVCacheSpecRegistry.register(
        EvictingAttentionSpec, manager_class=EvictingAttentionManager, uniform_type_base_spec=FullAttentionSpec
    )


register()
