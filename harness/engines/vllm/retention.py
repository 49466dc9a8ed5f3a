"""Writes down which positions stayed resident, for runs that ask for it."""

import math
from collections.abc import Sequence
from pathlib import Path

from harness.engines.vllm.compaction import Compactor
from harness.retention import Phase, RetentionRecord, append_retention


class RetentionLog:
    """Appends to a run folder's `retention.jsonl`; one process writes, with tensor parallelism rank 0 its own heads."""

    def __init__(self, folder: str, compactor: Compactor, block_size: int) -> None:
        self._folder = Path(folder)
        self._compactor = compactor
        self._block_size = block_size

    def record(
        self, request_id: str, phase: Phase, block_ids: Sequence[int], num_resident: int, num_prompt_tokens: int
    ) -> None:
        """Append the positions of a request's first `num_resident` slots. Waits for the device.

        The engine names requests "<id of the caller>-<random>"; the caller's id is what the record holds.
        """
        blocks = list(block_ids[: math.ceil(num_resident / self._block_size)])
        table = self._compactor.device_tensor([blocks])
        positions = self._compactor.positions.read(table, num_resident)[:, 0].sort(dim=-1).values
        sample_id = request_id.rpartition("-")[0]
        append_retention(self._folder, [RetentionRecord(sample_id, num_prompt_tokens, phase, positions.tolist())])
