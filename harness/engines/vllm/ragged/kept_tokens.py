"""What layers and heads kept of prompts, added up on the device and read once at the end."""

from dataclasses import asdict
from itertools import chain
from typing import Any

import torch

from harness.engines.contract import KeptTokens, ReadTokens


class KeptCounts:
    """Mean, least and most over prompts, for every layer and KV head of this worker."""

    def __init__(self) -> None:
        self._num_prompts = 0
        self._sum: torch.Tensor | None = None
        self._least: torch.Tensor | None = None
        self._most: torch.Tensor | None = None

    def add(self, counts: torch.Tensor) -> None:
        """Tokens kept of N prompts, int64 [L, N, H]; waits for nothing."""
        self._num_prompts += counts.shape[1]
        total, least, most = counts.sum(dim=1), counts.amin(dim=1), counts.amax(dim=1)
        if self._sum is None:
            self._sum, self._least, self._most = total, least, most
            return
        self._sum += total
        self._least = torch.minimum(self._least, least)
        self._most = torch.maximum(self._most, most)

    def read(self) -> dict[str, Any] | None:
        """As `KeptTokens`, plain data; None without prompts. Waits for the device."""
        if self._sum is None:
            return None
        mean = (self._sum.double() / self._num_prompts).tolist()
        return asdict(KeptTokens(self._num_prompts, mean, self._least.tolist(), self._most.tolist()))


def join_kept(parts: list[dict[str, Any] | None]) -> KeptTokens | None:
    """The heads of all tensor-parallel ranks beside each other."""
    if not parts or parts[0] is None:
        return None
    return KeptTokens(parts[0]["num_prompts"], **_beside_each_other(parts, ("mean", "least", "most")))


def join_read(parts: list[dict[str, Any] | None]) -> ReadTokens | None:
    """As `join_kept`."""
    if not parts or parts[0] is None:
        return None
    return ReadTokens(parts[0]["num_steps"], **_beside_each_other(parts, ("read", "resident")))


def _beside_each_other(parts: list[dict[str, Any]], keys: tuple[str, ...]) -> dict[str, list[list]]:
    """[layers][heads] of each rank -> [layers][heads of all]."""
    return {key: [list(chain(*heads)) for heads in zip(*(part[key] for part in parts), strict=True)] for key in keys}
