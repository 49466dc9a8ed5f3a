"""Averages as LongBench and the papers on KV-cache eviction print them.

LongBench (README, tables of the leaderboard) averages tasks into six categories, English and Chinese apart, and these
six means into one figure; its two code tasks count in both languages. The papers on eviction (H2O, SnapKV, PyramidKV)
print the 16 tasks that are not Chinese, in LongBench's order, and the mean of the 16.
"""

from collections.abc import Mapping

from harness.benchmarks.longbench.aggregates import Average, average
from harness.benchmarks.longbench.tasks import PUBLISHED
from harness.benchmarks.scoring import TaskScore
from harness.benchmarks.task import CATEGORIES
from harness.statistics.stats import average_draws, interval

LONGBENCH_ENGLISH = "LongBench English"
LONGBENCH_CHINESE = "LongBench Chinese"
LANGUAGES = {LONGBENCH_ENGLISH: "", LONGBENCH_CHINESE: ", Chinese"}
"""Name of the mean of six category means, and what the names of its categories end with."""

SHORT_NAMES = {
    "narrativeqa": "NrtvQA",
    "qasper": "Qasper",
    "multifieldqa_en": "MF-en",
    "hotpotqa": "HotpotQA",
    "2wikimqa": "2WikiMQA",
    "musique": "Musique",
    "gov_report": "GovReport",
    "qmsum": "QMSum",
    "multi_news": "MultiNews",
    "trec": "TREC",
    "triviaqa": "TriviaQA",
    "samsum": "SAMSum",
    "passage_count": "PCount",
    "passage_retrieval_en": "PRe",
    "lcc": "Lcc",
    "repobench-p": "RB-P",
}
"""The papers' 16 tasks in their order, with the names in the heads of their tables."""


def language_averages(scores: Mapping[str, TaskScore], expected: Mapping[str, int]) -> list[Average]:
    """Return, for English and for Chinese, the means of the categories and the mean of these means.

    The last is left out of a language where a category has no score: it would not be LongBench's figure. So are the
    categories of Chinese where no Chinese task has a score: code alone says nothing of it.

    Args:
        scores: by task.
        expected: rows of the tasks that the averages should be over.
    """
    found: list[Average] = []
    for name, ending in LANGUAGES.items():
        left_out = "en" if ending else "zh"
        of_language = {task: rows for task, rows in expected.items() if PUBLISHED[task].language != left_out}
        if ending and not any(PUBLISHED[task].language == "zh" for task in scores if task in of_language):
            continue
        categories = {
            f"{category}{ending}": {task: rows for task, rows in of_language.items() if category_of(task) == category}
            for category in CATEGORIES
        }
        means = [average(category, scores, tasks) for category, tasks in categories.items()]
        if all(mean.score is not None for mean in means):
            found.append(_mean_of_means(name, means, scores, list(categories.values())))
        found += [mean for mean in means if mean.score is not None]
    return found


def category_of(task: str) -> str:
    """Return the category of one of LongBench's tasks."""
    return PUBLISHED[task].category


def _mean_of_means(
    name: str, means: list[Average], scores: Mapping[str, TaskScore], tasks: list[Mapping[str, int]]
) -> Average:
    by_category = [[scores[task] for task in names if task in scores] for names in tasks]
    values = [[score.score for score in found if score.score is not None] for found in by_category]
    low, high = interval(average_draws([average_draws([s.draws for s in found]) for found in by_category])) or (
        None,
        None,
    )
    return Average(
        name=name,
        score=round(sum(sum(found) / len(found) for found in values) / len(values), 2),
        num_tasks=sum(mean.num_tasks for mean in means),
        expected_tasks=sum(mean.expected_tasks for mean in means),
        n=sum(mean.n for mean in means),
        expected=sum(mean.expected for mean in means),
        ci_low=None if low is None else round(low, 2),
        ci_high=None if high is None else round(high, 2),
        partial=any(mean.partial for mean in means),
    )
