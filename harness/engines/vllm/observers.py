"""Watches attention for the policies that ask for it, beside the stock kernel."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionImpl

from harness.engines.vllm.layout import CacheLayout
from harness.engines.vllm.signals.batch import Rows, StepBatch
from harness.engines.vllm.signals.mass import AttentionMass
from harness.engines.vllm.signals.moments import QueryMoments
from harness.engines.vllm.signals.window import WindowQueries
from policies import Policy, Signal, Unit

QUERY_SIGNALS = frozenset({Signal.WINDOW_QUERIES, Signal.ATTENTION_MASS, Signal.QUERY_MOMENTS})


class Observers:
    """The observers that one policy needs, behind one door."""

    def __init__(
        self,
        policy: Policy,
        layouts: Sequence[CacheLayout],
        *,
        num_blocks: int,
        num_rows: int,
        scale: float,
        rotary: torch.nn.Module | None,
        device: torch.device,
    ) -> None:
        """Allocate what the policy's signals need.

        Args:
            policy: names its signals.
            layouts: one a layer, in model order.
            num_blocks: blocks of the pool.
            num_rows: requests that can be watched at once, and one row for those that are not.
            scale: softmax scale of the model's attention.
            rotary: the model's rotary embedding; needed for `Signal.QUERY_MOMENTS` only.
            device: where the caches lie.
        """
        signals, num_layers = policy.signals, len(layouts)
        self._prompts_only = policy.decode_unit is Unit.NONE
        self._rows, self._no_row = Rows(num_rows - 1), num_rows - 1
        self._watching = False
        self.mass = AttentionMass(layouts, num_blocks, scale, device) if Signal.ATTENTION_MASS in signals else None
        self._window = (
            WindowQueries(num_layers, num_rows, policy.query_window, device)
            if Signal.WINDOW_QUERIES in signals
            else None
        )
        self._moments = (
            QueryMoments(num_layers, num_rows, rotary, policy.protect_first)
            if Signal.QUERY_MOMENTS in signals
            else None
        )

    def begin_step(self, batch: StepBatch) -> None:
        """Tell every observer who is in the batch.

        Nothing is watched before the first step, nor while all requests decode if the policy only evicts from prompts.
        """
        self._watching = any(batch.prefilling) or not self._prompts_only
        if not self._watching:
            return
        taken = [
            self._rows.take(request_id) if prefilling or not self._prompts_only else (self._no_row, False)
            for request_id, prefilling in zip(batch.request_ids, batch.prefilling, strict=True)
        ]
        rows = [row for row, _ in taken]
        if self.mass is not None:
            self.mass.begin_step(batch)
        if self._window is not None:
            self._window.begin_step(batch, rows)
        if self._moments is not None:
            self._moments.begin_step(batch, rows, [row for row, new in taken if new])

    def observe(self, layer: int, query: torch.Tensor) -> None:
        """Called by every watched attention layer after its kernel; query [tokens, Q, D], post-RoPE."""
        if not self._watching:
            return
        for observer in (self._window, self.mass, self._moments):
            if observer is not None:
                observer.observe(layer, query)

    def forget(self, request_id: str) -> None:
        """The request is finished or preempted."""
        self._rows.release(request_id)

    def prompt_evicted(self, request_id: str) -> None:
        """The request's prompt has been evicted from, and will not be looked at again if only prompts are."""
        if self._prompts_only:
            self._rows.release(request_id)

    def rows_of(self, request_ids: Sequence[str]) -> list[int]:
        """Where the observers keep what they know of these requests."""
        return self._rows.of(request_ids)

    def view_fields(
        self, layer: int, rows: torch.Tensor, num_seen: torch.Tensor, num_queries: int
    ) -> dict[str, torch.Tensor]:
        """What the observers add to a `View`, but for the attention mass, which lies beside the positions.

        Args:
            layer: index of the layer.
            rows: int64 [N], see `rows_of`.
            num_seen: int64 [N].
            num_queries: W of the window.
        """
        fields = {}
        if self._window is not None:
            fields["window_queries"] = self._window.read(layer, rows, num_seen, num_queries)
        if self._moments is not None:
            fields["query_mean"], fields["query_cov"] = self._moments.read(layer, rows)
            fields["inv_freq"] = self._moments.inv_freq
        return fields


def watch(impl: AttentionImpl, layer_index: int, observers: Observers) -> AttentionImpl:
    """The same attention implementation, which also shows its queries to `observers`.

    A subclass made for the backend at hand; the stock kernel runs unchanged.
    """

    class Watched(type(impl)):
        def forward(self, layer: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            output = super().forward(layer, query, *args, **kwargs)
            observers.observe(layer_index, query)
            return output

    watched = object.__new__(Watched)
    vars(watched).update(vars(impl))
    return watched
