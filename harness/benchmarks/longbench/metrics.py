"""LongBench's official metrics, quirks included.

Source: THUDM/LongBench at 2e00731f (metrics.py, eval.py), as behaviour. Every metric takes the prediction and one
answer and returns 0 to 1; a sample's score is the best over its answers.

Another metric is a function like these and a row of `METRICS`; tasks choose it by its name there.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence

from harness.benchmarks.longbench.edit_similarity import edit_percent
from harness.benchmarks.longbench.rouge_l import rouge_l, rouge_l_chinese
from harness.benchmarks.longbench.text import chinese_words, english_words
from harness.errors import UserError

_NUMBER = re.compile(r"\d+")
_PARAGRAPH = re.compile(r"Paragraph (\d+)")
_PARAGRAPH_CHINESE = re.compile(r"段落(\d+)")
_NOT_CODE = ("`", "#", "//")


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
