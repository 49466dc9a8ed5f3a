"""KeyDiff (Park et al., arXiv 2504.15364; the paper's baseline): keys that differ from the mean direction stay."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import cosine_similarity, normalize

from policies.base import Signal, View
from policies.options import Granular


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Granular):
    """Score S_i = -cos(K_i, mu) of each KV head, mu the mean of K_j / ||K_j|| over the resident tokens j.

    Source: paper, its anchor form (not the pairwise one); formula as in kvpress. Needs keys, no attention. Costs two
    passes over the resident keys per eviction.

    The paper evicts after every block of 128 prompt tokens, under the budget all the time: that is `prefill=chunked`
    with the default `prefill_chunk` (`policy=keydiff_chunked`). The default here is one eviction after the prompt, as
    in kvpress, so that all rows of a table see the same prompt. While decoding one token leaves per step, as in the
    paper. The recent window of the paper's later version is `protect_last`.
    """

    name: ClassVar[str] = "keydiff"
    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.KEYS})

    prefill_chunk: int = 128

    def score(self, view: View) -> torch.Tensor:
        """-cos(K, mu), float32 [N, H, T]."""
        keys = view.keys.float()
        anchor = normalize(keys, dim=-1).mean(dim=2, keepdim=True)
        return -cosine_similarity(keys, anchor, dim=-1)
