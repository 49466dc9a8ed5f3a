"""What a policy sees of the cache: scores of the resident tokens of some layers at once.

Letters: L layers, l of them at once, N requests, H KV heads (Hs: H, or 1 where heads share a choice), T tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from harness.engines.vllm.groups import Part
from harness.engines.vllm.key_directions import KeyDirections
from harness.engines.vllm.layout import CacheLayout
from harness.engines.vllm.observers import Observers
from harness.engines.vllm.score_check import checked_scores
from harness.engines.vllm.slices import cut
from policies import Policy, Signal, View
from policies.views import key_directions


class Scorer:
    """Asks the policy, for all rows at once where it allows that."""

    def __init__(
        self,
        policy: Policy,
        layout: CacheLayout,
        observers: Observers | None,
        directions: KeyDirections | None,
        average_over_ranks: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Arguments as of `Compactor`."""
        self._policy = policy
        self._layout = layout
        self._observers = observers
        self._directions = directions
        self._average_over_ranks = average_over_ranks
        self._layers_of_rows: dict[tuple[int, int, int], torch.Tensor] = {}

    def scores(self, part: Part, positions: torch.Tensor, num_layers: int) -> torch.Tensor:
        """float32 [l, N, Hs, T] of the tokens without a score; equal on all ranks where heads share one choice.

        Args:
            part: requests and layers.
            positions: int32 [l, N, Hs, T] of all their tokens.
            num_layers: layers that may be scored at once.
        """
        policy = self._policy.for_budget(part.group.alike.budget)
        together = num_layers if policy.layers_together else 1
        scores = [
            checked_scores(policy, self._view(part, positions, layers), self._layout.grid.num_heads)
            for layers in cut(len(positions), together)
        ]
        joined = scores[0] if len(scores) == 1 else torch.cat(scores)
        joined = joined.unflatten(0, (len(positions), -1))
        return joined if policy.per_head else self._average_over_ranks(joined)

    def rewrite(self, part: Part, positions: torch.Tensor, stays: torch.Tensor, num_layers: int) -> None:
        """Let the policy change keys and values of the tokens that stay, bool [l, N, Hs, T]; the rest as `scores`."""
        policy = self._policy.for_budget(part.group.alike.budget)
        for layers in cut(len(positions), num_layers if policy.layers_together else 1):
            pages = part.pages(self._layout.grid)[layers]
            keys, values = (
                read(pages, positions.shape[-1]).flatten(0, 1)
                for read in (self._layout.read_keys, self._layout.read_values)
            )
            view = replace(self._view(part, positions, layers), keys=keys, values=values)
            keys, values = policy.rewrite(view, stays[layers].flatten(0, 1))
            self._layout.write_keys(pages, keys.unflatten(0, pages.shape[:2]))
            self._layout.write_values(pages, values.unflatten(0, pages.shape[:2]))

    def _view(self, part: Part, positions: torch.Tensor, layers: slice) -> View:
        """Rows [l x N, ...] of some of the part's layers; `layers` counts from the part's first."""
        policy, group = self._policy, part.group
        num_old, num_layers = group.alike.num_old_blocks, layers.stop - layers.start
        absolute = slice(part.layers.start + layers.start, part.layers.start + layers.stop)
        positions = positions[layers, ..., num_old * policy.block_size :].long()
        signals = self._states(part, layers, positions.shape[-1])
        if self._observers is not None:
            signals |= self._observers.view_fields(absolute, group)
            for signal, mass in self._observers.sums.items():
                pages = part.pages(mass.values.grid)[layers]
                signals[signal.value] = mass.values.read(pages, group.alike.num_before)
        multiply = None
        if self._directions is not None:
            signals |= self._directions.fields(part, layers)
            multiply = partial(self._multiply, part.pages(self._layout.grid)[layers], group.alike.num_before)
        signals = {name: values.flatten(0, 1) for name, values in signals.items()}
        if Signal.KEY_DIRECTIONS in policy.signals and self._directions is None:
            signals |= key_directions(signals["keys"])
        layer = absolute.start
        if policy.layers_together:
            layer = self._layer_of_rows(absolute, len(group.num_seen))
        return View(
            layer=layer,
            num_layers=self._layout.grid.num_layers,
            phase=group.alike.phase,
            positions=positions.flatten(0, 1),
            num_seen=group.num_seen.repeat(num_layers) if num_layers > 1 else group.num_seen,
            block_size=policy.block_size,
            multiply=multiply,
            inv_freq=None if self._observers is None else self._observers.inv_freq,
            **signals,
        )

    def _multiply(self, pages: torch.Tensor, num_tokens: int, vectors: torch.Tensor) -> torch.Tensor:
        """See `View.times_keys`; pages int64 [l, N, H, W], the rest [l x N, H, G, D or T]."""
        products = self._layout.times_keys(vectors.unflatten(0, pages.shape[:2]), pages, num_tokens)
        return products.flatten(0, 1)

    def _layer_of_rows(self, layers: slice, num_requests: int) -> torch.Tensor:
        """The layer of each row, int64 [l x N, 1, 1]; kept, as the same are asked for at every step."""
        asked = (layers.start, layers.stop, num_requests)
        if asked not in self._layers_of_rows:
            numbers = torch.arange(layers.start, layers.stop, device=self._layout.grid.device)
            self._layers_of_rows[asked] = numbers.repeat_interleave(num_requests)[:, None, None]
        return self._layers_of_rows[asked]

    def _states(self, part: Part, layers: slice, num_tokens: int) -> dict[str, torch.Tensor]:
        """Keys and values [l, N, H, T, D] of the last `num_tokens`, as far as the policy asks for them."""
        asked = self._policy.signals & {Signal.KEYS, Signal.VALUES}
        if Signal.KEY_DIRECTIONS in self._policy.signals and self._directions is None:
            asked |= {Signal.KEYS}
        if not asked:
            return {}
        pages = part.pages(self._layout.grid)[layers, ..., part.group.alike.num_old_blocks :]
        read = {Signal.KEYS: self._layout.read_keys, Signal.VALUES: self._layout.read_values}
        return {signal.value: read[signal](pages, num_tokens) for signal in asked}
