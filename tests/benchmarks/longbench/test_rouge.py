"""ROUGE: equality with the packages, at any depth of the stack."""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rouge import Rouge
from rouge_score.rouge_scorer import RougeScorer

from harness.benchmarks.longbench.official_files import read_prediction_file
from harness.benchmarks.longbench.rouge_l import rouge_l, rouge_l_chinese
from harness.benchmarks.longbench.summary_rouge import SUMMARY_ROUGE_NAMES, summary_rouge
from harness.benchmarks.longbench.tasks import PUBLISHED
from harness.benchmarks.longbench.text import cut_chinese
from harness.benchmarks.sample_score import score_sample
from tests.benchmarks.longbench.published import published_set
from tests.benchmarks.longbench.samples import TEXT, example_sample

LONG_SENTENCE = " ".join(f"word{i % 90}" for i in range(1000))


@pytest.fixture(scope="module")
def library_rouge_l() -> Iterator[Callable[[str, str], float]]:
    """F of the `rouge` package, called where its recursion has all the room it wants; ValueError for empty texts."""
    limit, stack = sys.getrecursionlimit(), threading.stack_size(256 * 1024 * 1024)
    sys.setrecursionlimit(100_000)
    with ThreadPoolExecutor(1) as thread:
        yield lambda prediction, answer: thread.submit(_library_f, prediction, answer).result()
    sys.setrecursionlimit(limit)
    threading.stack_size(stack)


def _library_f(prediction: str, answer: str) -> float:
    return Rouge(["rouge-l"]).get_scores([prediction], [answer], avg=True)["rouge-l"]["f"]


def _deep(frames: int, function: Callable[[], float]) -> float:
    return function() if frames == 0 else _deep(frames - 1, function)


class TestRougeL:
    @given(prediction=TEXT, answer=TEXT)
    def test_equals_the_library_to_the_last_digit(self, library_rouge_l, prediction, answer):
        try:
            expected = library_rouge_l(prediction, answer)
        except ValueError:
            assert not prediction.strip(".") or not answer.strip(".")
            expected = 0.0
        assert rouge_l(prediction, answer) == expected

    @pytest.mark.parametrize(
        ("prediction", "answer"),
        [("cat sat. mat", "mat sat cat. sat mat"), ("a b. . c", "c. b a. "), ("1.5 percent", "1.7 percent")],
    )
    def test_sentences_end_at_every_full_stop(self, library_rouge_l, prediction, answer):
        assert rouge_l(prediction, answer) == library_rouge_l(prediction, answer) > 0

    def test_chinese_equals_the_library_over_jiebas_words(self, library_rouge_l):
        prediction, answer = "会议讨论了明年的预算。预算通过了。", "明年的预算在会议上通过了。"
        words = [" ".join(cut_chinese(text)) for text in (prediction, answer)]
        assert rouge_l_chinese(prediction, answer) == library_rouge_l(*words) > 0

    def test_a2_a_row_on_which_the_library_runs_out_of_stack_gets_its_score(self, library_rouge_l):
        deep_score = library_rouge_l(LONG_SENTENCE, LONG_SENTENCE)
        assert rouge_l(LONG_SENTENCE, LONG_SENTENCE) == deep_score == pytest.approx(1)
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(1000)
        try:
            assert _deep(400, lambda: rouge_l(LONG_SENTENCE, LONG_SENTENCE)) == deep_score
            with pytest.raises(RecursionError):
                _library_f(LONG_SENTENCE, LONG_SENTENCE)
        finally:
            sys.setrecursionlimit(limit)

    def test_e6_vcsum_has_the_published_score_400_frames_deep(self):
        rows = read_prediction_file(published_set("qwen3-8b-ctx3500") / "vcsum.jsonl")

        def mean() -> float:
            scores = [score_sample("vcsum", row.prediction, row.answers, row.all_classes).score for row in rows]
            return round(100 * sum(scores) / len(scores), 2)

        assert mean() == _deep(400, mean) == 10.47

    @pytest.mark.parametrize("prediction", ["", ".", "   ", ". . ."])
    def test_a3_empty_predictions_score_zero_and_are_counted(self, prediction):
        scored = score_sample("qmsum", prediction, ["The group agreed."], None)
        assert (scored.score, scored.empty) == (0.0, True)

    def test_only_predictions_without_content_are_empty(self):
        assert not score_sample("qmsum", "no", ["The group agreed."], None).empty
        assert not score_sample("lcc", "}", ["x = 1"], None).empty
        assert score_sample("triviaqa", "\n \nParis", ["Paris"], None).empty


class TestSummaryRouge:
    @example(prediction="a\na c", answers=["a c a"])
    @given(prediction=TEXT, answers=st.lists(TEXT, min_size=1, max_size=2))
    def test_equals_the_rouge_score_package(self, prediction, answers):
        package = RougeScorer(list(SUMMARY_ROUGE_NAMES)).score_multi(answers, prediction)
        assert summary_rouge(prediction, answers) == {name: score.fmeasure for name, score in package.items()}

    def test_only_english_summaries_have_it(self):
        with_extra = {name for name, task in PUBLISHED.items() if score_sample(name, "1", *example_sample(task)).extra}
        assert with_extra == {"gov_report", "qmsum", "multi_news", "samsum"}
