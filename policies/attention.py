"""What the attention-based policies share: attention of the last queries, order by position, weighting by value norms.

Letters as in `policies.base`; G is the group, the query heads of one KV head.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from policies.base import Policy, Signal, Unit, View
from policies.options import check_range, keep_last
from policies.products import products


@dataclass(frozen=True, kw_only=True)
class AttentionPolicy(Policy):
    """Base of the policies that score by attention, with VATP (Guo et al., arXiv 2406.12335) as an option.

    Attributes:
        value_weighted: multiply the score of a token by ||v||_1 of its value, which then has to be read.

    Class attributes:
        attention_signals: what the score needs without the values.
    """

    attention_signals: ClassVar[frozenset[Signal]]

    value_weighted: bool = False

    @property
    def signals(self) -> frozenset[Signal]:
        """The policy's own, and the values where they weigh."""
        return self.attention_signals | ({Signal.VALUES} if self.value_weighted else frozenset())

    def weigh(self, scores: torch.Tensor, view: View) -> torch.Tensor:
        """Apply `value_weighted` to scores [N, H, T]."""
        return scores * view.values.float().abs().sum(dim=-1) if self.value_weighted else scores


@dataclass(frozen=True, kw_only=True)
class PromptWindow(AttentionPolicy):
    """Base of the policies that judge a prompt once by its last `window` queries and keep those tokens.

    Decoding evicts nothing, so C + generated tokens are resident. The score asks how the end of the whole prompt looks
    back, so `prefill=chunked`, where the end is not known yet, is refused.

    Attributes:
        window: queries that judge; their tokens always stay.
    """

    attention_signals: ClassVar[frozenset[Signal]] = frozenset({Signal.WINDOW_QUERIES, Signal.KEYS})
    modes: ClassVar[tuple[str, ...]] = ("after",)

    window: int = 32

    def __post_init__(self) -> None:
        """Check the window, protect its tokens, then check the common options."""
        check_range("policy.options.window", self.window, 1, self.budget - 1, limit=f"policy.budget={self.budget}")
        keep_last(self, self.window, "policy.options.window")
        super().__post_init__()

    @property
    def query_window(self) -> int:
        """`window`."""
        return self.window

    @property
    def decode_unit(self) -> Unit:
        """Nothing is evicted while decoding."""
        return Unit.NONE


def window_attention(view: View) -> torch.Tensor:
    """Softmax over all resident keys of the window's queries, none seeing a later position: float32 [N, H, G, W, T].

    Scaled by 1 / sqrt(D), without soft-capping or a bias. Padding gets nothing.
    """
    num_requests, num_query_heads, window, head_size = view.window_queries.shape
    num_heads = view.keys.shape[1]
    queries = view.window_queries.reshape(num_requests, num_heads, -1, head_size)
    logits = products(queries, view.keys, head_size**-0.5).unflatten(2, (num_query_heads // num_heads, window))
    if window == 1 and view.lengths is None:
        return logits.softmax(dim=-1)  # the newest query sees all
    query_positions = view.num_seen[:, None] - window + torch.arange(window, device=logits.device)
    key_positions = view.positions[:, :, None, None, :]
    hidden = (key_positions > query_positions[:, None, None, :, None]) | (key_positions < 0)
    return logits.masked_fill(hidden, float("-inf")).softmax(dim=-1)


def by_position(values: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the last dimension of [N, H, ..., T] by position; returns it and the order, for `to_slots`."""
    order = positions.argsort(dim=-1)
    while order.dim() < values.dim():
        order = order.unsqueeze(2)
    order = order.expand_as(values)
    return values.gather(-1, order), order


def to_slots(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Undo `by_position`."""
    return torch.empty_like(values).scatter_(-1, order, values)
