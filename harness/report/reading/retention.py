"""From retention records to maps: how much of each stretch of the sequence each layer kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from harness.report.reading.runs import Run
from harness.retention import FILE_NAME, Phase, RetentionRecord, decode_arrays, iterate_retention

PHASE_TITLES: dict[Phase, str] = {"prefill_end": "after the prompt", "end": "after the answer"}
NUM_BINS = 128


@dataclass(frozen=True)
class RetentionMap:
    """One heat map.

    Attributes:
        shares: [layers, bins], 0 to 1: share of the bin's (KV head, position) pairs that were kept.
        num_tokens: positions the bins span together, from 0 on.
        num_prompt_tokens: positions below it are the prompt.
    """

    shares: np.ndarray
    num_tokens: int
    num_prompt_tokens: int


Maps = Mapping[tuple[str, Phase], RetentionMap]


def read_maps(run: Run) -> Maps:
    """The maps of a run by sample and phase, empty if it recorded none; see `to_map`."""
    path = run.folder / FILE_NAME
    return _read_maps(run.folder, path.stat().st_mtime_ns) if path.exists() else {}


@lru_cache(maxsize=64)
def _read_maps(folder: Path, changed_ns: int) -> Maps:
    """The maps of the file as it is since `changed_ns`; figures and page both ask for them."""
    records = iterate_retention(folder, decode_arrays)
    return {(record.sample_id, record.phase): to_map(record, NUM_BINS) for record in records}


def to_map(record: RetentionRecord, num_bins: int) -> RetentionMap:
    """The map of a record, in `num_bins` bins of (nearly) equal width, in fewer if there are fewer positions."""
    last = max((int(positions[-1]) for layer in record.layers for positions in layer if len(positions)), default=-1)
    num_tokens = max(record.num_prompt_tokens, last + 1)
    edges = bin_edges(num_tokens, num_bins)
    bin_of = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    shares = np.array([_layer_shares(layer, bin_of, edges) for layer in record.layers])
    return RetentionMap(shares, num_tokens, record.num_prompt_tokens)


def bin_edges(num_tokens: int, num_bins: int) -> np.ndarray:
    """Whole numbers from 0 to `num_tokens`, ascending: bin i holds positions edges[i] to edges[i + 1] - 1."""
    return np.linspace(0, num_tokens, min(num_bins, num_tokens) + 1).round().astype(int)


def mean_shares(maps: Sequence[RetentionMap], num_bins: int) -> np.ndarray:
    """The mean over samples of what each layer kept of each stretch of the prompt, [layers, bins], 0 to 1.

    The prompts are stretched to the same length; what belongs to the answer is left out.
    """
    return np.mean([_resampled(one, num_bins) for one in maps], axis=0)


def _layer_shares(layer: Sequence[Sequence[int]], bin_of: np.ndarray, edges: np.ndarray) -> np.ndarray:
    kept = np.concatenate([np.asarray(positions, dtype=int) for positions in layer])
    counts = np.bincount(bin_of[kept], minlength=len(edges) - 1)
    return counts / (np.diff(edges) * len(layer))


def _resampled(one: RetentionMap, num_bins: int) -> np.ndarray:
    centres = (np.arange(num_bins) + 0.5) / num_bins * one.num_prompt_tokens
    edges = bin_edges(one.num_tokens, one.shares.shape[1])
    return one.shares[:, np.searchsorted(edges, centres, side="right") - 1]
