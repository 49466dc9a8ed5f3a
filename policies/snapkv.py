"""SnapKV (Li et al., arXiv 2404.14469): what the last queries of the prompt attend to, smoothed along the text."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.nn.functional import avg_pool1d, max_pool1d, pad

from policies.attention import PromptWindow, by_position, to_slots, window_attention
from policies.base import View, check_choice
from policies.options import check_range


@dataclass(frozen=True, kw_only=True)
class SnapKV(PromptWindow):
    """Score = pool_kernel(sum over the last `window` queries of attention) of the older tokens; the window stays.

    Source: paper, section 4; authors' code: softmax over all keys with the causal mask inside the window, pooling over
    the older tokens only, ends padded. Acts once, when the prompt was attended; C + generated tokens are resident.
    Needs the window's queries and the keys; costs their product per prompt.

    Defaults that circulate (window / kernel / pooling): authors' repository 32 / 5 / avg (ours), KVCache-Factory
    8 / 7 / max, Ada-KV 32 / 7 / max, kvpress 64 / 5 / avg.

    Deviations: one choice per KV head, over its group of query heads; the authors repeat the keys and choose per query
    head, which makes the cache larger by the group. Everything is float32; the authors round the attention to the
    model's dtype.

    Attributes:
        kernel: width of the pooling, odd; 1 pools nothing.
        pooling: "avg" (padded with zeros) or "max".
        group: "mean" over the group of query heads (kvpress) or "max" (Ada-KV's option), after pooling.
        value_weighted: VATP, after pooling.
    """

    name: ClassVar[str] = "snapkv"
    layers_together: ClassVar[bool] = True
    per_head: ClassVar[bool] = True

    kernel: int = 5
    pooling: Literal["avg", "max"] = "avg"
    group: Literal["mean", "max"] = "mean"

    def __post_init__(self) -> None:
        """Check this policy's own options, then the common ones."""
        check_range("policy.options.kernel", self.kernel, 1)
        if self.kernel % 2 == 0:
            odd = f"{self.kernel - 1} or {self.kernel + 1}"
            raise ValueError(f"policy.options.kernel={self.kernel} is even. Use {odd}.")
        check_choice("policy.options.pooling", self.pooling, ("avg", "max"))
        check_choice("policy.options.group", self.group, ("mean", "max"))
        super().__post_init__()

    def score(self, view: View) -> torch.Tensor:
        """Pooled attention of the older tokens, 0 in the window; float32 [N, H, T]."""
        num_window = view.window_queries.shape[2]
        received, order = by_position(window_attention(view).sum(dim=3), view.positions)
        pool = avg_pool1d if self.pooling == "avg" else max_pool1d
        pooled = pool(received[..., :-num_window].flatten(0, 1), self.kernel, stride=1, padding=self.kernel // 2)
        scores = to_slots(pad(pooled.unflatten(0, received.shape[:2]), (0, num_window)), order)
        return self.weigh(scores.mean(dim=2) if self.group == "mean" else scores.amax(dim=2), view)
