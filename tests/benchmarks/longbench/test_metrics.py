"""LongBench's metrics but ROUGE: hand-made cases, the quirks, and equality with the package behind the code score."""

import subprocess
import sys
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.benchmarks.longbench.edit_similarity import edit_percent
from harness.benchmarks.longbench.metrics import classification, count, qa_f1, qa_f1_chinese, retrieval
from harness.benchmarks.longbench.official_files import read_prediction_file
from harness.benchmarks.longbench.tasks import PUBLISHED
from harness.benchmarks.longbench.text import cut_chinese, english_words
from harness.benchmarks.sample_score import score_sample
from harness.errors import UserError
from tests.benchmarks.longbench.published import published_set
from tests.benchmarks.longbench.samples import TEXT, example_sample

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Using slow pure-python SequenceMatcher")
    from fuzzywuzzy import fuzz

LETTERS = st.text(alphabet="ab c#é", max_size=12)


class TestQaF1:
    @pytest.mark.parametrize(
        ("prediction", "answer", "score"),
        [
            ("The cat, sat!", "a cat sat", 1.0),
            ("cat dog", "cat", 2 / 3),
            ("cat cat", "cat", 2 / 3),
            ("dog", "cat", 0.0),
        ],
    )
    def test_words_are_compared_without_case_articles_and_punctuation(self, prediction, answer, score):
        assert qa_f1(prediction, answer) == pytest.approx(score)

    @pytest.mark.parametrize(("prediction", "answer"), [("", "the"), ("the", "the"), ("a", "A"), ("!", "!")])
    def test_a10_texts_that_normalise_to_nothing_score_zero(self, prediction, answer):
        assert qa_f1(prediction, answer) == 0

    @given(TEXT, TEXT)
    def test_f1_is_symmetric_and_between_zero_and_one(self, first, second):
        assert qa_f1(first, second) == qa_f1(second, first)
        assert 0 <= qa_f1(first, second) <= 1
        assert qa_f1(first, first) == bool(english_words(first))

    def test_chinese_words_come_from_jieba_without_punctuation(self):
        assert cut_chinese("我爱北京天安门") == ("我", "爱", "北京", "天安门")
        assert qa_f1_chinese("「北京」，天安门。", "北京天安门") == 1
        assert qa_f1_chinese("北京", "北京天安门") == pytest.approx(2 / 3)

    def test_chinese_punctuation_missing_from_the_official_list_stays_a_word(self):
        assert qa_f1_chinese("北京》", "北京") == 1
        assert qa_f1_chinese("《北京", "北京") == pytest.approx(2 / 3)


class TestCodeSimilarity:
    @pytest.mark.parametrize(
        ("prediction", "score"),
        [
            ("x = 1  # set", 0.0),
            ("```python\nx = 1\n```", 1.0),
            ("var x = 1; // set", 0.0),
            ("    x = 1", 0.71),
            ("\n\nx = 1\ny = 2", 1.0),
        ],
    )
    def test_a9_the_first_line_without_comment_or_fence_is_scored(self, prediction, score):
        assert score_sample("lcc", prediction, ["x = 1"], None).score == score

    @given(LETTERS, LETTERS)
    def test_difflib_equals_fuzzywuzzy(self, first, second):
        if fuzz.SequenceMatcher.__module__ != "difflib":
            pytest.skip("fuzzywuzzy runs on python-Levenshtein here")
        assert edit_percent(first, second, "difflib") == fuzz.ratio(first, second)

    def test_difflib_equals_fuzzywuzzy_on_long_lines_with_popular_letters(self):
        first, second = "self.assertEqual(value, 1); " * 12, "self.assertTrue(values[1]); " * 12
        assert edit_percent(first, second, "difflib") == fuzz.ratio(first, second)
        assert edit_percent(first, second, "difflib") != edit_percent(first, second, "levenshtein")

    @given(LETTERS, LETTERS)
    def test_levenshtein_is_twice_the_common_subsequence_over_the_lengths(self, first, second):
        expected = 100
        if first != second:
            total = len(first) + len(second)
            expected = round(200 * _lcs_length(first, second) / total) if first and second else 0
        assert edit_percent(first, second, "levenshtein") == expected

    def test_a1_the_score_does_not_depend_on_an_installed_levenshtein(self, tmp_path):
        (tmp_path / "Levenshtein.py").write_text("def ratio(first, second):\n    return 0.0\n")
        program = (
            "import Levenshtein; from harness.benchmarks.sample_score import score_sample;"
            "print(score_sample('lcc', 'x = 12', ['y = 1'], None).score)"
        )
        path = [str(tmp_path), *filter(None, sys.path), "."]
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {program}"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert float(done.stdout) == score_sample("lcc", "x = 12", ["y = 1"], None).score > 0

    @pytest.mark.parametrize(
        ("name", "task", "difflib", "levenshtein"),
        [
            ("llama3-8b-instruct", "repobench-p", 54.44, 56.84),
            ("rwkv-6-7b", "repobench-p", 52.78, 54.10),
            ("rwkv-6-7b", "lcc", 72.51, 73.84),
        ],
    )
    def test_a1_both_back_ends_give_their_published_scores(self, name, task, difflib, levenshtein):
        rows = read_prediction_file(published_set(name) / f"{task}.jsonl")
        for back_end, published in (("difflib", difflib), ("levenshtein", levenshtein)):
            total = sum(score_sample(task, row.prediction, row.answers, None, back_end).score for row in rows)
            assert round(100 * total / len(rows), 2) == published

    def test_an_unknown_back_end_is_refused(self):
        with pytest.raises(UserError, match=r"edit_similarity='jaro'.*difflib or levenshtein"):
            score_sample("lcc", "x", ["y"], None, "jaro")


class TestClassification:
    CLASSES = ("Other entity", "Other location", "City")

    @pytest.mark.parametrize(
        ("prediction", "score"),
        [
            ("Other entity", 1.0),
            ("Other location or Other entity", 0.5),
            ("Capacity: Other entity", 1.0),
            ("CityOther entity", 0.5),
            ("other entity", 0.0),
        ],
    )
    def test_a7_class_names_are_substrings_and_share_the_credit(self, prediction, score):
        assert classification(prediction, "Other entity", self.CLASSES) == score

    def test_the_class_after_a_dropped_one_is_never_dropped(self):
        assert classification("ABC", "ABC", ["A", "AB", "ABC"]) == 0.5
        assert classification("ABC", "ABC", ["A", "ABC", "AB"]) == 1

    @given(st.lists(st.text("AB", min_size=1, max_size=3), unique=True), st.text("AB", max_size=5), st.data())
    def test_equals_removal_from_the_list_that_is_walked_over(self, names, prediction, data):
        answer = data.draw(st.sampled_from(names) if names else st.just("A"))
        matches = [name for name in names if name in prediction]
        for name in matches:
            if name in answer and name != answer:
                matches.remove(name)
        expected = 1 / len(matches) if answer in matches else 0
        assert classification(prediction, answer, names) == expected

    def test_a14_every_row_is_scored_with_its_own_classes(self):
        assert score_sample("trec", "City Date", ["City"], ["City"]).score == 1
        assert score_sample("trec", "City Date", ["City"], ["City", "Date"]).score == 0.5


class TestNumbers:
    def test_a8_all_numbers_of_the_text_share_the_credit(self):
        assert retrieval("Paragraph 1, 2 or 12", "Paragraph 12") == pytest.approx(1 / 3)
        assert retrieval("I cannot tell", "Paragraph 12") == 0
        assert retrieval("Is it 3? No, it is 12, so: Paragraph 12", "Paragraph 12") == pytest.approx(2 / 3)
        assert count("There are 7, I counted 7 of 30", "7") == pytest.approx(2 / 3)
        assert count("seven", "7") == 0

    def test_b9_llama2_passage_retrieval_zh_is_10_12(self):
        rows = read_prediction_file(published_set("llama2-7b-chat-4k") / "passage_retrieval_zh.jsonl")
        scores = [score_sample("passage_retrieval_zh", row.prediction, row.answers, None).score for row in rows]
        assert round(100 * sum(scores) / len(scores), 2) == 10.12

    def test_an_answer_without_a_paragraph_is_refused(self):
        with pytest.raises(UserError, match="'12' names no paragraph"):
            score_sample("passage_retrieval_en", "12", ["12"], None)


class TestScoreSample:
    def test_the_best_answer_counts(self):
        assert score_sample("qasper", "Yes", ["Unanswerable", "Yes"], None).score == 1

    def test_a4_only_the_four_few_shot_tasks_are_cut_to_the_first_line(self):
        cut = set()
        for name, task in PUBLISHED.items():
            answers, classes = example_sample(task)
            whole = score_sample(name, f"\nnothing 0\n{answers[0]}", answers, classes).score
            if task.metric != "code_sim" and whole == score_sample(name, "nothing 0", answers, classes).score:
                cut.add(name)
        assert cut == {"trec", "triviaqa", "samsum", "lsht"}

    @pytest.mark.parametrize("answers", ["gold", None, [], ["gold", 1], ("gold",)])
    def test_a11_answers_that_are_no_list_of_texts_are_refused(self, answers):
        with pytest.raises(UserError, match=r"gov_report: answers=.* is not a list of texts"):
            score_sample("gov_report", "text", answers, None)

    def test_a11_classes_are_needed_for_trec_and_refused_for_qasper(self):
        with pytest.raises(UserError, match="trec: all_classes=None"):
            score_sample("trec", "City", ["City"], None)
        with pytest.raises(UserError, match="qasper: all_classes has"):
            score_sample("qasper", "City", ["City"], ["City"])

    def test_a17_a_failed_request_is_not_dropped_silently(self):
        with pytest.raises(UserError, match="qasper: prediction=None is not text"):
            score_sample("qasper", None, ["Yes"], None)

    def test_a20_every_task_names_its_metric(self):
        assert all(0 <= score_sample(name, "1", *example_sample(task)).score <= 1 for name, task in PUBLISHED.items())


def _lcs_length(first: str, second: str) -> int:
    row = [0] * (len(second) + 1)
    for letter in first:
        above = row[:]
        for j, other in enumerate(second, start=1):
            row[j] = above[j - 1] + 1 if letter == other else max(above[j], row[j - 1])
    return row[-1]
