"""Products of queries with keys in float32, without float32 copies of the keys where a GPU can do without them.

Letters: M queries, T tokens, D head size.
"""

import torch

OF_16_BITS = (torch.bfloat16, torch.float16)


def as_multiplied(queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as `products` takes them: as they are where a GPU adds products of 16 bits in float32, else in float32."""
    if queries.dtype == keys.dtype and keys.dtype in OF_16_BITS and keys.device.type != "cpu":
        return queries, keys
    return queries.float(), keys.float()


def products(queries: torch.Tensor, keys: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """`scale` x queries [..., M, D] x keys [..., T, D]: float32 [..., M, T].

    A product of two numbers of 16 bits is exact in float32, so only the order in which D of them are added differs from
    float32 copies, which a GPU without TF32 multiplies ten times slower.
    """
    queries, keys = as_multiplied(queries, keys)
    if keys.dtype == torch.float32:
        return (queries if scale == 1 else queries * scale) @ keys.transpose(-1, -2)
    sums = torch.bmm(queries.flatten(0, -3), keys.flatten(0, -3).transpose(-1, -2), out_dtype=torch.float32)
    return sums.unflatten(0, keys.shape[:-2]).mul_(scale)
