"""Policies of a sweep, best first: what a sweep over retrieval tasks prints at its end."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from harness.budget import budget_text
from harness.statistics.stats import wilson
from harness.statistics.text_table import format_table
from harness.store.manifest import Manifest, read_manifest
from harness.store.predictions import Prediction, read_predictions

RETRIEVAL_SOURCES = ("ruler", "needle")
FULL_MUST_REACH = 90.0
RANDOM_MUST_STAY_BELOW = 50.0


@dataclass(frozen=True)
class Ranked:
    """One policy with its settings, over all runs that differ in a seed only.

    Attributes:
        score: mean over samples and runs, 0 to 100.
        by_length: the same by `Prediction.length`; empty if the benchmark has no lengths.
        n: samples; the same ones in every run, or others where the benchmark's seed differs.
        ci_low, ci_high: 95 % Wilson interval of the score over the samples.
        num_runs: repeats over seeds.
        sd: standard deviation of the score over repeats, None for a single run.
    """

    policy: str
    label: str
    score: float
    by_length: dict[int, float]
    n: int
    ci_low: float
    ci_high: float
    num_runs: int
    sd: float | None


def rank(folders: Sequence[Path]) -> list[Ranked]:
    """Rank finished runs, best first; runs that differ in seeds only are repeats of one policy."""
    manifests = [read_manifest(folder) for folder in folders]
    alike: dict[str, list[Path]] = {}
    for folder, manifest in zip(folders, manifests, strict=True):
        alike.setdefault(_label(manifest, manifests), []).append(folder)
    ranked = [_ranked(label, members) for label, members in alike.items()]
    return sorted(ranked, key=lambda line: (-line.score, line.label))


def is_retrieval(folders: Sequence[Path]) -> bool:
    """Whether all runs are of RULER or of the needle grid, on the same lengths."""
    settings = {_rows_of(read_manifest(folder)) for folder in folders}
    return len(settings) == 1 and next(iter(settings))[0] in RETRIEVAL_SOURCES


def has_repeats(folders: Sequence[Path]) -> bool:
    """Whether two runs differ in seeds only."""
    manifests = [read_manifest(folder) for folder in folders]
    labels = {(_label(manifest, manifests), *_rows_of(manifest)) for manifest in manifests}
    return len(labels) < len(manifests)


def ranking_text(ranked: Sequence[Ranked]) -> str:
    """The table of a ranking."""
    lengths = sorted({length for line in ranked for length in line.by_length})
    header = (
        "",
        "policy",
        "score",
        "95 % interval",
        "n",
        "runs",
        "sd over runs",
        *(f"at {length}" for length in lengths),
    )
    rows = [
        (
            str(place),
            line.label,
            f"{line.score:.1f}",
            f"{line.ci_low:.1f} to {line.ci_high:.1f}",
            str(line.n),
            str(line.num_runs),
            "-" if line.sd is None else f"{line.sd:.1f}",
            *(f"{line.by_length[length]:.1f}" if length in line.by_length else "-" for length in lengths),
        )
        for place, line in enumerate(ranked, start=1)
    ]
    return format_table(header, rows)


def verdict(ranked: Sequence[Ranked]) -> str:
    """Whether a retrieval ranking says anything: the full cache must pass at the shortest length, random must fail."""
    full = next((line for line in ranked if line.policy == "full"), None)
    chance = next((line for line in ranked if line.policy == "random"), None)
    if full is None or chance is None:
        missing = " and ".join(name for name, line in (("full", full), ("random", chance)) if line is None)
        return f"Without policy={missing} nobody can say whether this test tells policies apart."
    shortest = min(full.by_length)
    reached = full.by_length[shortest]
    if reached < FULL_MUST_REACH:
        return (
            f"This proves nothing: the full cache reaches {reached:.1f} at {shortest} tokens, where it must reach "
            f"{FULL_MUST_REACH:.0f}. Take another model, or shorter prompts."
        )
    if chance.score >= RANDOM_MUST_STAY_BELOW:
        return (
            f"This proves nothing: random eviction reaches {chance.score:.1f}, and must stay below "
            f"{RANDOM_MUST_STAY_BELOW:.0f}. Lower policy.budget, or take longer prompts."
        )
    return (
        f"The full cache reaches {reached:.1f} at {shortest} tokens and random eviction {chance.score:.1f}: the test "
        "tells policies apart. Intervals: Wilson, over samples."
    )


def _ranked(label: str, folders: Sequence[Path]) -> Ranked:
    runs = [[p for p in read_predictions(folder) if p.score is not None] for folder in folders]
    manifests = [read_manifest(folder) for folder in folders]
    samples: dict[tuple[str, str], list[float]] = {}
    lengths: dict[int, list[float]] = {}
    for manifest, predictions in zip(manifests, runs, strict=True):
        for prediction in predictions:
            samples.setdefault((manifest.data["content_sha256"], prediction.sample_id), []).append(prediction.score)
            if manifest.config["benchmark"]["source"] in RETRIEVAL_SOURCES:
                lengths.setdefault(prediction.length, []).append(100 * prediction.score)
    share = fmean(map(fmean, samples.values()))
    low, high = wilson(share, len(samples))
    return Ranked(
        policy=manifests[0].config["policy"]["name"],
        label=label,
        score=100 * share,
        by_length={length: fmean(scores) for length, scores in sorted(lengths.items())},
        n=len(samples),
        ci_low=100 * low,
        ci_high=100 * high,
        num_runs=len(folders),
        sd=stdev(map(_score, runs)) if len(runs) > 1 else None,
    )


def _score(predictions: Sequence[Prediction]) -> float:
    return 100 * fmean(prediction.score for prediction in predictions)


def _label(manifest: Manifest, among: Sequence[Manifest]) -> str:
    """Policy, budget and engine, and the options other than seeds in which runs of the policy differ."""
    policy, engine = manifest.config["policy"], manifest.config["engine"]["name"]
    others = [other.config["policy"]["options"] for other in among if other.config["policy"]["name"] == policy["name"]]
    options = [
        f"{key}={value}"
        for key, value in policy["options"].items()
        if key != "seed" and any(other.get(key) != value for other in others)
    ]
    budget = [] if policy["budget"] is None else [f"@ {budget_text(policy['budget'])}"]
    engines = {other.config["engine"]["name"] for other in among}
    return " ".join([policy["name"], *budget, *options, *([f"[{engine}]"] if len(engines) > 1 else [])])


def _rows_of(manifest: Manifest) -> tuple[str, str, str]:
    benchmark = manifest.config["benchmark"]
    return benchmark["source"], benchmark["name"], str(benchmark.get("lengths"))
