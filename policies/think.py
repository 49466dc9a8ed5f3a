"""ThinK (Xu et al., arXiv 2407.21018): key channels that matter little to the newest queries are set to zero."""

from dataclasses import make_dataclass, replace
from functools import cache

import torch

from policies.base import Policy
from policies.options import check_range
from policies.views import Phase, Signal, View

OPTIONS = ("think", "think_window")


@cache
def with_think(base: type[Policy]) -> type[Policy]:
    """`base` with ThinK on top, see `Think`.

    Raises:
        ValueError: the policy never evicts.
    """
    if not base.evicts:
        raise ValueError(f"policy.options.think is not for policy={base.name}, which never evicts. Use another one.")
    options = [("think", float, 0.4), ("think_window", int, 32)]
    return make_dataclass(f"Think{base.__name__}", options, bases=(Think, base), frozen=True, kw_only=True)


class Think:
    """What comes before a policy's own class: first tokens leave, then channels of those that stay.

    When the prompt is cut to the budget, each KV head scores its key channels by E_j = mean of q_j^2 over the last
    `think_window` queries of its group, times mean of k_j^2 over the tokens that stay. The lowest floor(think x D)
    become zero in all of these but the last `think_window`. Tokens of the answer stay whole, values are untouched.
    While decoding the policy scores keys as they are cached then.

    Source: paper, section 3, and the authors' code. A zero channel adds nothing to a logit, so that the stock kernel
    computes ThinK's logits exactly. **Nothing is freed**: a cache with shorter keys would save think / 2 of the bytes
    of these tokens, which is the nominal saving. kvpress's press cuts the last ones too.

    Deviation: a prompt that the budget holds stays whole, as nothing is evicted from it; the authors thin it too.

    Options:
        think: share of the key channels that become zero; 0.4 in the paper.
        think_window: last queries that judge, and whose tokens stay whole.
    """

    scores_stay = False
    same_in_all_layers = False

    def __post_init__(self) -> None:
        """Check the options, then the policy's own.

        Raises:
            ValueError: one is out of range, or the policy keeps unequally many tokens or prunes the prompt in chunks.
        """
        check_range("policy.options.think", self.think, 0, 1)
        limit = f"policy.budget={self.budget}"
        check_range("policy.options.think_window", self.think_window, 1, self.budget - 1, limit=limit)
        if self.prefill != "after":
            raise ValueError(f"policy.options.prefill={self.prefill} is not defined with think. Use after.")
        super().__post_init__()
        if self.cache_positions:
            raise ValueError(
                "policy.options.position_mode=cache turns keys anew, and channels that think made zero would fill "
                "again. Use original."
            )
        if self.by_page:
            raise ValueError(
                f"policy.options.think is not for policy={self.name} with unequal counts or chosen reads. Use another."
            )

    @property
    def signals(self) -> frozenset[Signal]:
        """The policy's own, and the last queries."""
        return super().signals | {Signal.WINDOW_QUERIES}

    @property
    def query_window(self) -> int:
        """The longer of the two windows."""
        return max(super().query_window, self.think_window)

    @property
    def rewrite_phases(self) -> frozenset[Phase]:
        """Once more: when the prompt was cut."""
        return super().rewrite_phases | {Phase.PREFILL_END}

    def score(self, view: View) -> torch.Tensor:
        """The policy's own, which sees the queries that it asked for."""
        own = super().query_window if Signal.WINDOW_QUERIES in super().signals else 0
        queries = view.window_queries[:, :, -own:] if own else None
        return super().score(replace(view, window_queries=queries))

    def rewrite(self, view: View, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the policy itself makes of keys and values, with zero channels."""
        keys, values = view.keys, view.values
        if view.phase in super().rewrite_phases:
            keys, values = super().rewrite(view, keep)
        cut = keep & (view.positions < view.num_seen[:, None, None] - self.think_window)
        dropped = _least_channels(view.window_queries[:, :, -self.think_window :], keys, keep, self.think)
        return keys.masked_fill(cut[..., None] & dropped[:, :, None], 0), values


def _least_channels(queries: torch.Tensor, keys: torch.Tensor, keep: torch.Tensor, share: float) -> torch.Tensor:
    """The channels that matter least, bool [N, H, D]; the earlier of two that matter equally little.

    Args:
        queries: [N, Q, W, D].
        keys: [N, H, T, D].
        keep: bool [N, H or 1, T], the tokens whose keys judge.
        share: of the channels.
    """
    num_heads, head_size = keys.shape[1], keys.shape[-1]
    asked = queries.float().square().mean(dim=2).unflatten(1, (num_heads, -1)).mean(dim=2)
    energy = (keys.float().square() * keep[..., None]).sum(dim=2) / keep.sum(dim=-1, keepdim=True)
    order = (asked * energy).argsort(dim=-1, stable=True)
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order[..., : int(share * head_size)], True)
