"""What a policy's `score` sees, built from the reference cache."""

import torch

from harness.engines.hf.cache import LayerCache, ReferenceCache
from harness.engines.hf.rotary import Rotary
from policies.base import Phase, Policy, Signal, View


def build_view(policy: Policy, cache: ReferenceCache, layer_index: int, phase: Phase, rotary: Rotary | None) -> View:
    """One layer of the one request, with the signals that the policy asks for and no other.

    Args:
        policy: names its signals.
        cache: the request's cache.
        layer_index: which layer.
        phase: when the decision is made.
        rotary: only needed for `Signal.QUERY_MOMENTS`.

    Returns:
        A view with N = 1.
    """
    layer = cache.layers[layer_index]
    heads = layer.heads
    rows = heads if policy.per_head else heads[:1]
    device = heads[0].keys.device
    signals = {
        Signal.KEYS: lambda: {"keys": torch.stack([head.keys for head in heads])[None]},
        Signal.VALUES: lambda: {"values": torch.stack([head.values for head in heads])[None]},
        Signal.ATTENTION_MASS: lambda: {"attention_mass": torch.stack([head.attention_mass for head in heads])[None]},
        Signal.WINDOW_QUERIES: lambda: {"window_queries": _window_queries(layer, policy.query_window)},
        Signal.QUERY_MOMENTS: lambda: _query_moments(layer, policy.protect_first, cache.num_prompt_tokens, rotary),
    }
    fields = {}
    for signal in policy.signals:
        fields |= signals[signal]()
    return View(
        layer=layer_index,
        num_layers=len(cache.layers),
        phase=phase,
        positions=torch.tensor([[head.positions for head in rows]], device=device),
        num_seen=torch.tensor([cache.num_seen], device=device),
        block_size=policy.block_size,
        **fields,
    )


def _window_queries(layer: LayerCache, window: int) -> torch.Tensor:
    """The last `window` queries, [1, Q, W, D], oldest first."""
    queries = torch.cat(layer.queries, dim=1)
    return queries[None, :, max(queries.shape[1] - window, 0) :]


def _query_moments(layer: LayerCache, first: int, num_prompt_tokens: int, rotary: Rotary) -> dict[str, torch.Tensor]:
    """Mean [1, Q, D] and covariance [1, Q, D, D] of the pre-RoPE queries seen so far, and inv_freq.

    Positions from `first` to the end of the prompt count. Both moments are zero while there is no such query.
    """
    queries = torch.cat(layer.queries, dim=1)[:, first:num_prompt_tokens].float()
    num_queries = queries.shape[1]
    positions = torch.arange(first, first + num_queries, device=queries.device)
    queries = rotary.undo(queries, positions)
    mean = queries.sum(dim=1) / max(num_queries, 1)
    centered = queries - mean[:, None]
    covariance = centered.mT @ centered / max(num_queries, 1)
    return {"query_mean": mean[None], "query_cov": covariance[None], "inv_freq": rotary.inv_freq}
