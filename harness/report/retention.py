"""From retention records to maps: how much of each stretch of the sequence each layer kept."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.report.runs import Run
from harness.retention import Phase, RetentionRecord, read_retention

PHASE_TITLES: dict[Phase, str] = {"prefill_end": "after the prompt", "end": "after the answer"}


@dataclass(frozen=True)
class RetentionMap:
    """One heat map.

    Attributes:
        shares: [layers, bins], 0 to 1: share of the bin's (KV head, position) pairs that were kept.
        num_tokens: positions the bins span together, from 0 on.
        num_prompt_tokens: positions below it are the prompt.
        phase: when it was recorded.
    """

    shares: np.ndarray
    num_tokens: int
    num_prompt_tokens: int
    phase: Phase


def read_maps(run: Run, num_bins: int) -> dict[tuple[str, Phase], RetentionMap]:
    """The maps of a run by sample and phase, empty if it recorded none; see `to_map`."""
    return {(record.sample_id, record.phase): to_map(record, num_bins) for record in read_retention(run.folder)}


def to_map(record: RetentionRecord, num_bins: int) -> RetentionMap:
    """The map of a record, in `num_bins` bins of (nearly) equal width, in fewer if there are fewer positions."""
    last = max((positions[-1] for layer in record.layers for positions in layer if positions), default=-1)
    num_tokens = max(record.num_prompt_tokens, last + 1)
    edges = bin_edges(num_tokens, num_bins)
    shares = np.array([_layer_shares(layer, edges) for layer in record.layers])
    return RetentionMap(shares, num_tokens, record.num_prompt_tokens, record.phase)


def bin_edges(num_tokens: int, num_bins: int) -> np.ndarray:
    """Whole numbers from 0 to `num_tokens`, ascending: bin i holds positions edges[i] to edges[i + 1] - 1."""
    return np.linspace(0, num_tokens, min(num_bins, num_tokens) + 1).round().astype(int)


def mean_shares(maps: Sequence[RetentionMap], num_bins: int) -> np.ndarray:
    """The mean over samples of what each layer kept of each stretch of the prompt, [layers, bins], 0 to 1.

    The prompts are stretched to the same length; what belongs to the answer is left out.
    """
    return np.mean([_resampled(one, num_bins) for one in maps], axis=0)


def _layer_shares(layer: Sequence[Sequence[int]], edges: np.ndarray) -> np.ndarray:
    kept = np.concatenate([np.asarray(positions, dtype=int) for positions in layer])
    counts, _ = np.histogram(kept, bins=edges)
    # np.histogram counts a position equal to the last edge, but no position is that large.
    return counts / (np.diff(edges) * len(layer))


def _resampled(one: RetentionMap, num_bins: int) -> np.ndarray:
    centres = (np.arange(num_bins) + 0.5) / num_bins * one.num_prompt_tokens
    edges = bin_edges(one.num_tokens, one.shares.shape[1])
    return one.shares[:, np.searchsorted(edges, centres, side="right") - 1]
