"""KV-Compress (Rehg, arXiv 2410.00161): squared attention, one total over all layers and heads, whole blocks."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from policies.base import Policy, Ranking, Signal, Unit, View
from policies.options import check_range
from policies.shares import split_by_best_page


@dataclass(frozen=True, kw_only=True)
class KVCompress(Policy):
    """Score S_i = sum of squared softmax attention a_ti^2 over the observing queries t and over the group.

    Observing are the last `window` queries of the prompt and every generated token. A head's tokens, sorted by score,
    form virtual blocks of `block_size`; the blocks whose largest member is least leave, wherever in the model they are.
    Once the prompt was attended as many leave as bring the mean to C; while decoding, one a layer and head on average
    (one block of the pool) whenever the newest block is full and more than C are resident.

    Source: paper, section 3, and the authors' vLLM fork, whose defaults are a window of 32 and 50 newest tokens that
    stay (8 and 8 in the LongBench script of its tables). Needs squared attention, which an observer adds up beside the
    kernel: `window` query rows a prompt and one a step.

    The fork keeps a share or a number for the whole request; here a share is one of the prompt. Deviations: the fork
    pools a prompt's sums over 7 neighbours (the greatest) in each query head before it adds up the group; here they
    are not, as vLLM's steps may cut the window, and maxima of part sums would depend on who else is in the batch. With
    a fixed budget the fork compresses once, after the prompt; here decoding goes on evicting. It leaves a prompt's
    partial block alone; here a prompt is cut to C exactly. No bias per head and position, which its authors read from
    a file and leave at 0. A prompt attended again after a preemption starts its sums anew.

    Attributes:
        window: queries of the prompt that count.
        protect_last: newest tokens that stay; at least a block does, as the newest block is no candidate.
        scope: "global", or "layer" to take equally many blocks from each layer.
    """

    name: ClassVar[str] = "kv_compress"
    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.SQUARED_ATTENTION})
    allocation: ClassVar[Literal["ragged"]] = "ragged"
    per_head: ClassVar[bool] = True
    modes: ClassVar[tuple[str, ...]] = ("after",)

    protect_last: int = 50
    window: int = 32
    scope: Literal["global", "layer"] = "global"

    def __post_init__(self) -> None:
        """Check this policy's own options, protect the newest block, then check the common options."""
        check_range("policy.options.window", self.window, 1)
        if 0 <= self.protect_last < self.block_size:
            object.__setattr__(self, "protect_last", self.block_size)
        super().__post_init__()

    @property
    def query_window(self) -> int:
        """`window`: queries of the prompt whose squared attention is summed."""
        return self.window

    @property
    def decode_unit(self) -> Unit:
        """Whole blocks."""
        return Unit.BLOCK

    def score(self, view: View) -> torch.Tensor:
        """The accumulated squared attention, float32 [N, H, T]."""
        return view.squared_attention

    def split(self, ranking: Ranking) -> torch.Tensor:
        """Pages by their largest member, int64 [L, N, H]."""
        return split_by_best_page(ranking, over_layers=self.scope == "global")
