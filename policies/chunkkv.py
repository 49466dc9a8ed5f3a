"""ChunkKV (Liu et al., arXiv 2502.00299): SnapKV's question, answered for whole chunks of text."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import avg_pool1d, pad

from policies.attention import PromptWindow, by_position, to_slots, window_attention
from policies.base import View
from policies.options import check_range


@dataclass(frozen=True, kw_only=True)
class ChunkKV(PromptWindow):
    """Score of a token = mean over its chunk of the attention from the last `window` queries; the window stays.

    Source: paper, its algorithm: chunks of consecutive tokens, the best ones and the window stay. All heads
    of a layer share the choice, by the mean of their scores, as in kvpress. Acts once, when the prompt was attended.
    Needs the window's queries and the keys; costs their product per prompt.

    Exactly C tokens stay: whole chunks by falling score, and of the first that does not fit whole its later tokens. The
    last chunk before the window may be short, and is judged by its mean too (the paper sums).

    Deviations: attention is not pooled before it is averaged, as in the paper (kvpress averages SnapKV's pooled
    scores). Indices are not reused by neighbouring layers (the paper's speed option).

    Attributes:
        chunk_length: tokens a chunk; 10 is the paper's, 20 kvpress's default.
        value_weighted: VATP, before the mean over the chunk.
    """

    name: ClassVar[str] = "chunkkv"
    layers_together: ClassVar[bool] = True

    chunk_length: int = 10

    def __post_init__(self) -> None:
        """Check this policy's own options, then the common ones."""
        check_range("policy.options.chunk_length", self.chunk_length, 1)
        super().__post_init__()

    def score(self, view: View) -> torch.Tensor:
        """Equal within a chunk, 0 in the window; float32 [N, 1, T]."""
        num_window = view.window_queries.shape[2]
        received = self.weigh(window_attention(view).sum(dim=3).mean(dim=2), view).mean(dim=1, keepdim=True)
        received, order = by_position(received, view.positions[:, :1])
        older = received[..., :-num_window]
        means = avg_pool1d(older, self.chunk_length, ceil_mode=True)
        spread = means.repeat_interleave(self.chunk_length, dim=-1)[..., : older.shape[-1]]
        return to_slots(pad(spread, (0, num_window)), order)
