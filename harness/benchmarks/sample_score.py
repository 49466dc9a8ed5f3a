"""The score of one sample, by the metric of its task."""

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

from harness.benchmarks.longbench.edit_similarity import DEFAULT_EDIT_SIMILARITY
from harness.benchmarks.longbench.metrics import METRICS as LONGBENCH_METRICS
from harness.benchmarks.longbench.summary_rouge import summary_rouge
from harness.benchmarks.longbench.text import is_blank
from harness.benchmarks.ruler.metrics import holds
from harness.benchmarks.task import Task
from harness.benchmarks.tasks import get_task
from harness.errors import UserError

ALL_ANSWERS = "string_match_all"
_RULER_METRICS = {ALL_ANSWERS: holds, "string_match_part": holds}
METRICS: Mapping[str, Callable[..., float]] = ChainMap(_RULER_METRICS, LONGBENCH_METRICS)  # LongBench's first


@dataclass(frozen=True)
class SampleScore:
    """Score of one sample.

    Attributes:
        score: the task's metric, 0 to 1.
        empty: whether what is scored holds nothing but white space and full stops.
        extra: other measures of the same prediction by name, 0 to 1: the `rouge-score` package's values for English
            summaries, else none.
    """

    score: float
    empty: bool
    extra: dict[str, float] = field(default_factory=dict)


def score_sample(
    task_name: str,
    prediction: str,
    answers: list[str],
    all_classes: list[str] | None,
    edit_similarity: str = DEFAULT_EDIT_SIMILARITY,
) -> SampleScore:
    """Score one prediction as its benchmark does: by the best answer, or with ALL_ANSWERS by the mean over them.

    Args:
        task_name: one of `harness.benchmarks.tasks.TASKS`.
        prediction: the whole generated text; it is cut to its first line here, where the task asks for it.
        answers: the accepted answers.
        all_classes: the row's class names where the metric is "classification" (trec, lsht), else None (or empty).
        edit_similarity: back end of the code tasks, "difflib" or "levenshtein".

    Raises:
        UserError: unknown task, metric or back end, or a value of the wrong type or of another task.
    """
    task = get_task(task_name)
    check_metric(task)
    _check_sample(task_name, task.metric, prediction, answers, all_classes)
    if task.first_line_only:
        prediction = prediction.lstrip("\n").split("\n")[0]
    metric = _metric_function(task.metric, all_classes, edit_similarity)
    combine = fmean if task.metric == ALL_ANSWERS else max
    return SampleScore(
        score=combine(metric(prediction, answer) for answer in answers),
        empty=is_blank(prediction),
        extra=summary_rouge(prediction, answers) if task.metric == "rouge" else {},
    )


def check_metric(task: Task) -> None:
    """Raise UserError if there is no metric of the name that the task gives."""
    if task.metric not in METRICS:
        raise UserError(f"metric {task.metric!r} of task {task.name} is unknown. Use one of {', '.join(METRICS)}.")


def _metric_function(metric: str, all_classes: list[str] | None, edit_similarity: str) -> Callable[[str, str], float]:
    if metric == "classification":
        return partial(METRICS[metric], all_classes=all_classes or ())
    if metric == "code_sim":
        return partial(METRICS[metric], edit_similarity=edit_similarity)
    return METRICS[metric]


def _check_sample(task_name: str, metric: str, prediction: object, answers: object, all_classes: object) -> None:
    """Raise UserError unless the values have the types that the task's rows have."""
    if not isinstance(prediction, str):
        raise UserError(
            f"{task_name}: prediction={prediction!r} is not text. Write '' for a failed request; it counts as empty."
        )
    if not _is_list_of_text(answers):
        raise UserError(f"{task_name}: answers={answers!r} is not a list of texts. Put a single answer in a list.")
    if metric == "classification" and not _is_list_of_text(all_classes):
        raise UserError(
            f"{task_name}: all_classes={all_classes!r} is not a list of class names. Take it from the row itself."
        )
    if metric != "classification" and all_classes:
        raise UserError(
            f"{task_name}: all_classes has {all_classes!r}, but only metric=classification has classes (trec, lsht). "
            "Is this a row of another task?"
        )


def _is_list_of_text(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)
