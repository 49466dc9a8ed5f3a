"""Random eviction: the floor. A scored policy that does not beat it is broken."""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar, TypeVar

import torch

from policies.base import View
from policies.options import Granular

_Integers = TypeVar("_Integers", int, torch.Tensor)
_BITS = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class Random(Granular):
    """Score = a hash of (seed, layer, position), so that any C of the tokens seen so far are as likely to be resident.

    No paper; kvpress has the like (RandomPress) for prompts. Needs positions only, costs nothing.

    The hash depends neither on batch mates nor on slots, so a rerun evicts the same tokens. A token keeps its score for
    ever, which makes the residents a uniform sample without replacement of everything seen, while decoding too: the
    C tokens with the highest hashes. Each layer draws its own sample; its KV heads share it, where kvpress draws for
    each head. Nothing is protected, not even the newest token: `protect_first` and `protect_last` give a kinder floor.

    Attributes:
        seed: another sample.
        granularity: "block" draws whole blocks, by the mean hash of their tokens.
    """

    name: ClassVar[str] = "random"
    layers_together: ClassVar[bool] = True
    per_head: ClassVar[bool] = False

    seed: int = 0

    def score(self, view: View) -> torch.Tensor:
        """Uniform in [0, 1) in steps of 2^-24, which float32 holds exactly; [N, 1, T]."""
        if isinstance(view.layer, int):
            stream = _stream(self.seed, view.layer)
        else:
            stream = _streams(self.seed, view.num_layers, view.layer.device)[view.layer]
        return (_mix(view.positions[:, :1] ^ stream) >> 8) * 2.0**-24


@cache
def _streams(seed: int, num_layers: int, device: torch.device) -> torch.Tensor:
    """What each layer's positions are mixed with, int64 [L]."""
    return _stream(seed, torch.arange(num_layers, device=device))


def _stream(seed: int, layer: _Integers) -> _Integers:
    return _mix(_mix((seed + 0x9E3779B9) & _BITS) ^ layer)  # the constant: 0 is mixed to 0


def _mix(x: _Integers) -> _Integers:
    """A bijection of 32-bit integers (one, or an int64 tensor) that spreads each bit over all: multiply, xor-shift."""
    for multiplier in (0x21F0AAAD, 0x735A2D97):
        x = ((x ^ (x >> 16)) * multiplier) & _BITS
    return x ^ (x >> 15)
