"""MixAttention (Rajput et al., arXiv 2409.15012) without its training: a window on most layers."""

from dataclasses import dataclass
from typing import ClassVar, Self

from policies.classes import WindowOrAll, with_whole_rows
from policies.options import check_range


@dataclass(frozen=True, kw_only=True)
class MixAttention(WindowOrAll):
    """Every `full_every`-th layer keeps all tokens; each other layer keeps the C most recent ones.

    Source: the paper, whose models are trained so, and the blog of Character.AI that it follows (one layer in six is
    full, a window of 1,024). This is a simulation on a model that was not trained for it, so its quality says little
    about theirs: the whole prompt is attended in full by all layers and the window is cut afterwards; layers do not
    share each other's keys and values. What it shows is the memory, and which layers can do with a window.

    Needs positions only. Acts once the prompt was attended and whenever the newest block is full; blocks are freed as
    in `head_classes`.

    Attributes:
        full_every: 1 in so many layers is full.
        full_first: the first of them. Long contexts depend on which layers are full, the paper finds.
        protect_first: sinks of the windowed layers, 0 as in the paper.
    """

    name: ClassVar[str] = "mix_attention"

    full_every: int = 6
    full_first: int = 0

    def __post_init__(self) -> None:
        """Check this policy's own options, then the common ones."""
        check_range("policy.options.full_every", self.full_every, 2)
        check_range("policy.options.full_first", self.full_first, 0)
        super().__post_init__()

    def for_model(self, num_layers: int, num_kv_heads: int) -> Self:
        """A copy that knows which layers keep everything.

        Raises:
            ValueError: no layer would be full, or all.
        """
        check_range("policy.options.full_first", self.full_first, 0, num_layers - 1, f"a model of {num_layers} layers")
        full = set(range(self.full_first, num_layers, self.full_every))
        return with_whole_rows(self, [[layer in full] * num_kv_heads for layer in range(num_layers)])
