"""Score predictions in LongBench's format: `python -m harness.score FOLDER`.

Exit code 0: done; 1: `--check` found a difference; 2: a mistake the message explains.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from harness.benchmarks.chat import has_reasoning, is_cut_in_reasoning
from harness.benchmarks.longbench.aggregates import (
    ENGLISH,
    OVERALL,
    Average,
    averages,
    bucket_averages,
    bucket_scores,
    format_figure,
)
from harness.benchmarks.longbench.edit_similarity import DEFAULT_EDIT_SIMILARITY, EDIT_SIMILARITIES
from harness.benchmarks.longbench.official_files import PredictionRow, prediction_files, read_prediction_file
from harness.benchmarks.longbench.own_averages import language_averages
from harness.benchmarks.longbench.result_file import (
    BucketScores,
    TaskScores,
    differences,
    file_digests,
    official_result,
    result_meta,
    scorer_settings,
    write_result,
)
from harness.benchmarks.longbench.summary_rouge import SUMMARY_ROUGE_NAMES
from harness.benchmarks.longbench.tasks import LONGBENCH_E_TASKS, PUBLISHED
from harness.benchmarks.sample_score import SampleScore
from harness.benchmarks.scoring import ScoringPool, TaskScore, task_score
from harness.benchmarks.tasks import get_task
from harness.errors import UserError, exit_code
from harness.statistics.stats import MIN_CLUSTERS
from harness.statistics.text_table import format_interval, format_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return exit_code(_run, _parser().parse_args(arguments))


def score_rows(rows: Mapping[str, Sequence[PredictionRow]], edit_similarity: str) -> dict[str, list[SampleScore]]:
    """Score the rows of each task on all CPUs; the scores lie in the order of the rows.

    Raises:
        UserError: a row has a wrong value; the message starts with its file and line.
    """
    with ScoringPool(edit_similarity) as pool:
        for task, task_rows in rows.items():
            for row in task_rows:
                pool.submit(row.place, task, row.prediction, row.answers, row.all_classes)
        results = pool.results()
    return {task: [results[row.place] for row in task_rows] for task, task_rows in rows.items()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m harness.score", description="Score predictions as LongBench does.")
    parser.add_argument("folder", type=Path, help="folder of <task>.jsonl files (pred, answers, all_classes, length)")
    parser.add_argument(
        "--edit-similarity",
        choices=EDIT_SIMILARITIES,
        default=DEFAULT_EDIT_SIMILARITY,
        help="back end of the code tasks lcc and repobench-p (default: %(default)s)",
    )
    parser.add_argument("--longbench-e", action="store_true", help="score by length bucket: 0-4k, 4-8k, 8k+")
    parser.add_argument("--out", type=Path, help="result file (default: FOLDER/result.json)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing result file")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; compare with the result file to 0.01, exit 1 if it differs"
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    files = prediction_files(options.folder)
    if options.longbench_e:
        _check_longbench_e(files)
    rows = {task: read_prediction_file(path) for task, path in files.items()}
    num_rows = sum(map(len, rows.values()))
    print(f"{options.folder}: {len(rows)} tasks, {num_rows} rows, code tasks by {options.edit_similarity}\n")
    samples = score_rows(rows, options.edit_similarity)
    scores: TaskScores | BucketScores
    if options.longbench_e:
        scores = {task: bucket_scores(task, samples[task], _lengths(rows[task])) for task in rows}
        over = bucket_averages(scores)
    else:
        scores = {task: task_score(task, samples[task]) for task in rows}
        over = [line for line in averages(scores) if line.name in (OVERALL, ENGLISH)]
        over += language_averages(scores, {name: task.num_rows for name, task in PUBLISHED.items()})
    _print_report(dict(_labelled(scores)), over, options.edit_similarity)
    _warn_of_reasoning(rows)
    return _finish(options, scores, over, files)


def _finish(
    options: argparse.Namespace, scores: TaskScores | BucketScores, over: list[Average], files: Mapping[str, Path]
) -> int:
    """Compare with the result file, or write it."""
    path = options.out or options.folder / "result.json"
    result, digests = official_result(scores), file_digests(files)
    settings = scorer_settings(options.edit_similarity)
    if options.check:
        found = differences(path, result, digests, settings)
        print("\n".join(found) if found else f"equal to {path}")
        return 1 if found else 0
    write_result(path, result, result_meta(scores, over, digests, settings), options.overwrite)
    print(f"written: {path}")
    return 0


def _check_longbench_e(files: Mapping[str, Path]) -> None:
    others = [path.name for task, path in files.items() if task not in LONGBENCH_E_TASKS]
    if others:
        raise UserError(f"{', '.join(others)}: not in LongBench-E. Leave out --longbench-e, or move the file away.")


def _lengths(rows: Sequence[PredictionRow]) -> list[int]:
    for row in rows:
        if not isinstance(row.length, int):
            raise UserError(f"{row.place}: length={row.length!r} is not a whole number. LongBench-E needs it.")
    return [row.length for row in rows if row.length is not None]


def _labelled(scores: TaskScores | BucketScores) -> Iterator[tuple[str, TaskScore]]:
    for task, score in scores.items():
        if isinstance(score, TaskScore):
            yield task, score
        else:
            yield from ((f"{task} {bucket}", part) for bucket, part in score.items())


def _print_report(scores: Mapping[str, TaskScore], over: Sequence[Average], edit_similarity: str) -> None:
    print(
        format_table(
            ("task", "metric", "score (n/expected)", "95 % interval", "empty"),
            [
                (
                    label,
                    _metric_label(score.task, edit_similarity),
                    format_figure(score.score, score.n, score.expected),
                    format_interval(score.ci_low, score.ci_high),
                    str(score.num_empty),
                )
                for label, score in scores.items()
            ],
        )
    )
    print()
    print(
        format_table(
            ("mean of task scores", "tasks", "score (n/expected)", "95 % interval", ""),
            [
                (
                    line.name,
                    f"{line.num_tasks}/{line.expected_tasks}",
                    format_figure(line.score, line.n, line.expected),
                    format_interval(line.ci_low, line.ci_high),
                    "partial" if line.partial else "",
                )
                for line in over
            ],
        )
    )
    _print_summary_rouge(scores)
    _print_notes(scores)


def _print_summary_rouge(scores: Mapping[str, TaskScore]) -> None:
    summaries = {label: score for label, score in scores.items() if score.extra}
    if summaries:
        print("\nBeside LongBench's metric: rouge-score package, F value; English summaries only")
        rows = [
            (label, *(format_figure(score.extra[name], score.n, score.expected) for name in SUMMARY_ROUGE_NAMES))
            for label, score in summaries.items()
        ]
        print(format_table(("task", *SUMMARY_ROUGE_NAMES), rows))


def _print_notes(scores: Mapping[str, TaskScore]) -> None:
    print("\nIntervals: 95 %, bootstrap over rows; the averages' intervals draw each task on its own.")
    for label, score in scores.items():
        if score.n < score.expected:
            print(f"warning: {label} has {score.n} of {score.expected} rows: not the full task's score.")
        elif score.n > score.expected:
            print(f"warning: {label} has {score.n} rows, {score.expected} expected: rows twice, or of several runs.")
        if 0 < score.n < MIN_CLUSTERS:
            print(f"warning: {label} has fewer than {MIN_CLUSTERS} rows: no interval.")


def _warn_of_reasoning(rows: Mapping[str, Sequence[PredictionRow]]) -> None:
    for task, task_rows in rows.items():
        texts = [row.prediction for row in task_rows]
        if thinking := sum(map(has_reasoning, texts)):
            print(
                f"warning: {thinking} of {len(texts)} predictions of {task} hold a reasoning block (<think>), which is "
                f"scored as if it were the answer; {sum(map(is_cut_in_reasoning, texts))} were cut inside it."
            )


def _metric_label(task_name: str, edit_similarity: str) -> str:
    metric = get_task(task_name).metric
    return f"{metric} ({edit_similarity})" if metric == "code_sim" else metric


if __name__ == "__main__":
    sys.exit(main())
