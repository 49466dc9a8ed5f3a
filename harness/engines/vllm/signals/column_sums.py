"""Softmax attention, summed over queries: what each key received.

Letters: N requests, n new tokens, Q query heads, H KV heads, G = Q / H, T tokens, D head size.
"""

import torch

from policies.products import as_multiplied, products

LOGIT_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}  # held at once: what a CPU's cache holds, or few kernels on a GPU
LEAST_QUERIES = 16


def column_sums(queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax attention summed over the queries and over the query heads of each KV head.

    The queries are the newest tokens: query i of n sees all keys but the n - 1 - i last. Computed in chunks of queries,
    each with the keys that its last query sees.

    Args:
        queries: [N, n, Q, D].
        keys: [N, H, T, D], the new tokens last.
        scale: softmax scale.

    Returns:
        float32 [N, H, T].
    """
    queries, keys = as_multiplied(queries, keys)
    num_rows, num_new, num_query_heads, head_size = queries.shape
    num_heads, num_keys = keys.shape[1:3]
    group = num_query_heads // num_heads
    grouped = queries.view(num_rows, num_new, num_heads, group, head_size).permute(0, 2, 3, 1, 4)
    sums = torch.zeros(num_rows, num_heads, num_keys, device=keys.device)
    size = min(num_new, _queries_at_once(num_rows * num_query_heads * num_keys, keys.device))
    future = torch.ones(size, size, dtype=torch.bool, device=keys.device).triu_(1)
    for start in range(0, num_new, size):
        chunk = grouped[:, :, :, start : start + size]
        count = chunk.shape[3]
        num_seen = num_keys - num_new + start + count
        chunk = chunk.reshape(num_rows, num_heads, -1, head_size)
        logits = products(chunk, keys[:, :, :num_seen], scale)
        square = logits.unflatten(2, (group, count))[..., num_seen - count :]
        square.masked_fill_(future[:count, :count], float("-inf"))
        sums[..., :num_seen] += torch.softmax(logits, dim=-1, out=logits).sum(dim=-2)
    return sums


def _queries_at_once(logits_a_query: int, device: torch.device) -> int:
    limit = LOGIT_BYTES.get(device.type, LOGIT_BYTES["cuda"])
    return max(LEAST_QUERIES, limit // (torch.float32.itemsize * logits_a_query))
