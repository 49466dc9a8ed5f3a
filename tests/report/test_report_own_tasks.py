"""Tasks beside LongBench's in the report: columns of their own, and averages that are LongBench's alone."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.metrics import run_metrics
from harness.report.__main__ import main
from harness.report.figures.all import report_looks
from harness.report.figures.scores import accuracy_figure
from harness.report.reading.runs import make_groups, read_runs
from harness.report.tables.differences import difference_tables, find_differences
from harness.report.tables.scores import accuracy_table
from harness.store.manifest import read_manifest, write_manifest
from harness.store.predictions import read_predictions, replace_predictions
from tests.benchmarks.longbench.own_task import register
from tests.report.synthetic import write_run

PAPER = ["--paper", str(Path(__file__).resolve().parents[2] / "results" / "paper")]
NUM_ROWS = 12
LOCAL = {"source": "local", "path": None, "limit": None}


@pytest.fixture(autouse=True)
def riddles(tmp_path, monkeypatch):
    """The task of the README, installed."""
    package = tmp_path / "package"
    package.mkdir()
    register(package, monkeypatch)


def add_riddles(folder, instead: bool = False) -> None:
    """Give the run of qasper in a folder the same samples as riddles too, or instead."""
    manifest, predictions = read_manifest(folder), read_predictions(folder)
    own = [replace(one, task="riddles", sample_id=f"riddles/{one.row_id}", score=1.0) for one in predictions]
    expected = {"riddles": NUM_ROWS} if instead else manifest.data["num_expected"] | {"riddles": NUM_ROWS}
    write_manifest(folder, replace(manifest, data=manifest.data | {"num_expected": expected}))
    replace_predictions(folder, own if instead else [*predictions, *own])


def group_of(parent, instead: bool = False):
    for policy, budget in (("full", None), ("window", 256)):
        add_riddles(write_run(parent, policy, budget, tasks=("qasper",), num_rows=NUM_ROWS, benchmark=LOCAL), instead)
    (group,) = make_groups(read_runs([parent]))
    return group


def test_a_run_without_it_is_as_full_as_before(tmp_path):
    write_run(tmp_path, tasks=("qasper",), benchmark=LOCAL)
    (run,) = read_runs([tmp_path])
    assert (run.averages[0].expected_tasks, run.averages[0].expected) == (21, 4562)


def test_beside_longbench_it_has_a_column_and_no_part_in_averages(tmp_path):
    group = group_of(tmp_path)
    run = group.runs[0]
    qasper = run.scores["qasper"].score
    for average in (run.averages[0], run.averages[1], run.averages[2]):
        assert (average.score, average.num_tasks, average.n) == (qasper, 1, NUM_ROWS)
    overall = run_metrics(run.manifest, run.predictions)["overall"]
    assert (overall["name"], overall["score"], overall["expected"]) == ("all tasks", qasper, NUM_ROWS)
    titles = [column.title for column in accuracy_table(group).columns]
    assert titles[2:] == ["all tasks", "English and code tasks", "qasper", "riddles"]
    accuracy = accuracy_table(group)
    assert accuracy.rows[0][-1].whole == "100.00 [100.0, 100.0]"
    assert any("a single point" in note for note in accuracy.notes)
    assert "riddles" in {record["name"] for record in accuracy.records}
    averages, tasks = difference_tables(group, find_differences(group))
    assert [row[2].text for row in averages.rows] == ["mean of 1 tasks"]
    assert [row[2].text for row in tasks.rows] == ["qasper", "riddles"]


def test_alone_it_has_a_mean_of_its_own(tmp_path):
    group = group_of(tmp_path, instead=True)
    run = group.runs[0]
    assert [(one.name, one.score) for one in run.averages if one.num_tasks] == [("own tasks", 100.0)]
    assert run_metrics(run.manifest, run.predictions)["overall"]["score"] == 100.0
    titles = [column.title for column in accuracy_table(group).columns]
    assert titles[2:] == ["riddles"], "the mean of one task is that task"
    figure = accuracy_figure(group, report_looks([group], []))
    assert list(figure.panels) == ["riddles (qa_f1)"]


@pytest.mark.parametrize("instead", [False, True], ids=["beside LongBench", "alone"])
def test_document_and_page_show_it(tmp_path, instead):
    group_of(tmp_path / "runs", instead)
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "report"), *PAPER]) == 0
    assert re.search(r"\| +riddles \(qa_f1", (tmp_path / "report" / "report.md").read_text())
    assert '/riddles"' in (tmp_path / "report" / "report.html").read_text()


def test_a_run_of_a_task_that_is_not_installed_here_is_named(tmp_path):
    folder = write_run(tmp_path, tasks=("qasper",), benchmark=LOCAL)
    manifest = read_manifest(folder)
    write_manifest(folder, replace(manifest, data=manifest.data | {"num_expected": {"puzzles": 1}}))
    with pytest.raises(UserError, match=rf"{folder.name} is of task puzzles, unknown here\. Install the package"):
        read_runs([tmp_path])
