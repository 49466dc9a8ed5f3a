"""Rotary embedding as vLLM's model does it: its frequencies, and turning keys and queries by hand.

Letters: L layers, N requests, H heads, T tokens, D head size. Halves are paired as in NeoX and Llama.
"""

import torch


def rotary_of(model: torch.nn.Module) -> torch.nn.Module:
    """The rotary embedding that the model's layers share.

    Raises:
        ValueError: the model has none.
    """
    for part in model.modules():
        if hasattr(part, "cos_sin_cache"):
            return part
    raise ValueError(f"{type(model).__name__} has no rotary embedding, which this policy needs. Use another policy.")


def inverse_frequencies(rotary: torch.nn.Module) -> torch.Tensor:
    """float32 [D / 2], on the device of the embedding's own tables."""
    return rotary._compute_inv_freq(rotary.base).float().to(rotary.cos_sin_cache.device)


def turn(vectors: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [..., D] by angles given as cosine and sine [..., D / 2]."""
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def places_lost(positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """How far each kept token moves up among the resident ones: int64 [..., T], 0 for tokens that go.

    Args:
        positions: int64 [..., T], original positions in slot order.
        keep: bool [..., T].
    """
    order = positions.argsort(dim=-1)
    lost = (~keep).gather(-1, order).cumsum(dim=-1)
    return torch.zeros_like(positions).scatter_(-1, order, lost) * keep


def turn_back(keys: torch.Tensor, places: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Rotate keys [N, H, T, D] back by `places` [N, H or 1, T]; in the dtype of `inv_freq`, returned in the keys'."""
    angles = places[..., None].to(inv_freq.dtype) * inv_freq
    return turn(keys.to(inv_freq.dtype), angles.cos(), -angles.sin()).to(keys.dtype)
