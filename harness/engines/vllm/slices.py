"""How much of an eviction is done at once: as many layers and requests as a fixed amount of memory allows.

On CPU that is what its caches hold. On a GPU it is what may lie beside the KV cache for a moment, and more at once
means fewer kernels.
"""

from collections.abc import Iterator

import torch

from harness.engines.vllm.groups import Alike
from harness.engines.vllm.layout import CacheLayout
from policies import Phase, Policy, Signal

TRANSIENT_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}
CHOICE_BYTES = 96  # positions, scores, ranks and their order, for each token
FEW_BYTES = 40  # the same where one token leaves
FLOAT_BYTES = 4
MULTIPLIED_SIGNALS = frozenset({Signal.KEY_DIRECTIONS, Signal.NEWEST_ATTENTION})


def bytes_a_head(policy: Policy, layout: CacheLayout, queries_a_head: int, alike: Alike) -> int:
    """What scoring, choosing and moving holds for a moment, for one layer and KV head of a request.

    Args:
        policy: names its signals.
        layout: of the cache that is read.
        queries_a_head: queries that every key of a KV head is multiplied with.
        alike: how many tokens the request holds and loses.
    """
    head_size, num_tokens = layout.head_size, alike.num_before
    num_leaving = num_tokens - alike.num_keep
    num_moved = num_leaving if alike.phase is Phase.DECODE else alike.num_keep
    num_scored = num_tokens - alike.num_old_blocks * policy.block_size
    width = 2 * head_size * (Signal.VALUES in policy.signals) + 3 * queries_a_head
    floats = _keys_read(policy, layout, alike) * 3 * head_size + num_scored * width + num_moved * 2 * head_size
    if policy.cache_positions:
        floats += num_tokens * 3 * head_size
    return num_tokens * (FEW_BYTES if num_leaving == 1 else CHOICE_BYTES) + FLOAT_BYTES * floats


def _keys_read(policy: Policy, layout: CacheLayout, alike: Alike) -> int:
    """Tokens whose keys are copied out of the cache."""
    multiplied = bool(policy.signals & MULTIPLIED_SIGNALS) and not layout.multiplies_in_place
    if Signal.KEYS in policy.signals or multiplied:
        return alike.num_before - alike.num_old_blocks * policy.block_size
    if Signal.KEY_DIRECTIONS in policy.signals:
        return alike.num_before - alike.num_known // policy.block_size * policy.block_size
    return 0


def rows_at_once(bytes_a_row: int, device: torch.device) -> int:
    """How many rows, one layer of one request each, fit; at least one."""
    return max(1, transient_bytes(device) // max(1, bytes_a_row))


def transient_bytes(device: torch.device) -> int:
    """What an eviction may hold beside the cache for a moment."""
    return TRANSIENT_BYTES.get(device.type, TRANSIENT_BYTES["cuda"])


def cut(count: int, size: int) -> Iterator[slice]:
    """0 to `count` in slices of `size`; the last may be shorter."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))
