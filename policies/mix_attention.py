"""MixAttention (Rajput et al., arXiv 2409.15012) without its training: windows, and layers that share a cache."""

from dataclasses import dataclass
from typing import ClassVar, Self

from policies.classes import WindowOrAll, with_whole_rows
from policies.options import check_range


@dataclass(frozen=True, kw_only=True)
class MixAttention(WindowOrAll):
    """Every `full_every`-th layer keeps all tokens; each other layer keeps the C most recent ones.

    Source: the paper, whose models are trained so, and the blog of Character.AI that it follows (one layer in six is
    full, a window of 1,024; neighbours share). This is a **simulation** on a model that was not trained for it, so its
    quality says nothing about theirs: the prompt is attended in full by all layers and the window is cut afterwards,
    and a layer that attends another one's keys and values, which `share` above 1 asks for, was never taught to. The
    default is its windows only. Deviation: each full layer keeps a cache of its own, where the published models let all
    of them attend that of the first; so more is resident here than there. What it shows is which layers can do with a
    window, and what that frees.

    Of a layer that borrows nothing but its newest page stays once the prompt was attended: a block of the pool is a
    page of every layer. While the prompt is attended its pages are there and unused.

    Needs positions only. Acts once the prompt was attended and whenever the newest block is full; blocks are freed as
    in `head_classes`.

    Attributes:
        full_every: 1 in so many layers is full.
        share: so many neighbouring windowed layers attend the keys and values of the first of them; 1: none does.
        full_first: the first of them. Long contexts depend on which layers are full, the paper finds.
        protect_first: sinks of the windowed layers, 0 as in the paper.
    """

    name: ClassVar[str] = "mix_attention"

    full_every: int = 6
    full_first: int = 0
    share: int = 1

    def __post_init__(self) -> None:
        """Check this policy's own options, then the common ones."""
        check_range("policy.options.full_every", self.full_every, 2)
        check_range("policy.options.full_first", self.full_first, 0)
        check_range("policy.options.share", self.share, 1)
        super().__post_init__()

    def for_model(self, num_layers: int, num_kv_heads: int) -> Self:
        """A copy that knows which layers keep everything.

        Raises:
            ValueError: no layer would be full, or all.
        """
        check_range("policy.options.full_first", self.full_first, 0, num_layers - 1, f"a model of {num_layers} layers")
        full = set(range(self.full_first, num_layers, self.full_every))
        whole = [[layer in full] * num_kv_heads for layer in range(num_layers)]
        return with_whole_rows(self, whole, self._lenders(full, num_layers) if self.share > 1 else None)

    def _lenders(self, full: set[int], num_layers: int) -> tuple[int, ...]:
        """For each layer the one whose keys and values it attends."""
        lenders: list[int] = []
        for layer in range(num_layers):
            lender = lenders[-1] if lenders else layer
            alone = layer in full or lender in full or layer - lender == self.share
            lenders.append(layer if alone else lender)
        return tuple(lenders)
