"""What should stay, computed anew on the CPU from what the device's cache held before an eviction.

So positions can be compared exactly whatever the kernels round: both sides see the same keys and values. For policies
that need no more than these.
"""

from typing import Any

import torch

from harness.engines.vllm.groups import Victim
from harness.engines.vllm.llm import VllmEngine
from policies import Policy, View
from policies.selection import reduce_heads, select
from policies.views import key_directions
from tests.engines.vllm.live import runner_of


class Recomputed:
    """From now on every eviction of an engine is computed twice.

    Attributes:
        num_compared: rows (layers and heads of a request) compared so far.
        wrong: (request, layer, head, positions that stayed and should not have) of rows that differ.
    """

    def __init__(self, engine: VllmEngine) -> None:
        self.num_compared = 0
        self.wrong: list[tuple[str, int, int, list[int]]] = []
        self._policy: Policy = engine.policy
        self._compactor: Any = runner_of(engine.llm_engine).compactor
        self._evict = self._compactor.evict
        self._compactor.evict = self._evict_twice

    def _evict_twice(self, victims: list[Victim]) -> None:
        expected = [self._expected(victim) for victim in victims]
        self._evict(victims)
        for victim, rows in zip(victims, expected, strict=True):
            found = self._positions(victim, victim.eviction.num_keep).tolist()
            for layer, heads in enumerate(rows):
                for head, positions in enumerate(heads):
                    self.num_compared += 1
                    if strangers := sorted(set(found[layer][head]) - set(positions)):
                        self.wrong.append((victim.request_id, layer, head, strangers))

    def _table(self, victim: Victim) -> torch.Tensor:
        return self._compactor.device_tensor([list(victim.block_ids)])

    def _positions(self, victim: Victim, num_tokens: int) -> torch.Tensor:
        """int64 [L, H or 1, T]."""
        return self._compactor.positions_of(self._table(victim), num_tokens)[:, 0].long().cpu()

    def _expected(self, victim: Victim) -> list[list[list[int]]]:
        """Positions that should stay, by layer and head."""
        policy, plan, layout = self._policy, victim.eviction, self._compactor._layout
        pages = layout.grid.numbers(self._table(victim))[:, 0]
        keys, values = (read(pages, plan.num_before).cpu() for read in (layout.read_keys, layout.read_values))
        positions, seen = self._positions(victim, plan.num_before), torch.tensor([plan.num_seen])
        views = [
            View(layer, len(keys), plan.phase, positions[layer][None], seen, policy.block_size,
                 values=values[layer][None], **key_directions(keys[layer][None]))
            for layer in range(len(keys))
        ]  # fmt: skip
        scores = torch.stack([reduce_heads(policy, policy.score(view)) for view in views])
        keep = select(policy, plan.phase, scores, positions[:, None], seen, plan.num_keep)[:, 0]
        return [
            [row[mask].tolist() for row, mask in zip(positions[layer], keep[layer], strict=True)]
            for layer in range(len(keys))
        ]
