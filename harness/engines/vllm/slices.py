"""How much of an eviction is done at once: as many layers and requests as a fixed amount of memory allows.

On CPU that is what its caches hold. On a GPU it is what may lie beside the KV cache for a moment, and more at once
means fewer kernels.
"""

from collections.abc import Iterator

import torch

from policies import Policy, Signal

TRANSIENT_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}
CHOICE_BYTES = 96  # positions, scores, ranks and their order, for each token
FLOAT_BYTES = 4


def bytes_a_head(
    policy: Policy, head_size: int, queries_a_head: int, *, num_tokens: int, num_scored: int, num_moved: int
) -> int:
    """What scoring, choosing and moving holds for a moment, for one layer and KV head of a request.

    Args:
        policy: names its signals.
        head_size: D.
        queries_a_head: queries that every key of a KV head is multiplied with.
        num_tokens: tokens to choose among.
        num_scored: of those, the ones that need a score.
        num_moved: tokens that change their slot.
    """
    states = 3 * (Signal.KEYS in policy.signals) + 2 * (Signal.VALUES in policy.signals)
    floats = num_scored * (states * head_size + 3 * queries_a_head) + num_moved * 2 * head_size
    if policy.cache_positions:
        floats += num_tokens * 3 * head_size
    return num_tokens * CHOICE_BYTES + FLOAT_BYTES * floats


def rows_at_once(bytes_a_row: int, device: torch.device) -> int:
    """How many rows, one layer of one request each, fit; at least one."""
    return max(1, transient_bytes(device) // max(1, bytes_a_row))


def transient_bytes(device: torch.device) -> int:
    """What an eviction may hold beside the cache for a moment."""
    return TRANSIENT_BYTES.get(device.type, TRANSIENT_BYTES["cuda"])


def cut(count: int, size: int) -> Iterator[slice]:
    """0 to `count` in slices of `size`; the last may be shorter."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))
