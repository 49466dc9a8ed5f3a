"""LongBench's official metrics, quirks included, and the score of one sample.

Source: THUDM/LongBench at 2e00731f (metrics.py, eval.py), as behaviour. Every metric takes the prediction and one
answer and returns 0 to 1; a sample's score is the best over its answers.

Another metric is a function like these and a row of `METRICS`; tasks choose it by its name there.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from harness.benchmarks.longbench.edit_similarity import DEFAULT_EDIT_SIMILARITY, edit_percent
from harness.benchmarks.longbench.rouge_l import rouge_l, rouge_l_chinese
from harness.benchmarks.longbench.summary_rouge import summary_rouge
from harness.benchmarks.longbench.tasks import Task, get_task
from harness.benchmarks.longbench.text import chinese_words, english_words, is_blank
from harness.errors import UserError

_NUMBER = re.compile(r"\d+")
_PARAGRAPH = re.compile(r"Paragraph (\d+)")
_PARAGRAPH_CHINESE = re.compile(r"段落(\d+)")
_NOT_CODE = ("`", "#", "//")


@dataclass(frozen=True)
class SampleScore:
    """Score of one sample.

    Attributes:
        score: LongBench's metric, 0 to 1.
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
    """Score one prediction as LongBench does.

    Args:
        task_name: one of `harness.benchmarks.longbench.tasks.TASKS`.
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
    return SampleScore(
        score=max(metric(prediction, answer) for answer in answers),
        empty=is_blank(prediction),
        extra=summary_rouge(prediction, answers) if task.metric == "rouge" else {},
    )


def check_metric(task: Task) -> None:
    """Raise UserError if there is no metric of the name that the task gives."""
    if task.metric not in METRICS:
        raise UserError(f"metric {task.metric!r} of task {task.name} is unknown. Use one of {', '.join(METRICS)}.")


def qa_f1(prediction: str, answer: str) -> float:
    """Return SQuAD's F1 over English words; 0 if either text normalises to nothing."""
    return _word_f1(english_words(prediction), english_words(answer))


def qa_f1_chinese(prediction: str, answer: str) -> float:
    """Return F1 over jieba's words without punctuation; 0 if either text normalises to nothing."""
    return _word_f1(chinese_words(prediction), chinese_words(answer))


def classification(prediction: str, answer: str, all_classes: Sequence[str]) -> float:
    """Return 1 / (number of class names found in the prediction) if the answer is among them, else 0.

    A found name that is a proper part of the answer is dropped first, but the name found right after a dropped one is
    never looked at: the official code removes from the list that it walks over.
    """
    kept: list[str] = []
    skip = False
    for name in (name for name in all_classes if name in prediction):
        drop = not skip and name in answer and name != answer
        if not drop:
            kept.append(name)
        skip = drop
    return 1.0 / len(kept) if answer in kept else 0.0


def count(prediction: str, answer: str) -> float:
    """Return the share of the numbers in the prediction that equal the answer; 0 without a number."""
    numbers = _NUMBER.findall(prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """Return the share of the numbers in the prediction that equal the one of "Paragraph N" in the answer."""
    return count(prediction, _paragraph_number(_PARAGRAPH, answer))


def retrieval_chinese(prediction: str, answer: str) -> float:
    """Return the share of the numbers in the prediction that equal the one after the Chinese "paragraph"."""
    return count(prediction, _paragraph_number(_PARAGRAPH_CHINESE, answer))


def code_similarity(prediction: str, answer: str, edit_similarity: str) -> float:
    """Return the edit similarity, in whole percents, of the answer and the first line taken for code.

    That is the first line, after leading newlines, without a backtick, "#" or "//"; leading spaces count.
    """
    lines = prediction.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in _NOT_CODE)), "")
    return edit_percent(code, answer, edit_similarity) / 100


METRICS: dict[str, Callable[..., float]] = {
    "qa_f1": qa_f1,
    "qa_f1_zh": qa_f1_chinese,
    "rouge": rouge_l,
    "rouge_zh": rouge_l_chinese,
    "classification": classification,
    "count": count,
    "retrieval": retrieval,
    "retrieval_zh": retrieval_chinese,
    "code_sim": code_similarity,
}


def _metric_function(metric: str, all_classes: list[str] | None, edit_similarity: str) -> Callable[[str, str], float]:
    if metric == "classification":
        return partial(METRICS[metric], all_classes=all_classes or ())
    if metric == "code_sim":
        return partial(METRICS[metric], edit_similarity=edit_similarity)
    return METRICS[metric]


def _word_f1(predicted: list[str], expected: list[str]) -> float:
    num_same = (Counter(predicted) & Counter(expected)).total()
    if not num_same:
        return 0.0
    precision, recall = num_same / len(predicted), num_same / len(expected)
    return 2 * precision * recall / (precision + recall)


def _paragraph_number(pattern: re.Pattern[str], answer: str) -> str:
    found = pattern.search(answer)
    if not found:
        raise UserError(f"answer {answer!r} names no paragraph ({pattern.pattern}). Give the row's own answers.")
    return found[1]


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
