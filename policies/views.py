"""What a policy is shown: when, which signals, the resident tokens of a layer, and what pages are split by.

Letters as in `policies.base`, which hands these names on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch

from policies.products import products

EPS = 1e-12  # the length of a key of zeros


class Phase(Enum):
    """When a decision is made."""

    PREFILL_CHUNK = "prefill_chunk"
    """A pinned chunk of the prompt was attended, more follow (`prefill="chunked"` only)."""
    PREFILL_END = "prefill_end"
    """The whole prompt was attended."""
    DECODE = "decode"
    """One token was generated."""


class Signal(Enum):
    """What `score` needs beside the positions. A signal that no policy asks for costs nothing."""

    KEYS = "keys"
    KEY_DIRECTIONS = "key_directions"
    """Lengths of the keys, the sum of K / ||K|| over the resident tokens, and `View.times_keys`."""
    VALUES = "values"
    ATTENTION_MASS = "attention_mass"
    """Softmax attention that each resident token received, summed over all queries so far and over the group."""
    SQUARED_ATTENTION = "squared_attention"
    """The squares of that attention, summed over the last `Policy.query_window` queries of the prompt, all queries
    after it, and the group."""
    NEWEST_ATTENTION = "newest_attention"
    """Softmax attention of the newest token's queries over all resident tokens, itself included."""
    WINDOW_QUERIES = "window_queries"
    """The last `Policy.query_window` post-RoPE queries."""
    QUERY_MOMENTS = "query_moments"
    """Mean and covariance (divided by the count) of the prompt's pre-RoPE queries at positions >= `protect_first`."""


class ReadSignal(Enum):
    """What `Policy.read` needs beside the queries. What no policy asks for costs nothing."""

    PAGE_BOUNDS = "page_bounds"
    """Least and greatest number of each key channel in each page; of policies that evict nothing only."""
    SENTENCES = "sentences"
    """Keys, the sentence of each token, and the mean query of the sentence that is being written."""


class Unit(Enum):
    """What is evicted at once: single tokens, whole blocks of slots, or nothing in this phase."""

    TOKEN = "token"
    BLOCK = "block"
    NONE = "none"


@dataclass(frozen=True)
class View:
    """The resident tokens of one layer for N requests of equal resident length.

    Attributes:
        layer, num_layers: index of this layer, number of attention layers. Where rows of several layers come at once
            (`Policy.layers_together`), `layer` is int64 [N, 1, 1], that of each row.
        phase: when the decision is made.
        positions: int64 [N, H or 1, T], original position of the token in each slot.
        lengths: int64 [N, H], tokens of each head where they differ (`allocation="ragged"`); the slots after them are
            padding, with position -1 and arbitrary contents. None where all T slots are filled.
        num_seen: int64 [N], tokens attended so far including evicted ones (the next position).
        block_size: slots a block.
        keys, values: [N, H, T, D] in the cache's dtype, keys rotated; None unless asked for.
        inverse_norms: float32 [N, H, T], 1 / ||K||, or None.
        direction_sum: float32 [N, H, D], the sum of K / ||K||, present with `inverse_norms`.
        multiply: what `times_keys` calls where `keys` is None.
        attention_mass, squared_attention: float32 [N, H, T] or None.
        newest_attention: float32 [N, H, Q / H, T] or None.
        window_queries: [N, Q, W, D], oldest first, or None. W is smaller for prompts shorter than the window.
        query_mean, query_cov: float32 [N, Q, D] and [N, Q, D, D], or None.
        inv_freq: float32 [D / 2], the model's rotary frequencies, present with `query_mean`.
    """

    layer: int | torch.Tensor
    num_layers: int
    phase: Phase
    positions: torch.Tensor
    num_seen: torch.Tensor
    block_size: int
    lengths: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    inverse_norms: torch.Tensor | None = None
    direction_sum: torch.Tensor | None = None
    multiply: Callable[[torch.Tensor], torch.Tensor] | None = None
    attention_mass: torch.Tensor | None = None
    squared_attention: torch.Tensor | None = None
    newest_attention: torch.Tensor | None = None
    window_queries: torch.Tensor | None = None
    query_mean: torch.Tensor | None = None
    query_cov: torch.Tensor | None = None
    inv_freq: torch.Tensor | None = None

    def times_keys(self, vectors: torch.Tensor) -> torch.Tensor:
        """Products float32 [N, H, G, T] of vectors [N, H, G, D] with the keys, which need not be read for it."""
        if self.keys is None:
            return self.multiply(vectors)
        return products(vectors, self.keys)


def inverse_norms(keys: torch.Tensor) -> torch.Tensor:
    """1 / ||K|| of float32 keys [..., D]: [...]; large for keys of zeros."""
    return keys.square().sum(dim=-1).clamp_min(EPS**2).rsqrt()  # a sum is quicker than a norm


def key_directions(keys: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a `View` shows for `Signal.KEY_DIRECTIONS` of keys [N, H, T, D], computed from all of them."""
    whole = keys.float()
    inverse = inverse_norms(whole)
    return {"keys": keys, "inverse_norms": inverse, "direction_sum": (inverse[..., None, :] @ whole).squeeze(-2)}


@dataclass(frozen=True)
class Ranking:
    """What a ragged policy splits pages by: the candidates of N requests that keep equally many pages on average.

    A page holds B tokens of one layer and one KV head. Every layer and head keeps `(pages - 1) * B + rest` tokens, so
    that all newest pages fill in the same step. `policies.ragged_selection.rank` makes one.

    Attributes:
        phase: when the decision is made.
        scores: float32 [L, N, H, T], as compared by `policies.selection`; padding has -inf.
        positions: int64 [L, N, H, T], -1 in padding.
        protected: bool [L, N, H, T], tokens that must stay.
        lengths: int64 [L, N, H], tokens resident now.
        num_seen: int64 [N], tokens attended so far including evicted ones.
        mean_pages: pages that a layer and head keeps on average, the partial one included.
        rest: tokens in each newest page after the eviction, 1 to B.
        block_size: B.
    """

    phase: Phase
    scores: torch.Tensor
    positions: torch.Tensor
    protected: torch.Tensor
    lengths: torch.Tensor
    num_seen: torch.Tensor
    mean_pages: int
    rest: int
    block_size: int

    @cached_property
    def order(self) -> torch.Tensor:
        """Slots from worst to best by (protected, score, position), padding first: int64 [L, N, H, T]."""
        bits = (self.scores + 0.0).view(torch.int32).long()  # -0.0 becomes 0.0
        rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) + (1 << 31)  # as integers, the floats in their order
        return ((self.protected.long() << 62) + (rising << 30) + self.positions + 1).argsort(dim=-1)


@dataclass(frozen=True)
class ReadView:
    """One decode step of one layer for N requests: what the pages to be read are chosen by.

    Slots are in the order of positions. G is the group of query heads of a KV head, W the pages of the longest row.

    Attributes:
        layer: index of this layer.
        lengths: int64 [N, H], tokens held, the new one included; slots and pages behind them hold anything.
        num_pages: W.
        block_size: B, tokens a page.
        queries: float32 [N, H, G, D], post-RoPE.
        lowest, highest: [N, H, W, D], bounds of the keys of each page, or None.
        keys: [N, H, T, D] with T = W x B, or None; the following come with them.
        sentences: int64 [N, H, T], index of each token's sentence. A prompt ends a sentence.
        sentence: int64 [N], the one that the next token belongs to; those before it are complete.
        sentence_length: int64 [N], its tokens so far; 0 right after a sentence has ended.
        sentence_queries: float32 [N, H, G, D], the mean of their queries.
    """

    layer: int
    lengths: torch.Tensor
    num_pages: int
    block_size: int
    queries: torch.Tensor
    lowest: torch.Tensor | None = None
    highest: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    sentences: torch.Tensor | None = None
    sentence: torch.Tensor | None = None
    sentence_length: torch.Tensor | None = None
    sentence_queries: torch.Tensor | None = None
