"""`python -m harness.compare`."""

import csv
import dataclasses
import json

import pytest

from harness.compare import main
from harness.store.manifest import SCHEMA_VERSION, Manifest
from harness.store.predictions import Prediction
from tests.benchmarks.longbench.own_task import register


def _line(sample_id, score, task="qasper", context="c") -> str:
    """One line of predictions.jsonl; the fields that a comparison does not read are null."""
    fields = dict.fromkeys(field.name for field in dataclasses.fields(Prediction))
    fields |= {"sample_id": sample_id, "task": task, "score": score, "context_sha256": context}
    return json.dumps(fields) + "\n"


def _run(folder, scores, task="qasper", expected=200) -> str:
    """Add a task to a run; the fields of the manifest that a comparison does not read are null."""
    folder.mkdir(exist_ok=True)
    with (folder / "predictions.jsonl").open("a") as file:
        file.writelines(_line(f"{task}:{i}", score, task, f"{task}{i}") for i, score in enumerate(scores))
    path = folder / "manifest.json"
    earlier = json.loads(path.read_text())["data"]["num_expected"] if path.exists() else {}
    fields = dict.fromkeys(field.name for field in dataclasses.fields(Manifest))
    fields |= {
        "schema_version": SCHEMA_VERSION,
        "sessions": [],
        "versions": {},
        "data": {"num_expected": earlier | {task: expected}},
    }
    path.write_text(json.dumps(fields))
    return str(folder)


def test_the_table_shows_both_scores_the_difference_and_its_certainty(tmp_path, capsys):
    run_a = _run(tmp_path / "full", [0.5] * 200)
    run_b = _run(tmp_path / "evicted", [0.4] * 150 + [0.5] * 50)
    assert main([run_a, run_b]) == 0
    printed = capsys.readouterr().out
    (line,) = (line.split() for line in printed.splitlines() if line.startswith("qasper"))
    assert line[:6] == ["qasper", "50.00", "(200/200)", "42.50", "(200/200)", "-7.50"]
    assert line[-3:] == ["<0.0001", "<0.0001", "75%/25%/0%"]
    assert "warning" not in printed
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "evicted",
        "full",
        *["manifest.json"] * 2,
        *["predictions.jsonl"] * 2,
    ]


def test_the_average_is_over_tasks_and_partial_runs_are_said(tmp_path, capsys):
    for task, expected, score_b in (("qasper", 200, 0.25), ("lcc", 500, 0.75)):
        run_a = _run(tmp_path / "a", [0.5] * 12, task, expected)
        run_b = _run(tmp_path / "b", [score_b] * 12, task, expected)
    out = tmp_path / "comparison.csv"
    assert main([run_a, run_b, "--out", str(out)]) == 0
    with out.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["task"], row["difference"], row["n"], row["expected"]) for row in rows] == [
        ("qasper", "-25.0", "12", "200"),
        ("lcc", "25.0", "12", "500"),
        ("mean of 2 tasks", "0.0", "24", "700"),
    ]
    assert rows[2]["p_holm"] == rows[2]["p"], "one mean is a family of one test"
    assert "warning: qasper has 12 of 200 rows" in capsys.readouterr().out


@pytest.mark.parametrize("expected", [12, 224], ids=["generated rows", "LongBench-E"])
def test_a_run_is_full_by_the_count_of_the_benchmark_it_read(tmp_path, capsys, expected):
    run_a = _run(tmp_path / "a", [0.5] * expected, "qasper", expected)
    run_b = _run(tmp_path / "b", [0.25] * expected, "qasper", expected)
    assert main([run_a, run_b]) == 0
    printed = capsys.readouterr().out
    assert f"50.00 ({expected}/{expected})" in printed
    assert "warning" not in printed


@pytest.mark.parametrize(
    ("others", "mean"),
    [({"qasper": 200, "lcc": 500}, ["mean of 2 tasks"]), ({"qasper": 200}, []), ({}, [])],
    ids=["two more", "one more", "alone"],
)
def test_an_own_task_has_its_line_and_is_left_out_of_the_mean(tmp_path, monkeypatch, others, mean):
    register(tmp_path, monkeypatch)
    for task, expected in (others | {"riddles": 1}).items():
        run_a = _run(tmp_path / "a", [0.5], task, expected)
        run_b = _run(tmp_path / "b", [0.5 if task in others else 1.0], task, expected)
    assert main([run_a, run_b, "--out", str(tmp_path / "comparison.csv")]) == 0
    with (tmp_path / "comparison.csv").open(encoding="utf-8") as file:
        lines = {line["task"]: (float(line["difference"]), int(line["expected"])) for line in csv.DictReader(file)}
    assert list(lines) == [*others, "riddles", *mean]
    assert lines["riddles"] == (50.0, 1)
    assert [lines[name] for name in mean] == [(0.0, 700) for _ in mean]


def test_a_folder_without_a_manifest_is_no_run(tmp_path, capsys):
    run = _run(tmp_path / "a", [0.5])
    (tmp_path / "a" / "manifest.json").unlink()
    assert main([run, run]) == 2
    assert "holds no manifest.json. Give a run folder" in capsys.readouterr().err


def test_fewer_than_ten_samples_give_no_interval_and_say_so(tmp_path, capsys):
    run_a, run_b = _run(tmp_path / "a", [0.5] * 9), _run(tmp_path / "b", [0.25] * 9)
    assert main([run_a, run_b]) == 0
    printed = capsys.readouterr().out
    (line,) = (line.split() for line in printed.splitlines() if line.startswith("qasper"))
    assert line[5:9] == ["-25.00", "-", "-", "-"]
    assert "qasper rests on fewer than 10 contexts in a task: no interval and no p" in printed


def test_runs_over_different_samples_are_not_paired(tmp_path, capsys):
    run_a, run_b = _run(tmp_path / "a", [0.5] * 3), _run(tmp_path / "b", [0.5] * 2)
    assert main([run_a, run_b]) == 2
    printed = capsys.readouterr()
    assert "1 only in A: qasper:2" in printed.err
    assert printed.out == ""


def test_one_id_over_two_contexts_is_refused(tmp_path, capsys):
    run_a, run_b = _run(tmp_path / "a", []), _run(tmp_path / "b", [])
    (tmp_path / "a" / "predictions.jsonl").write_text(_line("s", 0.5, context="one"))
    (tmp_path / "b" / "predictions.jsonl").write_text(_line("s", 0.5, context="two"))
    assert main([run_a, run_b]) == 2
    assert "sample s is not the same in both runs: qasper, context one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no finished sample"),
        ([_line("qasper:0", None)], "1 samples have no score, the first is qasper:0"),
        ([_line("s", 0.5, task="squad")], "task 'squad' is unknown"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused_in_one_line(tmp_path, capsys, lines, message):
    run = _run(tmp_path / "a", [])
    (tmp_path / "a" / "predictions.jsonl").write_text("".join(lines))
    assert main([run, run]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
