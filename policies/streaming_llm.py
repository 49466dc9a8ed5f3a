"""StreamingLLM (Xiao et al., arXiv 2309.17453): attention sinks and a recent window."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from policies.base import View, check_choice
from policies.options import Granular


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Granular):
    """Keep the first `protect_first` tokens (sinks) and the most recent ones up to the budget.

    Source: paper, section 3.2; 4 sinks as in the authors' code. Needs positions only, costs nothing.

    Deviations: keys keep the rotation of their original position by default, as in kvpress and the paged ports. With
    `prefill=after` the prompt is attended in full before the window is cut.

    Attributes:
        granularity: "token" cuts the window after every step; "block" drops the oldest block without a sink when the
            newest block is full.
        position_mode: "original", or "cache" to rotate by place in the cache as the authors do; then every eviction
            rotates all keys that move up, so "block" is much cheaper than "token".
    """

    name: ClassVar[str] = "streaming_llm"
    layers_together: ClassVar[bool] = True
    same_in_all_layers: ClassVar[bool] = True
    per_head: ClassVar[bool] = False

    protect_first: int = 4
    position_mode: Literal["original", "cache"] = "original"

    def __post_init__(self) -> None:
        """Check this policy's own options, then the common ones."""
        check_choice("policy.options.position_mode", self.position_mode, ("original", "cache"))
        super().__post_init__()

    @property
    def cache_positions(self) -> bool:
        """`position_mode=cache`."""
        return self.position_mode == "cache"

    def score(self, view: View) -> torch.Tensor:
        """The position itself, float32 [N, 1, T]: exact below 2^24."""
        return view.positions[:, :1].float()
