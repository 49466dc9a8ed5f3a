"""A session that ends badly keeps the figures of what it did."""

import csv
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.report.reading.runs import make_groups, read_runs
from harness.report.reading.usage import total_tokens_per_s
from harness.report.tables.conditions import warnings
from harness.run import session
from harness.run.experiment import run
from harness.store.manifest import read_manifest, write_manifest
from harness.store.predictions import replace_predictions
from tests.scripted_engine import ScriptedEngine
from tests.scripted_run import COMMAND, by_id, only_folder, scripted_config, wait_for

NUM_SAMPLES = 6


@pytest.fixture
def start(byte_model, tmp_path, monkeypatch):
    """Start a run of six samples; returns its folder."""
    monkeypatch.setattr("harness.config_checks.inference_device", lambda: "cpu")

    def start_run() -> Path:
        overrides = ["benchmark.tasks=[qasper,trec,lcc]", "benchmark.limit=2"]
        run(scripted_config(byte_model, tmp_path, *overrides), COMMAND)
        return only_folder(tmp_path)

    start_run.results = tmp_path
    return start_run


def usage(folder):
    return [(row["session"], int(row["blocks"])) for row in csv.DictReader((folder / "block_usage.csv").open())]


def measured(folder):
    return [one.num_measured for one in read_manifest(folder).sessions]


def found_warnings(folder):
    (group,) = make_groups(read_runs([folder]))
    return [warning for warning in warnings(group) if "measured" in warning]


def crashed_and_resumed(start, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("SCRIPTED_CRASH_AFTER", "4")
        with pytest.raises(RuntimeError, match="scripted crash"):
            start()
    return start()


def test_memory_of_a_resumed_run_covers_all_its_sessions(start, monkeypatch):
    monkeypatch.setattr(session, "MEASURE_EVERY_S", 0.0)
    monkeypatch.setattr(session, "MEASURE_AT_MOST", float("inf"))
    folder = crashed_and_resumed(start, monkeypatch)
    blocks = [-(-prediction.num_prompt_tokens // 32) for prediction in by_id(folder).values()]
    assert sorted(number for _, number in usage(folder)) == sorted(blocks)
    assert [part for part, _ in usage(folder)] == ["1"] * 4 + ["2"] * 2
    memory = json.loads((folder / "metrics.json").read_text())["memory"]
    assert (memory["peak_blocks"], memory["num_samples_measured"]) == (max(blocks), NUM_SAMPLES)
    first, second = ([number for part, number in usage(folder) if part == session] for session in "12")
    over_time = (sum(first[:-1]) + sum(second[:-1])) / 4  # a step a second, each number holding until the next
    assert memory["mean_blocks"] == pytest.approx(over_time, abs=0.05)
    assert found_warnings(folder) == []


def test_what_was_not_measured_is_said(start, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(ScriptedEngine, "stats", lambda self: 1 / 0)
        patch.setenv("SCRIPTED_CRASH_AFTER", "4")
        with pytest.raises(RuntimeError, match="scripted crash"):
            start()
    folder = start()
    assert measured(folder) == [0, 2]
    assert [part for part, _ in usage(folder)] == ["2"] * 2
    assert "measured on 2 of 6 samples; sessions that ended badly answered the others" in found_warnings(folder)[0]


def test_a_session_that_crashes_in_order_is_measured_and_its_rows_are_scored(start, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("SCRIPTED_CRASH_AFTER", "4")
        with pytest.raises(RuntimeError, match="scripted crash"):
            start()
        (folder,) = start.results.iterdir()
    assert measured(folder) == [4]
    assert [prediction.score is not None for prediction in by_id(folder).values()] == [True] * 4
    (one,) = read_runs([folder])
    metrics = one.metrics
    assert (metrics["num_samples"], metrics["num_scored"]) == (4, 4)
    assert metrics["memory"]["num_samples_measured"] == metrics["speed"]["num_samples"] == 4
    assert metrics["eviction"]["num_evictions"] == sum(p.num_evictions for p in one.answered) > 0
    assert metrics["memory"]["peak_resident_tokens"] == max(p.num_prompt_tokens for p in one.answered)
    tokens = sum(p.num_prompt_tokens + p.num_output_tokens for p in one.answered)
    # generation_s is rounded, and this took a few milliseconds
    assert total_tokens_per_s(one) == pytest.approx(tokens / metrics["speed"]["generation_s"], rel=0.05)


def test_answers_that_a_kill_left_unscored_count_in_all_but_the_scores(start, capsys):
    folder = start()
    answers = [replace(one, score=None, extra_scores=None, empty=None) for one in by_id(folder).values()]
    replace_predictions(folder, [answers[0], *list(by_id(folder).values())[1:]])
    found = read_manifest(folder)
    killed = [replace(session, status="started", engine=None, num_measured=0) for session in found.sessions]
    write_manifest(folder, replace(found, status="started", predictions_sha256=None, sessions=killed))
    (one,) = read_runs([folder])
    assert (one.metrics["num_samples"], one.metrics["num_scored"], one.num_unscored) == (6, 5, 1)
    assert sum(task["num_samples"] for task in one.metrics["tasks"]) == 5
    assert one.metrics["eviction"]["num_evicted_tokens"] == sum(p.num_evicted_tokens for p in answers)
    assert start() == folder
    assert all(p.score is not None for p in by_id(folder).values())
    assert "KV memory    not measured" in capsys.readouterr().out


def test_samples_that_fail_do_not_take_the_figures_of_the_others(start, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("SCRIPTED_DROP", "trec")
        with pytest.raises(Exception, match="2 of 6 samples failed"):
            start()
    folder = start()
    assert measured(folder) == [4, 2]


def test_a_killed_session_keeps_its_counts(byte_model, tmp_path):
    program = (
        "import sys; from harness.run import session; session.MEASURE_EVERY_S = 0; session.MEASURE_AT_MOST = 1\n"
        "from harness.run.experiment import run; from tests.scripted_run import scripted_config\n"
        f"run(scripted_config({str(byte_model)!r}, {str(tmp_path)!r}), 'again')"
    )
    process = subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"SCRIPTED_DELAY_S": "0.2"})
    try:
        wait_for(lambda: any(tmp_path.iterdir()) and (only_folder(tmp_path) / "block_usage.csv").exists())
        wait_for(lambda: read_manifest(only_folder(tmp_path)).sessions[0].num_samples >= 2)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (killed,) = read_manifest(only_folder(tmp_path)).sessions
    assert (killed.status, killed.ended_at) == ("started", None)
    assert 2 <= killed.num_measured == killed.num_samples <= len(by_id(only_folder(tmp_path)))
    assert killed.generation_s > 0.2 * killed.num_samples
