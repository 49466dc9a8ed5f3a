"""FlashAttention's three kernels in plain torch, as strict about their arguments as the CUDA ones."""

from typing import Any

import torch
from vllm.utils.math_utils import round_up


def flash_attn_varlen_func(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    block_table: torch.Tensor,
    scheduler_metadata: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    """Attention over a paged cache; q, out [tokens, Q, D], k, v [blocks, B, H, D], block_table int32 [N, W].

    Raises:
        AssertionError: an argument that the CUDA kernels refuse, or that makes them read beside the cache.
    """
    _check(q, k, v, out, cu_seqlens_q, seqused_k, block_table)
    assert causal is True
    assert options["alibi_slopes"] is None
    assert not options["softcap"]
    num_rows = len(seqused_k)
    if scheduler_metadata is not None:
        assert len(scheduler_metadata) == 1 + round_up(num_rows, 4) * 4
    starts, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    assert max(lengths) <= max_seqlen_k
    for row in range(num_rows):
        start, stop, length = starts[row], starts[row + 1], lengths[row]
        assert 0 <= stop - start <= max_seqlen_q
        if start == stop:
            continue
        assert length >= stop - start
        blocks = block_table[row, : -(-length // k.shape[1])].long()
        assert ((blocks >= 0) & (blocks < len(k))).all(), "a block that does not exist"
        keys, values = (cache[blocks].flatten(0, 1)[:length] for cache in (k, v))
        out[start:stop] = _attend(q[start:stop], keys, values, softmax_scale)
    return out


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *indices: torch.Tensor) -> None:
    starts, lengths, table = indices
    num_heads, head_size = k.shape[2:]
    assert q.dtype == k.dtype == v.dtype
    assert q.shape[1] % num_heads == 0
    assert q.shape[-1] == v.shape[-1] == head_size
    assert q.shape[0] == out.shape[0] >= starts[-1]
    assert all(tensor.stride(-1) == 1 for tensor in (q, k, v, out, table))
    assert starts.is_contiguous()
    assert lengths.is_contiguous()
    assert all(tensor.dtype == torch.int32 for tensor in indices)
    assert starts.shape == (len(lengths) + 1,)
    assert len(table) == len(lengths)


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention [n, Q, D] of the newest n tokens, in float32."""
    group = query.shape[1] // keys.shape[1]
    query, keys, values = (tensor.transpose(0, 1).float() for tensor in (query, keys, values))
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    num_new, num_keys = query.shape[1], keys.shape[1]
    hidden = torch.ones(num_new, num_keys, dtype=torch.bool).triu(num_keys - num_new + 1)
    logits = (query @ keys.transpose(1, 2) * scale).masked_fill_(hidden, float("-inf"))
    return (logits.softmax(dim=-1) @ values).transpose(0, 1)


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *scales: Any,
) -> None:
    """Write new tokens [>= n, H, D] into their slots int64 [n] of caches [blocks, B, H, D]; slot -1 is padding."""
    assert slot_mapping.dtype == torch.int64
    assert slot_mapping.is_contiguous()
    num_blocks, block_size = key_cache.shape[:2]
    assert ((slot_mapping >= -1) & (slot_mapping < num_blocks * block_size)).all(), "a slot that does not exist"
    real = slot_mapping >= 0
    slots = slot_mapping[real]
    assert len(slots.unique()) == len(slots), "two tokens in one slot"
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache[slots // block_size, slots % block_size] = new[: len(slot_mapping)][real]


def get_scheduler_metadata(*, batch_size: int, cache_seqlens: torch.Tensor, **shape: Any) -> torch.Tensor:
    """The length that FlashAttention 3 needs; the contents steer work on the device alone."""
    assert len(cache_seqlens) == batch_size
    return torch.zeros(1 + round_up(batch_size, 4) * 4, dtype=torch.int32)
