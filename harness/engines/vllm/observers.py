"""Watches attention for the policies that ask for it, beside the stock kernel."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionImpl

from harness.engines.vllm.groups import Group
from harness.engines.vllm.host_time import HostTime
from harness.engines.vllm.layout import CacheLayout
from harness.engines.vllm.signals.batch import Rows, StepBatch
from harness.engines.vllm.signals.mass import AttentionMass
from harness.engines.vllm.signals.moments import QueryMoments
from harness.engines.vllm.signals.newest import NewestAttention
from harness.engines.vllm.signals.page_sums import PageSums
from harness.engines.vllm.signals.window import WindowQueries
from policies import Policy, Signal, Unit

PAGED_SIGNALS = frozenset({Signal.ATTENTION_MASS, Signal.SQUARED_ATTENTION})
QUERY_SIGNALS = PAGED_SIGNALS | {Signal.NEWEST_ATTENTION, Signal.WINDOW_QUERIES, Signal.QUERY_MOMENTS}


class Observers:
    """The observers that one policy needs, behind one door.

    Attributes:
        sums: of attention, one a slot of the pool, as far as the policy asks for them.
        time: spent so far.
    """

    def __init__(
        self,
        policy: Policy,
        layout: CacheLayout,
        *,
        num_rows: int,
        scale: float,
        rotary: torch.nn.Module | None,
    ) -> None:
        """Allocate what the policy's signals need.

        Args:
            policy: names its signals.
            layout: the caches of all layers.
            num_rows: requests that can be watched at once, and one row for those that are not.
            scale: softmax scale of the model's attention.
            rotary: the model's rotary embedding; needed for `Signal.QUERY_MOMENTS` only.
        """
        signals, grid = policy.signals, layout.grid
        self._prompts_only = policy.decode_unit is Unit.NONE
        self._rows, self._no_row = Rows(num_rows - 1), num_rows - 1
        self._watching = self._decoding = False
        self.time = HostTime()
        self.sums: dict[Signal, AttentionMass | PageSums] = {}
        if Signal.SQUARED_ATTENTION in signals:
            self.sums[Signal.SQUARED_ATTENTION] = PageSums(layout, scale, power=2)
        if Signal.ATTENTION_MASS in signals:
            self.sums[Signal.ATTENTION_MASS] = (
                AttentionMass(layout, num_rows, scale, self._prompts_only)
                if not policy.by_page
                else PageSums(layout, scale, power=1)
            )
        self._newest = NewestAttention(layout, num_rows, scale) if Signal.NEWEST_ATTENTION in signals else None
        self._window = (
            WindowQueries(grid.num_layers, num_rows, policy.query_window, grid.device)
            if Signal.WINDOW_QUERIES in signals
            else None
        )
        self._moments = (
            QueryMoments(grid.num_layers, num_rows, rotary, policy.protect_first)
            if Signal.QUERY_MOMENTS in signals
            else None
        )

    def begin_step(self, batch: StepBatch) -> None:
        """Tell every observer who is in the batch.

        Nothing is watched before the first step, nor while all requests decode if the policy only evicts from prompts.
        """
        self._decoding = not any(batch.prefilling)
        self._watching = not (self._decoding and self._prompts_only)
        if not self._watching:
            return
        with self.time.spent(self._decoding):
            self._begin(batch)

    def _begin(self, batch: StepBatch) -> None:
        taken = [
            self._rows.take(request_id) if prefilling or not self._prompts_only else (self._no_row, False)
            for request_id, prefilling in zip(batch.request_ids, batch.prefilling, strict=True)
        ]
        rows = [row for row, _ in taken]
        for signal, sums in self.sums.items():
            if signal is Signal.SQUARED_ATTENTION:
                sums.begin_step(batch, batch.observed)
            else:
                sums.begin_step(batch)
        if self._newest is not None:
            self._newest.begin_step(batch, range(len(rows)), rows)
        if self._window is not None:
            self._window.begin_step(batch, rows)
        if self._moments is not None:
            self._moments.begin_step(batch, rows, [row for row, new in taken if new])

    def observe(self, layer: int, query: torch.Tensor) -> None:
        """Called by every watched attention layer after its kernel; query [tokens, Q, D], post-RoPE."""
        if not self._watching:
            return
        with self.time.spent(self._decoding):
            for observer in (self._newest, self._window, self._moments, *self.sums.values()):
                if observer is not None:
                    observer.observe(layer, query)

    def end_step(self) -> None:
        """Finish what was put off until all layers had run; before anything is evicted, freed or written."""
        with self.time.spent(self._decoding):
            for sums in self.sums.values():
                sums.end_step()

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

    @property
    def inv_freq(self) -> torch.Tensor | None:
        """The model's rotary frequencies float32 [D / 2], with query moments."""
        return None if self._moments is None else self._moments.inv_freq

    def queries_a_head(self, num_heads: int) -> int:
        """Queries that a score multiplies with every key of one of the KV heads, of which there are `num_heads`."""
        if self._newest is not None:
            return self._newest.num_query_heads // num_heads
        if self._window is not None:
            return self._window.num_queries // num_heads
        return 0 if self._moments is None else self._moments.num_query_heads // num_heads

    def view_fields(self, layers: slice, group: Group) -> dict[str, torch.Tensor]:
        """What the observers add to a `View`, [l, N, ...], but for sums of attention, which are paged.

        Args:
            layers: l of them.
            group: the requests; its rows as of `rows_of`.
        """
        fields = {}
        if self._newest is not None:
            fields["newest_attention"] = self._newest.read(layers, group)
        if self._window is not None:
            fields["window_queries"] = self._window.read(layers, group.rows, group.num_seen, group.alike.num_queries)
        if self._moments is not None:
            fields["query_mean"], fields["query_cov"] = self._moments.read(layers, group.rows)
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
