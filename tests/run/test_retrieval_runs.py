"""RULER and the needle grid through the whole pipeline, on the scripted engine."""

import json
import os
import subprocess
import sys

import pytest

from harness.errors import UserError
from harness.run.experiment import plan_run, run
from harness.store.manifest import read_manifest
from harness.store.predictions import read_predictions
from harness.store.prompts import read_prompts
from tests.scripted_run import COMMAND, GENEROUS_S, only_folder, scripted_config

NEEDLE = ("benchmark=needle", "benchmark.lengths=[700,900]", "benchmark.depths=3")


def start(model, results, *overrides):
    run(scripted_config(model, results, *overrides), COMMAND)
    return only_folder(results)


def test_a_needle_run_says_where_needles_lie_and_resumes(byte_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SCRIPTED_CRASH_AFTER", "4")
    with pytest.raises(RuntimeError):
        start(byte_model, tmp_path, *NEEDLE)
    monkeypatch.delenv("SCRIPTED_CRASH_AFTER")
    folder = start(byte_model, tmp_path, *NEEDLE)
    assert "resuming: 4 samples are done, 2 are missing" in capsys.readouterr().out
    predictions = sorted(read_predictions(folder), key=lambda p: (p.length, p.depth))
    assert [(p.length, p.depth) for p in predictions] == [
        (700, 0),
        (700, 0.5),
        (700, 1),
        (900, 0),
        (900, 0.5),
        (900, 1),
    ]
    prompts = read_prompts(folder)
    assert set(prompts) == {p.sample_id for p in predictions}
    for p in predictions:
        needle, _, question = prompts[p.sample_id].question.partition("\n")
        assert (needle in prompts[p.sample_id].head, question in prompts[p.sample_id].head) == (True, True)
        assert p.num_prompt_tokens + 16 <= p.length
        ((start_, end),), ((first, last),) = p.needle_spans, p.value_spans
        assert 0 <= start_ < first < last <= end <= p.num_prompt_tokens
        assert last - first == 7
        assert not p.truncated


def test_a_ruler_run_names_what_is_left_out(byte_model, tmp_path, capsys):
    tasks = "[niah_single_1,niah_single_2]"
    folder = start(
        byte_model,
        tmp_path,
        "benchmark=ruler",
        "benchmark.lengths=[1500]",
        "benchmark.limit=2",
        f"benchmark.tasks={tasks}",
    )
    printed = capsys.readouterr().out
    assert "note: niah_single_2: the haystack is filler of this project, not essays (benchmark.path)" in printed
    manifest = read_manifest(folder)
    assert manifest.data["num_expected"] == {"niah_single_1": 500, "niah_single_2": 500}
    assert len(manifest.data["notes"]) == 1
    assert {p.length for p in read_predictions(folder)} == {1500}
    overall = json.loads((folder / "metrics.json").read_text())["overall"]
    assert (overall["name"], overall["n"], overall["expected"]) == ("all of RULER", 4, 1000)


def test_a_length_beyond_the_model_is_refused(byte_model, tmp_path):
    with pytest.raises(UserError, match=r"benchmark.lengths has 9000, more than model.max_model_len=8192"):
        plan_run(scripted_config(byte_model, tmp_path, "benchmark=needle", "benchmark.lengths=[9000]"), COMMAND)


def test_a_sample_of_rows_is_drawn_with_the_seed(byte_model, tmp_path):
    def drawn(*overrides):
        config = scripted_config(byte_model, tmp_path, "benchmark.tasks=[trec]", "benchmark.limit=9", *overrides)
        return [row.row_id for row in plan_run(config, COMMAND).benchmark.rows]

    all_rows = drawn()
    three = drawn("+benchmark.sample=3")
    assert len(three) == 3
    assert three == [row for row in all_rows if row in three]
    assert drawn("+benchmark.sample=3") == three
    assert drawn("+benchmark.sample=9") == all_rows


@pytest.mark.slow
def test_the_experiment_prints_its_ranking_and_that_it_proves_nothing(byte_model, tmp_path):
    command = [
        sys.executable,
        "-m",
        "harness",
        "experiment=retrieval",
        "policy=full,random",
        f"model.path={byte_model}",
    ]
    more = ["engine.name=tests.scripted_engine:ScriptedEngine", f"results_dir={tmp_path}/runs", "benchmark.depths=2"]
    done = subprocess.run(
        [*command, *more, "record_retention=false"],
        capture_output=True, text=True, timeout=GENEROUS_S, check=False, env=os.environ, cwd=os.getcwd(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "This proves nothing: the full cache reaches 0.0 at 700 tokens" in done.stdout
    assert "random @ 192" in done.stdout
