"""What the reference says of a finished request: its evictions, steps and choices."""

from dataclasses import dataclass, field

import torch

from harness.engines.contract import ReadTokens
from policies.base import Phase


@dataclass(frozen=True)
class Decision:
    """One eviction.

    Attributes:
        phase: when it happened.
        num_seen: tokens attended before it.
        num_resident_before, num_keep: tokens in a row before and after, on average where rows differ.
        kept: sorted original positions that stayed, by layer and KV head.
        scores: what they were chosen by, float32 [H or 1, T] a layer in slot order, or [T] a head where heads hold
            unequally many; a choice that another implementation makes differently is a near-tie if its scores hardly
            differ.
        positions: original position of each slot, int64, likewise.
    """

    phase: Phase
    num_seen: int
    num_resident_before: int
    num_keep: int
    kept: list[list[list[int]]]
    scores: list[torch.Tensor] | list[list[torch.Tensor]]
    positions: list[torch.Tensor] | list[list[torch.Tensor]]

    @property
    def counts(self) -> list[list[int]]:
        """Tokens that stayed, by layer and KV head."""
        return [[len(positions) for positions in heads] for heads in self.kept]


@dataclass(frozen=True)
class Step:
    """One forward: when it ended, in seconds from the start, and how many tokens a row held then, on average."""

    end_s: float
    num_resident: int


@dataclass(frozen=True)
class Retained:
    """Ascending original positions by layer and KV head, after the evictions that were due then.

    Attributes:
        prompt: once the prompt was read.
        end: at the end, after the eviction that the last token made due and that was left out.
    """

    prompt: list[list[list[int]]]
    end: list[list[list[int]]]


@dataclass(frozen=True)
class ReferenceTrace:
    """A finished request and all that happened to it.

    Attributes:
        token_ids: generated tokens without the stop token.
        finish_reason: "stop" or "length".
        decisions: evictions in order; a plan that lets all tokens stay is none.
        resident_positions: at the end, in slot order, by layer and KV head.
        logits: float32 [G, V] from which each token was chosen, the stop token included; -inf where
            `min_new_tokens` forbade a stop token.
        steps: one a forward.
        reads: where decode steps read less than is kept: pages by step, layer and KV head; else none.
        read: the tokens that these were, else None.
        retained: if asked for.
        ttft_s, eviction_s: seconds until the first token was chosen, and spent on evictions.
    """

    token_ids: list[int]
    finish_reason: str
    decisions: list[Decision]
    resident_positions: list[list[list[int]]]
    logits: torch.Tensor
    steps: list[Step]
    ttft_s: float
    eviction_s: float
    reads: list[list[list[list[int]]]] = field(default_factory=list)
    read: ReadTokens | None = None
    retained: Retained | None = None

    def margins(self) -> torch.Tensor:
        """Gap between the two best logits of each choice, float32 [G]; a mismatch at a small gap is a near-tie."""
        best, second = self.logits.topk(2, dim=-1).values.unbind(dim=-1)
        return best - second
