"""The reference's own KV cache: per layer and KV head a row of tokens in slot order, with what a policy may ask for.

Letters as in `policies.base`: H KV heads, Q query heads, T resident tokens in slot order, D head size.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig

from harness.engines.hf.rotary import Rotary
from policies.base import Phase

if TYPE_CHECKING:
    from harness.engines.hf.reading import Reader


@dataclass(frozen=True)
class CacheShape:
    """How many layers and KV heads cache how wide a key and value."""

    num_layers: int
    num_kv_heads: int
    head_size: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "CacheShape":
        """Read from a model's config, which may leave out the head size, and KV heads where they are not grouped."""
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return cls(config.num_hidden_layers, num_kv_heads, head_size)


@dataclass
class HeadCache:
    """Resident tokens of one KV head.

    Attributes:
        positions: original position of the token in each slot.
        keys, values: [T, D], keys rotated by their original position.
        attention_mass: float32 [T], probability received from all queries of the group so far.
        squared_attention: float32 [T], its squares, from the queries at `ReferenceCache.first_squared` and later.
    """

    positions: list[int]
    keys: torch.Tensor
    values: torch.Tensor
    attention_mass: torch.Tensor
    squared_attention: torch.Tensor

    @classmethod
    def empty(cls, head_size: int) -> "HeadCache":
        """No token yet."""
        return cls([], torch.empty(0, head_size), torch.empty(0, head_size), torch.empty(0), torch.empty(0))

    def append(self, positions: list[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write new tokens, keys and values [n, D], into the slots after the last."""
        self.positions = self.positions + positions
        self.keys = torch.cat([self.keys.to(keys), keys])
        self.values = torch.cat([self.values.to(values), values])
        new_mass = torch.zeros(len(positions), device=keys.device)
        self.attention_mass = torch.cat([self.attention_mass.to(keys.device), new_mass])
        self.squared_attention = torch.cat([self.squared_attention.to(keys.device), new_mass])

    def renumber(self, kept: Collection[int], rotary: Rotary) -> None:
        """Rotate the keys that stay by their place among those that stay, instead of among all."""
        ages = sorted(range(len(self.positions)), key=self.positions.__getitem__)
        survivors = [slot for slot in ages if slot in kept]
        old_places = torch.tensor([ages.index(slot) for slot in survivors], device=self.keys.device)
        new_places = torch.arange(len(survivors), device=self.keys.device)
        raw = rotary.undo(self.keys[None, survivors].float(), old_places)
        self.keys[survivors] = rotary.apply(raw, new_places)[0].to(self.keys)

    def evict(self, kept: Collection[int], phase: Phase) -> None:
        """Let only the slots in `kept` stay, in the order in which the vLLM engine leaves them."""
        order = slot_order_after(kept, phase)
        self.positions = [self.positions[slot] for slot in order]
        self.keys = self.keys[order]
        self.values = self.values[order]
        self.attention_mass = self.attention_mass[order]
        self.squared_attention = self.squared_attention[order]


def slot_order_after(kept: Collection[int], phase: Phase) -> list[int]:
    """Which old slot each new slot holds after an eviction.

    A prompt is compacted in order (it is paged in order once pruned). While decoding, the kept slots behind the cut
    move into the holes before it, the i-th into the i-th, and no other token moves.

    Args:
        kept: old slots that stay.
        phase: when the eviction happens.

    Returns:
        The old slot of each of the `len(kept)` new slots.
    """
    if phase is not Phase.DECODE:
        return sorted(kept)
    order = list(range(len(kept)))
    holes = [slot for slot in order if slot not in kept]
    tail = sorted(slot for slot in kept if slot >= len(kept))
    for hole, slot in zip(holes, tail, strict=True):
        order[hole] = slot
    return order


@dataclass
class LayerCache:
    """One attention layer.

    Attributes:
        heads: one row of tokens a KV head.
        queries: post-RoPE queries of all tokens seen, evicted ones too, as chunks [Q, n, D] in position order; only
            filled if the policy needs queries.
    """

    heads: list[HeadCache]
    queries: list[torch.Tensor] = field(default_factory=list)


@dataclass
class ReferenceCache:
    """Everything that one request has in memory.

    Attributes:
        layers: one cache an attention layer.
        num_prompt_tokens: length of the prompt.
        keep_queries: whether layers remember their queries.
        first_squared: position of the first query whose squared attention is summed.
        num_seen: tokens attended so far, evicted ones too; the next position.
        reader: chooses what decode steps read; None where that is everything.
        lenders: for each layer the one whose keys and values it attends; None where all attend their own.
    """

    layers: list[LayerCache]
    num_prompt_tokens: int
    keep_queries: bool
    first_squared: int = 0
    num_seen: int = 0
    reader: "Reader | None" = None
    lenders: Sequence[int] | None = None

    @classmethod
    def empty(
        cls, shape: CacheShape, num_prompt_tokens: int, keep_queries: bool, first_squared: int = 0
    ) -> "ReferenceCache":
        """No token yet in any row."""
        layers = [
            LayerCache([HeadCache.empty(shape.head_size) for _ in range(shape.num_kv_heads)])
            for _ in range(shape.num_layers)
        ]
        return cls(layers, num_prompt_tokens, keep_queries, first_squared)

    @property
    def num_resident(self) -> int:
        """Tokens in a row, on average.

        Raises:
            RuntimeError: the average is no whole number, so some layer did not run through the reference attention.
        """
        lengths = [len(head.positions) for layer in self.layers for head in layer.heads]
        mean, left_over = divmod(sum(lengths), len(lengths))
        if left_over:
            raise RuntimeError(f"layers hold different numbers of tokens: {sorted(set(lengths))}")
        return mean

    def positions(self) -> list[list[list[int]]]:
        """Original positions by layer, KV head and slot."""
        return [[list(head.positions) for head in layer.heads] for layer in self.layers]
