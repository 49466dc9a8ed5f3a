"""KeyDiff (Park et al., arXiv 2504.15364; the paper's baseline): keys that differ from the mean direction stay."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.linalg import vector_norm

from policies.base import Signal, View
from policies.options import Granular
from policies.views import EPS


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Granular):
    """Score S_i = -cos(K_i, mu) of each KV head, mu the mean of K_j / ||K_j|| over the resident tokens j.

    Source: paper, its anchor form (not the pairwise one); formula as in kvpress. Needs the directions of keys, no
    attention. Costs one pass over the resident keys per eviction; another one where many tokens leave.

    The paper evicts after every block of 128 prompt tokens, under the budget all the time: that is `prefill=chunked`
    with the default `prefill_chunk` (`policy=keydiff_chunked`). The default here is one eviction after the prompt, as
    in kvpress, so that all rows of a table see the same prompt. While decoding one token leaves per step, as in the
    paper. The recent window of the paper's later version is `protect_last`.
    """

    name: ClassVar[str] = "keydiff"
    layers_together: ClassVar[bool] = True
    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.KEY_DIRECTIONS})

    prefill_chunk: int = 128

    def score(self, view: View) -> torch.Tensor:
        """-cos(K, mu), float32 [N, H, T]."""
        anchor = view.direction_sum  # a cosine does not ask for the length, so the sum is as good as the mean
        anchor = anchor / vector_norm(anchor, dim=-1, keepdim=True).clamp_min(EPS)
        return -(view.times_keys(anchor[..., None, :]).squeeze(-2) * view.inverse_norms)
