"""LongBench's own averages, held against its leaderboard and against published scores of single tasks."""

import csv
from pathlib import Path

import pytest

from harness.benchmarks.longbench.own_averages import (
    LONGBENCH_CHINESE,
    LONGBENCH_ENGLISH,
    SHORT_NAMES,
    language_averages,
)
from harness.benchmarks.longbench.tasks import PUBLISHED
from harness.benchmarks.scoring import TaskScore
from harness.benchmarks.task import CATEGORIES

FILE = Path(__file__).resolve().parents[3] / "results" / "paper" / "published" / "longbench.csv"
EXPECTED = {name: task.num_rows for name, task in PUBLISHED.items()}


def rows(source: str) -> list[dict[str, str]]:
    with FILE.open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["source"] == source]


def averages_of(scores: dict[str, float]) -> dict[str, float]:
    found = {name: TaskScore(name, score, 200, 200, 0, None, None, {}) for name, score in scores.items()}
    return {one.name: one.score for one in language_averages(found, EXPECTED)}


def test_the_leaderboards_average_is_the_mean_of_its_six_categories():
    found = [row for row in rows("P1") if row["model"] == "Llama2-7B-chat-4k"][0]  # noqa: RUF015
    assert [float(found[name]) for name in CATEGORIES] == [24.9, 22.6, 24.7, 60.0, 5.9, 48.1]
    assert sum(float(found[name]) for name in CATEGORIES) / 6 == pytest.approx(31.0, abs=0.05)
    for row in rows("P1"):
        for average, ending in ((LONGBENCH_ENGLISH, ""), (LONGBENCH_CHINESE, ", Chinese")):
            mean = sum(float(row[f"{name}{ending}"]) for name in CATEGORIES) / 6
            assert float(row[average]) == pytest.approx(mean, abs=0.06), row["model"]


def test_published_task_scores_give_longbenchs_categories_without_chinese():
    (found,) = [row for row in rows("P2") if row["model"] == "llama2-7b-chat"]
    averages = averages_of({task: float(found[task]) for task in PUBLISHED})
    assert [round(averages[name], 1) for name in CATEGORIES] == [25.9, 22.7, 24.5, 63.1, 5.0, 55.4]
    assert round(averages[LONGBENCH_ENGLISH], 1) == 32.7
    assert averages["single-doc QA, Chinese"] == float(found["multifieldqa_zh"])
    assert averages["code, Chinese"] == averages["code"]


def test_a_language_without_one_of_its_categories_has_no_average():
    averages = averages_of({task: 50.0 for task in PUBLISHED if PUBLISHED[task].category != "code"})
    assert LONGBENCH_ENGLISH not in averages
    assert averages["few-shot"] == 50.0
    assert not any("Chinese" in name for name in averages_of(dict.fromkeys(SHORT_NAMES, 50.0)))


def test_the_papers_tasks_are_the_sixteen_that_are_not_chinese_in_longbenchs_order():
    assert list(SHORT_NAMES) == [name for name, task in PUBLISHED.items() if task.language != "zh"]
    for row in rows("P3"):
        printed = float(row["English and code tasks"])
        assert sum(float(row[task]) for task in SHORT_NAMES) / 16 == pytest.approx(printed, abs=0.07)
