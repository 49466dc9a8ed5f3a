"""A policy that asks for every signal and remembers what it was shown."""

from dataclasses import dataclass, field

import torch

from policies.base import Policy, Signal, View


@dataclass(frozen=True, kw_only=True)
class Recorder(Policy):
    """Every head keeps the tokens that received the most attention.

    Attributes:
        views: what `score` saw, in order: all layers of the first eviction, all layers of the second, ...
    """

    name = "recorder"
    signals = frozenset(Signal)
    per_head = True

    views: list[View] = field(default_factory=list)

    @property
    def query_window(self) -> int:
        """Short enough that decode queries push prompt queries out."""
        return 6

    def score(self, view: View) -> torch.Tensor:
        """The attention mass."""
        self.views.append(view)
        return view.attention_mass
