"""ROUGE-L exactly as the `rouge` package 1.0.1 gives it, without its recursion.

The package reads the longest common subsequence out of its table by a recursive function, so a long row raises
RecursionError, or not, depending on how deep the caller's stack is; LongBench's scorer turned that into a silent 0
(pltrdy/rouge#19, #67). Here the table is one row of bits per word (Hyyro 2004, "Bit-parallel LCS-length computation
revisited") and is read by a loop: the same words come out at any depth, about a hundred times faster.
"""

from collections.abc import Sequence

from harness.benchmarks.longbench.text import cut_chinese


def rouge_l(prediction: str, answer: str) -> float:
    """Return the F value (0 to 1) of the package's summary-level ROUGE-L.

    The package counts distinct words: of the union of the common subsequences of all pairs of sentences, of the
    prediction, and of the answer. A text without a sentence scores 0, as LongBench does when the package refuses it.
    """
    predicted, expected = split_sentences(prediction), split_sentences(answer)
    if not predicted or not expected:
        return 0.0
    common = _common_words(expected, predicted)
    precision = len(common) / len(set().union(*predicted))
    recall = len(common) / len(set().union(*expected))
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def rouge_l_chinese(prediction: str, answer: str) -> float:
    """Return `rouge_l` over jieba's words; the ideographic full stop ends no sentence, so a text is mostly one."""
    return rouge_l(" ".join(cut_chinese(prediction)), " ".join(cut_chinese(answer)))


def split_sentences(text: str) -> list[list[str]]:
    """Return the words of each sentence as the package splits them.

    Every "." ends a sentence, also in numbers; what lies between two is a sentence unless it has no character at all,
    and one of white space alone holds a single empty word.
    """
    return [piece.split() or [""] for piece in text.split(".") if piece]


def lcs_positions(x: Sequence[str], y: Sequence[str]) -> list[int]:
    """Return the positions in `y`, from last to first, of one longest common subsequence of `x` and `y`.

    Of several longest ones it is that of the walk from the ends which takes an equal pair wherever it stands on one,
    and otherwise drops the last of `x` only if dropping the last of `y` would shorten the subsequence. `rouge` walks
    so with the answer as `x`, `rouge-score` with the prediction as `x`.
    """
    places: dict[str, int] = {}
    for position, word in enumerate(y):
        places[word] = places.get(word, 0) | 1 << position
    all_bits = (1 << len(y)) - 1
    # A zero at bit j of `flat`: the subsequence of x so far and y[:j + 1] is longer than with y[:j].
    flat = all_bits
    rows = []
    for word in x:
        matches = places.get(word, 0)
        hits = flat & matches
        flat = ((flat + hits) | (flat - hits)) & all_bits
        rows.append((matches, matches | (flat ^ all_bits)))
    positions = []
    width = len(y)
    for matches, stops in reversed(rows):
        width = (stops & ((1 << width) - 1)).bit_length()
        if not width:
            break
        if matches >> (width - 1) & 1:
            width -= 1
            positions.append(width)
    return positions


def _common_words(expected: list[list[str]], predicted: list[list[str]]) -> set[str]:
    """Return the distinct words in the common subsequences of all pairs of sentences."""
    common: set[str] = set()
    predicted_sets = [set(sentence) for sentence in predicted]
    for expected_sentence in expected:
        expected_set = set(expected_sentence)
        for sentence, words in zip(predicted, predicted_sets, strict=True):
            if not common.issuperset(expected_set & words):
                common.update(sentence[position] for position in lcs_positions(expected_sentence, sentence))
    return common
