import pytest

from harness.benchmarks.longbench.tasks import LONGBENCH_E_TASKS, PAPER_TASKS, PUBLISHED
from harness.benchmarks.task import CATEGORIES
from harness.benchmarks.tasks import get_task
from harness.errors import UserError


def names(condition):
    return [task.name for task in PUBLISHED.values() if condition(task)]


def test_the_benchmark_has_21_tasks_with_4750_rows_in_six_categories():
    assert len(PUBLISHED) == 21
    assert sum(task.num_rows for task in PUBLISHED.values()) == 4750
    assert tuple(dict.fromkeys(task.category for task in PUBLISHED.values())) == CATEGORIES


def test_longbench_e_has_13_tasks_with_3668_rows():
    assert len(LONGBENCH_E_TASKS) == 13
    assert sum(task.num_rows_e for task in PUBLISHED.values()) == 3668
    assert set(PAPER_TASKS) < set(LONGBENCH_E_TASKS)


def test_few_shot_and_code_tasks_get_no_chat_template():
    assert names(lambda task: not task.chat_template) == ["trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"]


def test_only_four_tasks_are_scored_by_their_first_line():
    assert names(lambda task: task.first_line_only) == ["trec", "triviaqa", "samsum", "lsht"]


def test_answers_have_the_official_length():
    assert {n: names(lambda task, n=n: task.max_new_tokens == n) for n in (32, 64, 128, 512)} == {
        32: [
            "hotpotqa",
            "2wikimqa",
            "musique",
            "triviaqa",
            "passage_count",
            "passage_retrieval_en",
            "passage_retrieval_zh",
        ],
        64: ["multifieldqa_en", "multifieldqa_zh", "trec", "lsht", "lcc", "repobench-p"],
        128: ["narrativeqa", "qasper", "dureader", "samsum"],
        512: ["gov_report", "qmsum", "multi_news", "vcsum"],
    }


def test_a_misspelt_task_is_refused_with_the_nearest_names():
    with pytest.raises(UserError, match=r"task 'hotpot_qa' is unknown\. Did you mean hotpotqa"):
        get_task("hotpot_qa")


def test_an_unknown_task_is_refused_with_all_names():
    with pytest.raises(UserError, match=r"narrativeqa, qasper.*repobench-p"):
        get_task("zzz")
