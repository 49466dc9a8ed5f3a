"""What a policy's `score` sees, built from the reference cache."""

import torch

from harness.engines.hf.cache import HeadCache, LayerCache, ReferenceCache
from harness.engines.hf.rotary import Rotary
from policies.base import Phase, Policy, Signal, View
from policies.views import key_directions


def build_view(
    policy: Policy,
    cache: ReferenceCache,
    layer_index: int,
    phase: Phase,
    rotary: Rotary | None,
    head_index: int | None = None,
) -> View:
    """One layer of the one request, with the signals that the policy asks for and no other.

    Args:
        policy: names its signals.
        cache: the request's cache.
        layer_index: which layer.
        phase: when the decision is made.
        rotary: only needed for `Signal.QUERY_MOMENTS`.
        head_index: show this KV head and its group alone, as H = 1; None: all, which then hold equally many tokens.

    Returns:
        A view with N = 1.
    """
    layer = cache.layers[layer_index]
    heads = layer.heads if head_index is None else layer.heads[head_index : head_index + 1]
    rows = heads if policy.per_head else heads[:1]
    signals = {
        Signal.KEYS: lambda: {"keys": torch.stack([head.keys for head in heads])[None]},
        Signal.KEY_DIRECTIONS: lambda: key_directions(torch.stack([head.keys for head in heads])[None]),
        Signal.VALUES: lambda: {"values": torch.stack([head.values for head in heads])[None]},
        Signal.ATTENTION_MASS: lambda: {"attention_mass": torch.stack([head.attention_mass for head in heads])[None]},
        Signal.SQUARED_ATTENTION: lambda: {
            "squared_attention": torch.stack([head.squared_attention for head in heads])[None]
        },
        Signal.NEWEST_ATTENTION: lambda: _newest_attention(_queries(layer, head_index)[:, -1], heads),
        Signal.WINDOW_QUERIES: lambda: _window_queries(_queries(layer, head_index), policy.query_window),
        Signal.QUERY_MOMENTS: lambda: _query_moments(
            _queries(layer, head_index), policy.protect_first, cache.num_prompt_tokens, rotary
        ),
    }
    fields = {name: value for signal in policy.signals for name, value in signals[signal]().items()}
    device = heads[0].keys.device
    return View(
        layer=layer_index,
        num_layers=len(cache.layers),
        phase=phase,
        positions=torch.tensor([[head.positions for head in rows]], device=device),
        num_seen=torch.tensor([cache.num_seen], device=device),
        block_size=policy.block_size,
        **fields,
    )


def _queries(layer: LayerCache, head_index: int | None) -> torch.Tensor:
    """All queries seen, or those of one KV head's group, [Q, n, D]."""
    queries = torch.cat(layer.queries, dim=1)
    return queries if head_index is None else queries.unflatten(0, (len(layer.heads), -1))[head_index]


def _newest_attention(query: torch.Tensor, heads: list[HeadCache]) -> dict[str, torch.Tensor]:
    """Attention of the newest query [Q, D] over all that is resident, [1, H, Q / H, T]."""
    keys = torch.stack([head.keys for head in heads]).float()
    logits = query.float().unflatten(0, (len(heads), -1)) @ keys.mT / query.shape[-1] ** 0.5
    return {"newest_attention": logits.softmax(dim=-1)[None]}


def _window_queries(queries: torch.Tensor, window: int) -> dict[str, torch.Tensor]:
    """The last `window` queries, [1, Q, W, D], oldest first."""
    return {"window_queries": queries[None, :, max(queries.shape[1] - window, 0) :]}


def _query_moments(
    queries: torch.Tensor, first: int, num_prompt_tokens: int, rotary: Rotary
) -> dict[str, torch.Tensor]:
    """Mean [1, Q, D] and covariance [1, Q, D, D] of the pre-RoPE queries seen so far, and inv_freq.

    Positions from `first` to the end of the prompt count. Both moments are zero while there is no such query.
    """
    queries = queries[:, first:num_prompt_tokens].float()
    num_queries = queries.shape[1]
    positions = torch.arange(first, first + num_queries, device=queries.device)
    queries = rotary.undo(queries, positions)
    mean = queries.sum(dim=1) / max(num_queries, 1)
    centered = queries - mean[:, None]
    covariance = centered.mT @ centered / max(num_queries, 1)
    return {"query_mean": mean[None], "query_cov": covariance[None], "inv_freq": rotary.inv_freq}
