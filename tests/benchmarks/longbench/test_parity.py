"""Published predictions give their published scores: 96 task scores of five sets, all within 0.01.

Run with `make parity`, or `python -m pytest -m parity -s` for the table alone.
"""

import json

import pytest

from harness.benchmarks.longbench.aggregates import bucket_scores
from harness.benchmarks.longbench.official_files import prediction_files, read_prediction_file
from harness.benchmarks.longbench.result_file import official_result
from harness.benchmarks.scoring import task_score
from harness.score import score_rows
from harness.statistics.text_table import format_table
from tests.benchmarks.longbench.published import EDIT_SIMILARITY, published_set

TOLERANCE = 0.01
NUM_TASKS = {
    "llama3-8b-instruct": 21,
    "llama2-7b-chat-4k": 21,
    "qwen3-8b-ctx3500": 21,
    "rwkv-6-7b": 20,
    "e_llama2-7b-chat-4k": 13,
}


def _score_set(name, edit_similarity):
    """Our result and the published one, in the official shape."""
    folder = published_set(name)
    rows = {task: read_prediction_file(path) for task, path in prediction_files(folder).items()}
    samples = score_rows(rows, edit_similarity)
    if name.startswith("e_"):
        scores = {task: bucket_scores(task, samples[task], [row.length for row in rows[task]]) for task in rows}
    else:
        scores = {task: task_score(task, samples[task]) for task in rows}
    return official_result(scores), json.loads((folder / "result.json").read_text(encoding="utf-8"))


def _largest_differences(ours, published):
    """Task -> largest difference over its figures; the same tasks and buckets must be on both sides."""
    assert ours.keys() == published.keys()
    differences = {}
    for task, score in ours.items():
        parts = (score, published[task]) if isinstance(score, dict) else ({"": score}, {"": published[task]})
        assert parts[0].keys() == parts[1].keys()
        differences[task] = max(abs(parts[0][bucket] - parts[1][bucket]) for bucket in parts[0])
    return differences


def test_one_published_set_agrees_in_every_task():
    differences = _largest_differences(*_score_set("llama3-8b-instruct", EDIT_SIMILARITY["llama3-8b-instruct"]))
    assert len(differences) == 21
    assert {task: gap for task, gap in differences.items() if gap > TOLERANCE} == {}


@pytest.mark.parity
def test_all_published_sets_agree_in_every_task(capsys):
    differences = {name: _largest_differences(*_score_set(name, EDIT_SIMILARITY[name])) for name in NUM_TASKS}
    rows = [
        (name, EDIT_SIMILARITY[name], str(len(gaps)), f"{max(gaps.values()):.4f}") for name, gaps in differences.items()
    ]
    with capsys.disabled():
        print(f"\n{format_table(('set', 'code tasks by', 'task scores', 'largest difference'), rows)}")
    assert {name: len(gaps) for name, gaps in differences.items()} == NUM_TASKS
    assert sum(NUM_TASKS.values()) == 96
    assert [(name, task) for name, gaps in differences.items() for task, gap in gaps.items() if gap > TOLERANCE] == []


@pytest.mark.parity
@pytest.mark.parametrize("name", EDIT_SIMILARITY)
def test_only_the_named_back_end_gives_the_published_code_scores(name):
    other = {"difflib": "levenshtein", "levenshtein": "difflib"}[EDIT_SIMILARITY[name]]
    differences = _largest_differences(*_score_set(name, other))
    assert {task for task, gap in differences.items() if gap > TOLERANCE} == {"lcc", "repobench-p"}
