"""Who is in the batch of one step, and where each request's state lives.

Letters: N requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class StepBatch:
    """The requests of one step, in batch order.

    Attributes:
        request_ids: N ids.
        starts: N + 1 offsets of their tokens in the batch.
        num_seen: tokens of each after this step, evicted ones included.
        num_resident: resident tokens of each after this step.
        prefilling: whether this step attends prompt tokens of the request.
        block_table: int64 [N, blocks], as wide as the longest request needs.
        slot_mapping: int64 [tokens], physical slots of the new tokens.
        observed: how many of each one's new tokens, the last, observe what `Policy.query_window` bounds: those that
            close a prompt, and all after it.
        pages: where the step finds pages that do not follow from blocks; None where they do.
    """

    request_ids: Sequence[str]
    starts: Sequence[int]
    num_seen: Sequence[int]
    num_resident: Sequence[int]
    prefilling: Sequence[bool]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    observed: Sequence[int] = ()
    pages: "StepPages | None" = None


class StepPages(Protocol):
    """Pages and lengths of each layer and head in the step under way, for requests by their place in the batch."""

    slots: torch.Tensor
    """int64 [L, tokens, H], slots of the new tokens, counted over all pages."""

    def width(self, request_ids: Sequence[str]) -> int:
        """Pages that the longest head of these requests can have."""
        ...

    def read(self, layer: int, places: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Page numbers int64 [N, H, width] and lengths int64 [N, H] of requests at `places` int64 [N]."""
        ...


class Rows:
    """Gives each request a row of preallocated state while it lives."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows))
        self._row: dict[str, int] = {}

    def take(self, request_id: str) -> tuple[int, bool]:
        """The request's row, and whether it is new."""
        if request_id in self._row:
            return self._row[request_id], False
        self._row[request_id] = self._free.pop()
        return self._row[request_id], True

    def release(self, request_id: str) -> None:
        """The request is finished or preempted."""
        if (row := self._row.pop(request_id, None)) is not None:
            self._free.append(row)

    def of(self, request_ids: Sequence[str]) -> list[int]:
        """Rows of known requests."""
        return [self._row[request_id] for request_id in request_ids]
