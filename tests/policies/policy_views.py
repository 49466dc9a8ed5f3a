"""Views to score without an engine: random ones that any policy accepts, and bare ones for hand-made cases."""

from dataclasses import replace

import torch

from policies.base import Phase, Policy, Signal, Unit, View
from policies.views import key_directions

NUM_HEADS, GROUP, HEAD_SIZE = 2, 2, 8


def bare_view(phase=Phase.PREFILL_END, positions=None, num_seen=None, block_size=4, layer=0, **signals):
    """One request; signals are given with the dimension N = 1, positions as a list or as [H or 1, T]."""
    num_tokens = next(iter(signals.values())).shape[2] if positions is None else None
    rows = torch.arange(num_tokens) if positions is None else torch.as_tensor(positions)
    rows = rows.reshape(1, -1, rows.shape[-1])
    return View(
        layer=layer,
        num_layers=1,
        phase=phase,
        positions=rows,
        num_seen=torch.tensor([int(rows.max()) + 1 if num_seen is None else num_seen]),
        block_size=block_size,
        **signals,
    )


def num_tokens_to_evict_from(policy: Policy, phase: Phase, num_extra: int) -> int:
    """A resident length above the budget at which `policy` evicts in `phase`."""
    if phase is not Phase.DECODE:
        return policy.budget + num_extra
    return policy.budget + (policy.block_size if policy.decode_unit is Unit.BLOCK else 1)


def random_view(policy: Policy, phase: Phase, num_requests: int, num_extra: int, seed: int) -> View:
    """Random signals, exactly those that the policy asks for, on residents that it could have left behind."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = num_tokens_to_evict_from(policy, phase, num_extra)
    num_gone = 0 if phase is Phase.PREFILL_END and policy.prefill == "after" else 3 * policy.block_size
    num_rows = NUM_HEADS if policy.per_head else 1
    rows = [_positions(policy, phase, num_tokens, num_gone, generator) for _ in range(num_requests * num_rows)]
    return View(
        layer=1,
        num_layers=3,
        phase=phase,
        positions=torch.stack(rows).unflatten(0, (num_requests, num_rows)),
        num_seen=torch.full((num_requests,), num_tokens + num_gone),
        block_size=policy.block_size,
        **_signals(policy, num_requests, num_tokens, generator),
    )


def shuffled(view: View, seed: int) -> tuple[View, torch.Tensor]:
    """The same residents in other slots, and the old slot of each new one."""
    order = torch.randperm(view.positions.shape[-1], generator=torch.Generator().manual_seed(seed))
    per_slot = {
        name: getattr(view, name)
        for name in ("positions", "keys", "inverse_norms", "values", "attention_mass", "squared_attention")
    }
    moved = {name: x[:, :, order] for name, x in per_slot.items() if x is not None}
    if view.newest_attention is not None:
        moved["newest_attention"] = view.newest_attention[..., order]
    return replace(view, **moved), order


def _positions(policy, phase, num_tokens, num_gone, generator):
    """What stays of the first `num_tokens + num_gone` positions, in the slot order of an engine."""
    num_seen, block = num_tokens + num_gone, policy.block_size
    if policy.unit(phase) is not Unit.BLOCK:
        first, last = policy.protect_first, max(policy.protect_last, policy.query_window, 1)
        gone = first + torch.randperm(num_seen - first - last, generator=generator)[:num_gone]
        kept = torch.arange(num_seen)[~torch.isin(torch.arange(num_seen), gone)]
        return kept[torch.randperm(num_tokens, generator=generator)] if phase is Phase.DECODE else kept
    num_old = (num_seen - 1) // block
    first = -(-policy.protect_first // block)
    last = -(-policy.protect_last // block)
    gone = first + torch.randperm(num_old - first - last, generator=generator)[: num_gone // block]
    order = torch.randperm(num_old, generator=generator)
    order = order[~torch.isin(order, gone)]
    old = (order[:, None] * block + torch.arange(block)).flatten()
    return torch.cat([old, torch.arange(num_old * block, num_seen)])


def _signals(policy, num_requests, num_tokens, generator):
    def normal(*shape):
        return torch.randn(num_requests, *shape, generator=generator)

    num_query_heads = NUM_HEADS * GROUP
    root = normal(num_query_heads, HEAD_SIZE, HEAD_SIZE)
    known = {
        Signal.KEYS: {"keys": normal(NUM_HEADS, num_tokens, HEAD_SIZE).bfloat16()},
        Signal.VALUES: {"values": normal(NUM_HEADS, num_tokens, HEAD_SIZE).bfloat16()},
        Signal.ATTENTION_MASS: {"attention_mass": normal(NUM_HEADS, num_tokens).exp()},
        Signal.SQUARED_ATTENTION: {"squared_attention": normal(NUM_HEADS, num_tokens).exp()},
        Signal.WINDOW_QUERIES: {"window_queries": normal(num_query_heads, policy.query_window, HEAD_SIZE).bfloat16()},
        Signal.QUERY_MOMENTS: {
            "query_mean": normal(num_query_heads, HEAD_SIZE),
            "query_cov": root @ root.mT / HEAD_SIZE,
            "inv_freq": 100.0 ** -(torch.arange(HEAD_SIZE // 2) * 2 / HEAD_SIZE),
        },
        Signal.KEY_DIRECTIONS: key_directions(normal(NUM_HEADS, num_tokens, HEAD_SIZE).bfloat16()),
        Signal.NEWEST_ATTENTION: {"newest_attention": normal(NUM_HEADS, GROUP, num_tokens).softmax(dim=-1)},
    }
    return {name: value for signal in policy.signals for name, value in known[signal].items()}
