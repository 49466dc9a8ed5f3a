"""Compare runs on the same samples: `python -m harness.compare RUN_A RUN_B [RUN_C ...]`, all others with the first.

Exit code 0: done; 2: a mistake the message explains.
"""

import argparse
import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.benchmarks.longbench.aggregates import format_figure
from harness.benchmarks.longbench.tasks import PUBLISHED
from harness.benchmarks.tasks import TASKS, get_task
from harness.errors import UserError, exit_code
from harness.statistics.paired import (
    SMALLEST_SHOWN,
    Comparison,
    PairedTask,
    adjust,
    check_same_samples,
    compare_average,
    compare_tasks,
    power_note,
)
from harness.statistics.text_table import format_interval, format_table
from harness.store.manifest import FILE_NAME as MANIFEST
from harness.store.manifest import differing_versions, read_manifest
from harness.store.predictions import FILE_NAME, Prediction, read_predictions


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.compare", description="Compare runs with the first one sample by sample (B - A)."
    )
    parser.add_argument("run_a", type=Path, help=f"run folder with {MANIFEST} and {FILE_NAME}, usually the full cache")
    parser.add_argument("runs_b", type=Path, nargs="+", metavar="run_b", help="run folders to hold against it")
    parser.add_argument("--out", type=Path, help="also write the comparison to this CSV file")
    return exit_code(_run, parser.parse_args(arguments))


def read_run(folder: Path) -> dict[str, Prediction]:
    """Return the samples of a run by id.

    Raises:
        UserError: no or unreadable predictions, or a sample without a score.
    """
    samples = {sample.sample_id: sample for sample in read_predictions(folder)}
    if not samples:
        raise UserError(f"{folder} holds no finished sample. Give a run folder, one with {FILE_NAME}.")
    unscored = [sample_id for sample_id, sample in samples.items() if sample.score is None]
    if unscored:
        raise UserError(
            f"{folder}: {len(unscored)} samples have no score, the first is {unscored[0]}. "
            "Finish the run first: the same command goes on with it."
        )
    return samples


def read_expected(folder: Path) -> dict[str, int]:
    """Return the rows that the whole of each task of a run has, in the benchmark that the run read.

    Raises:
        UserError: the folder has no manifest, or an unreadable one.
    """
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{folder} holds no {MANIFEST}. Give a run folder, one with {MANIFEST} and {FILE_NAME}.")
    return read_manifest(folder).data["num_expected"]


def pair_runs(run_a: Mapping[str, Prediction], run_b: Mapping[str, Prediction]) -> list[PairedTask]:
    """Return the scores (0 to 100) of both runs by task, LongBench's in its order, then own ones.

    Raises:
        UserError: the runs hold different samples, or different tasks or contexts under one id.
    """
    check_same_samples(set(run_a), set(run_b))
    for sample_id, sample in run_a.items():
        other = run_b[sample_id]
        if (sample.task, sample.context_sha256) != (other.task, other.context_sha256):
            raise UserError(
                f"sample {sample_id} is not the same in both runs: {sample.task}, context {sample.context_sha256[:12]} "
                f"and {other.task}, context {other.context_sha256[:12]}. Run both on the same data."
            )
    by_task: dict[str, list[str]] = {get_task(sample.task).name: [] for sample in run_a.values()}
    for sample_id in sorted(run_a):
        by_task[run_a[sample_id].task].append(sample_id)
    return [_paired_task(task, by_task[task], run_a, run_b) for task in TASKS if task in by_task]


def averaged_tasks(pairs: Sequence[PairedTask]) -> Sequence[PairedTask]:
    """Return the tasks that the mean is over: LongBench's if any of them is, else all."""
    return [pair for pair in pairs if pair.task in PUBLISHED] or pairs


def compare_mean(averaged: Sequence[PairedTask]) -> Comparison:
    """Return the comparison of the means of `averaged_tasks`."""
    return compare_average(f"mean of {len(averaged)} tasks", averaged)


def figures(line: Comparison) -> dict[str, Any]:
    """The figures of a comparison as a record: scores and their difference in points, shares from 0 to 1."""
    low, high = line.interval or (None, None)
    return {
        "n": line.num_pairs,
        "score_a": line.score_a,
        "score_b": line.score_b,
        "difference": line.difference,
        "ci_low": low,
        "ci_high": high,
        "p": line.p_value,
        "p_holm": line.p_holm,
        "share_worse": line.share_worse,
        "share_same": line.share_same,
        "share_better": line.share_better,
    }


def _paired_task(
    task: str, sample_ids: Sequence[str], run_a: Mapping[str, Prediction], run_b: Mapping[str, Prediction]
) -> PairedTask:
    return PairedTask(
        task=task,
        scores_a=_percents(run_a[sample_id] for sample_id in sample_ids),
        scores_b=_percents(run_b[sample_id] for sample_id in sample_ids),
        clusters=[run_a[sample_id].context_sha256 for sample_id in sample_ids],
    )


def _percents(samples: Iterable[Prediction]) -> list[float]:
    return [100 * sample.score for sample in samples if sample.score is not None]


@dataclass(frozen=True)
class _Pair:
    """A run held against the first: a comparison a task, and that of the means where there are several tasks."""

    folder: Path
    tasks: Sequence[Comparison]
    means: Sequence[Comparison]


def _run(options: argparse.Namespace) -> None:
    run_a, expected = read_run(options.run_a), read_expected(options.run_a)
    pairs = _adjusted([_compared(run_a, folder) for folder in options.runs_b])
    rows = {line.name: _expected_rows(line, expected) for pair in pairs for line in (*pair.tasks, *pair.means)}
    for pair in pairs:
        lines = [*pair.tasks, *pair.means]
        print(f"A: {options.run_a}\nB: {pair.folder}\n")
        print(format_table(_HEADER, [_cells(line, rows[line.name]) for line in lines]))
        _print_warnings(lines, rows, _versions(options.run_a, pair.folder))
        print()
    _print_notes(pairs)
    if options.out:
        _write_csv(options.out, pairs, rows)
        print(f"written: {options.out}")


def _compared(run_a: Mapping[str, Prediction], folder: Path) -> _Pair:
    tasks = pair_runs(run_a, read_run(folder))
    averaged = averaged_tasks(tasks)
    return _Pair(folder, compare_tasks(tasks), [compare_mean(averaged)] if len(averaged) > 1 else [])


def _adjusted(pairs: Sequence[_Pair]) -> list[_Pair]:
    """Holm over the tasks of all pairs, and over the means of all pairs, as the report's tables have it."""
    tasks = iter(adjust([line for pair in pairs for line in pair.tasks]))
    means = iter(adjust([line for pair in pairs for line in pair.means]))
    return [_Pair(pair.folder, [next(tasks) for _ in pair.tasks], [next(means) for _ in pair.means]) for pair in pairs]


def _expected_rows(line: Comparison, expected: Mapping[str, int]) -> int:
    published = {task: rows for task, rows in expected.items() if task in PUBLISHED} or expected
    return expected[line.name] if line.name in expected else sum(published.values())


def _versions(*folders: Path) -> str:
    return differing_versions([read_manifest(folder).versions for folder in folders])


_HEADER = ("task", "A (n/expected)", "B (n/expected)", "B - A", "95 % interval", "p", "p (Holm)", "worse/same/better")


def _cells(line: Comparison, expected: int) -> tuple[str, ...]:
    low, high = line.interval or (None, None)
    shares = (line.share_worse, line.share_same, line.share_better)
    return (
        line.name,
        format_figure(line.score_a, line.num_pairs, expected),
        format_figure(line.score_b, line.num_pairs, expected),
        f"{line.difference:+.2f}",
        format_interval(low, high),
        _format_p(line.p_value),
        _format_p(line.p_holm),
        "/".join(f"{share:.0%}" for share in shares),
    )


def _print_warnings(lines: Sequence[Comparison], expected: Mapping[str, int], versions: str) -> None:
    for line in lines:
        if line.num_pairs != expected[line.name]:
            print(f"warning: {line.name} has {line.num_pairs} of {expected[line.name]} rows: not the full score.")
        if line.interval is None:
            print(f"warning: {line.name} rests on fewer than 10 contexts in a task: no interval and no p.")
    if versions:
        print(f"warning: the runs were made with different software: {versions}.")


def _print_notes(pairs: Sequence[_Pair]) -> None:
    print(
        "Paired over the same samples. Interval: cluster bootstrap over contexts. p: sign flips of contexts, 2-sided."
        "\nHolm: adjusted over all tasks shown; means over all means shown. Mean: of the task scores."
    )
    for family in ([line for pair in pairs for line in pair.tasks], [line for pair in pairs for line in pair.means]):
        for note in power_note([line for line in family if line.p_value is not None]):
            print(f"note: {note}")


def _write_csv(path: Path, pairs: Sequence[_Pair], expected: Mapping[str, int]) -> None:
    rows = [
        {"run_b": pair.folder.name} | _csv_row(line, expected[line.name])
        for pair in pairs
        for line in (*pair.tasks, *pair.means)
    ]
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error}. Give another path with --out.") from error


def _csv_row(line: Comparison, expected: int) -> dict[str, Any]:
    return {"task": line.name} | figures(line) | {"expected": expected}


def _format_p(p_value: float | None) -> str:
    if p_value is None:
        return "-"
    return f"{p_value:.4f}" if p_value >= SMALLEST_SHOWN else f"<{SMALLEST_SHOWN:.4f}"


if __name__ == "__main__":
    sys.exit(main())
