"""ROUGE-1, ROUGE-2 and ROUGE-Lsum of the `rouge-score` package 0.1.2, reported beside LongBench's own ROUGE-L.

The words come from the package's tokenizer (no stemmer; only a-z and 0-9 make words, hence no use for Chinese). The
counting is done here because the package's scorer imports nltk, 3 s in every worker, and its table of the common
subsequence is slow; the tests hold the values equal to the package's.
"""

from collections import Counter
from collections.abc import Sequence

from rouge_score.tokenize import tokenize

from harness.benchmarks.longbench.rouge_l import lcs_positions

SUMMARY_ROUGE_NAMES = ("rouge1", "rouge2", "rougeLsum")


def summary_rouge(prediction: str, answers: Sequence[str]) -> dict[str, float]:
    """Return the best F value (0 to 1) over the answers, by the package's names; Lsum takes lines as sentences."""
    scores = [_against_one(prediction, answer) for answer in answers]
    return {name: max(score[name] for score in scores) for name in SUMMARY_ROUGE_NAMES}


def _against_one(prediction: str, answer: str) -> dict[str, float]:
    predicted, expected = tokenize(prediction, None), tokenize(answer, None)
    return {
        "rouge1": _ngram_f(predicted, expected, 1),
        "rouge2": _ngram_f(predicted, expected, 2),
        "rougeLsum": _summary_lcs_f(_lines(prediction), _lines(answer)),
    }


def _lines(text: str) -> list[list[str]]:
    return [tokenize(line, None) for line in text.split("\n") if line]


def _ngram_f(predicted: list[str], expected: list[str], size: int) -> float:
    counts = [Counter(zip(*(words[i:] for i in range(size)), strict=False)) for words in (predicted, expected)]
    return _f_value((counts[0] & counts[1]).total(), counts[0].total(), counts[1].total())


def _summary_lcs_f(predicted: list[list[str]], expected: list[list[str]]) -> float:
    """Return Lsum: the union of common subsequences per answer line; no word counts more often than predicted."""
    found: Counter[str] = Counter()
    for line in expected:
        union = {position for other in predicted for position in lcs_positions(other, line)}
        found.update(line[position] for position in union)
    available = Counter(word for line in predicted for word in line)
    return _f_value((found & available).total(), available.total(), sum(map(len, expected)))


def _f_value(overlap: int, num_predicted: int, num_expected: int) -> float:
    if not overlap:
        return 0.0
    precision, recall = overlap / num_predicted, overlap / num_expected
    return 2 * precision * recall / (precision + recall)
