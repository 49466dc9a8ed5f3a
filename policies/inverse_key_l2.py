"""Inverse key L2 norm (Devoto et al., arXiv 2406.11430; the paper's baseline): keys of low norm draw attention."""

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch

from policies.base import Phase, Ranking, Signal, Unit, View
from policies.classes import WholeRows, with_whole_rows
from policies.options import Granular, check_range


@dataclass(frozen=True, kw_only=True)
class InverseKeyL2(WholeRows, Granular):
    """Score S_i = -||K_i||_2 of each KV head.

    Source: paper and the authors' code (l2compress); the same score as kvpress's Knorm. Rotation keeps the norm, so
    rotated keys serve. Needs keys, no attention. Costs one norm of each resident token per eviction.

    The authors keep a share of the context: `policy.budget=50%`. Deviations: no layer is skipped by default; the
    authors leave the first two whole (`skip_layers=2`). Evicted tokens leave their pages, where the fork of
    PagedEviction's authors zeroes keys and frees nothing.

    Nothing is protected: sinks stay because their norm is low, and a token can leave in the step that made it.
    `protect_first` and `protect_last` change that.

    Attributes:
        skip_layers: the first so many layers keep everything, and the budget is that of each other layer, in whole
            pages. Then eviction happens whenever the newest block is full. For `granularity=token` only.
    """

    name: ClassVar[str] = "inverse_key_l2"
    layers_together: ClassVar[bool] = True
    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.KEYS})

    skip_layers: int = 0

    def __post_init__(self) -> None:
        """Check this policy's own option, then the others."""
        check_range("policy.options.skip_layers", self.skip_layers, 0)
        if self.skip_layers and self.granularity == "block":
            raise ValueError(
                f"policy.options.skip_layers={self.skip_layers} is not for granularity=block, where heads share one "
                "choice. Use granularity=token or skip_layers=0."
            )
        super().__post_init__()

    @property
    def allocation(self) -> Literal["equal", "ragged"]:
        """Ragged with `skip_layers`."""
        return "ragged" if self.skip_layers else "equal"

    @property
    def scores_stay(self) -> bool:
        """Where all layers keep equally many; a page that changes its owner takes no score along."""
        return not self.skip_layers

    @property
    def prefill_unit(self) -> Unit:
        """As `granularity` says; whole pages with `skip_layers`."""
        return Unit.BLOCK if self.skip_layers else super().prefill_unit

    @property
    def decode_unit(self) -> Unit:
        """As `granularity` says; whole pages with `skip_layers`."""
        return Unit.BLOCK if self.skip_layers else super().decode_unit

    def for_model(self, num_layers: int, num_kv_heads: int) -> Self:
        """With `skip_layers`, a copy that knows the layers.

        Raises:
            ValueError: all layers are skipped.
        """
        if not self.skip_layers:
            return self
        check_range(
            "policy.options.skip_layers", self.skip_layers, 0, num_layers - 1, f"a model of {num_layers} layers"
        )
        whole = [[layer < self.skip_layers] * num_kv_heads for layer in range(num_layers)]
        return with_whole_rows(self, whole)

    def plan(self, phase: Phase, num_resident: int, num_seen: int | None = None) -> int:
        """As every policy; with `skip_layers` the mean over all layers."""
        if self.skip_layers:
            return self.plan_classes(phase, num_resident, num_seen)
        return super().plan(phase, num_resident, num_seen)

    def score(self, view: View) -> torch.Tensor:
        """-||K||, float32 [N, H, T]."""
        return -torch.linalg.vector_norm(view.keys, dim=-1, dtype=torch.float32)

    def split(self, ranking: Ranking) -> torch.Tensor:
        """Everything for the skipped layers, int64 [L, N, H]."""
        return self.split_classes(ranking)
