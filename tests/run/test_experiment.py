"""The whole pipeline on the scripted engine: run, crash, resume, refuse."""

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from harness.errors import UserError
from harness.run.experiment import carry_out, plan_run, run
from harness.store.manifest import read_manifest
from harness.store.predictions import read_predictions
from tests.scripted_run import COMMAND, by_id, only_folder, scripted_config

TASKS = "[qasper,trec,lcc]"
LIMIT = 2
NUM_SAMPLES = 6


@pytest.fixture
def start(byte_model, tmp_path, monkeypatch):
    """Start a run with more overrides; returns its folder."""
    monkeypatch.setattr("harness.config_checks.inference_device", lambda: "cpu")

    def start_run(*overrides: str) -> Path:
        results = tmp_path / "runs"
        wanted = [f"benchmark.tasks={TASKS}", f"benchmark.limit={LIMIT}", *overrides]
        run(scripted_config(byte_model, results, *wanted), COMMAND)
        return only_folder(results)

    return start_run


def set_aside(tmp_path: Path) -> None:
    only_folder(tmp_path / "runs").rename(tmp_path / "set_aside")


def test_a_run_leaves_a_complete_record(start, capsys):
    folder = start()
    manifest = read_manifest(folder)
    assert (manifest.status, manifest.error) == ("finished", None)
    assert manifest.config["policy"]["budget"] == 512
    assert manifest.seeds == {"engine": 0, "benchmark": 0}
    assert [session.num_samples for session in manifest.sessions] == [NUM_SAMPLES]
    predictions = by_id(folder)
    assert len(predictions) == NUM_SAMPLES
    assert all(0 <= p.score <= 1 and len(p.context_sha256) == 64 and p.prediction for p in predictions.values())
    assert folder.name.startswith("paged_eviction-b512-smollm2-135m-longbench_mini-limit2-")
    assert capsys.readouterr().out.splitlines()[-1].split() == ["Run", "folder", str(folder)]


def test_numbers_of_table_metrics_and_csv_agree(start, capsys):
    folder = start()
    metrics = json.loads((folder / "metrics.json").read_text())
    predictions = by_id(folder).values()
    assert [task["task"] for task in metrics["tasks"]] == ["qasper", "trec", "lcc"]
    assert all((task["num_samples"], task["num_expected"]) == (LIMIT, LIMIT) for task in metrics["tasks"])
    for task in metrics["tasks"]:
        scores = [p.score for p in predictions if p.task == task["task"]]
        assert task["score"] == pytest.approx(100 * sum(scores) / len(scores), abs=0.005)
    longest = max(p.num_prompt_tokens for p in predictions)
    assert metrics["memory"]["peak_blocks"] == -(-longest // 32)
    assert metrics["memory"]["peak_kv_bytes"] == metrics["memory"]["peak_blocks"] * 32 * 4
    assert metrics["eviction"]["num_over_budget"] == NUM_SAMPLES
    assert metrics["eviction"]["num_over_budget_not_evicted"] == 0
    assert metrics["eviction"]["share_evicted"] == 1.0
    table = pd.read_csv(folder / "summary.csv")
    assert list(table["task"]) == ["qasper", "trec", "lcc"]
    assert list(table["score"]) == [task["score"] for task in metrics["tasks"]]
    assert set(table["peak_kv_bytes"]) == {metrics["memory"]["peak_kv_bytes"]}
    printed = capsys.readouterr().out
    assert f"{metrics['overall']['score']:.2f}" in printed
    assert f"peak {metrics['memory']['peak_kv_bytes'] / 1024**2:.1f} MiB" in printed
    assert "limit 2" in printed
    assert f"Evictions    {NUM_SAMPLES} in 100 % of the requests" in printed


def test_block_usage_has_a_row_a_step(start):
    rows = list(csv.DictReader((start() / "block_usage.csv").open()))
    assert len(rows) == NUM_SAMPLES
    assert set(rows[0]) == {"session", "t_s", "blocks", "running", "prefilling"}


def test_a_crashed_run_resumes_to_the_predictions_of_a_whole_one(start, tmp_path, monkeypatch, capsys):
    whole = by_id(start())
    set_aside(tmp_path)
    monkeypatch.setenv("SCRIPTED_CRASH_AFTER", "4")
    with pytest.raises(RuntimeError, match="scripted crash"):
        start()
    folder = only_folder(tmp_path / "runs")
    manifest = read_manifest(folder)
    assert (manifest.status, manifest.sessions[0].num_samples) == ("failed", 4)
    assert "scripted crash" in manifest.error
    assert len(by_id(folder)) == 4
    with (folder / "predictions.jsonl").open("a") as file:
        file.write('{"sample_id": "torn')
    monkeypatch.delenv("SCRIPTED_CRASH_AFTER")
    assert by_id(start()) == whole
    assert [session.num_samples for session in read_manifest(folder).sessions] == [4, 2]
    assert read_manifest(folder).status == "finished"
    assert "resuming: 4 samples are done, 2 are missing" in capsys.readouterr().out


def test_a_finished_run_is_not_made_again(start, monkeypatch, capsys):
    folder = start()
    before = (folder / "predictions.jsonl").read_bytes()
    first = capsys.readouterr().out
    monkeypatch.setenv("SCRIPTED_CRASH_AFTER", "0")
    start()
    second = capsys.readouterr().out
    assert (folder / "predictions.jsonl").read_bytes() == before
    assert "this run is finished already" in second
    assert second.splitlines()[-6:] == first.splitlines()[-6:]


def test_overwrite_makes_a_finished_run_anew(start):
    folder = start()
    (folder / "predictions.jsonl").write_text("")
    start("overwrite=true")
    assert len(by_id(folder)) == NUM_SAMPLES
    assert len(read_manifest(folder).sessions) == 1


def test_overwriting_makes_a_record_anew_that_cannot_be_read(start):
    (start() / "manifest.json").write_text("torn")
    assert read_manifest(start("overwrite=true")).status == "finished"


@pytest.fixture
def queue(byte_model, tmp_path, monkeypatch):
    """Carry out a run of a sweep's job that overwrites, under a claim; returns its folder."""
    monkeypatch.setattr("harness.config_checks.inference_device", lambda: "cpu")

    def carry_out_job(claim: str) -> Path:
        wanted = [f"benchmark.tasks={TASKS}", f"benchmark.limit={LIMIT}", "overwrite=true"]
        planned = plan_run(scripted_config(byte_model, tmp_path / "runs", *wanted), COMMAND)
        carry_out(replace(planned, claim=claim))
        return planned.folder

    return carry_out_job


def test_a_job_that_is_queued_again_overwrites_once_and_then_goes_on(start, queue, monkeypatch, capsys):
    (start() / "predictions.jsonl").write_text("the old run")
    monkeypatch.setenv("SCRIPTED_CRASH_AFTER", "4")
    with pytest.raises(RuntimeError, match="scripted crash"):
        queue("0-first")
    monkeypatch.delenv("SCRIPTED_CRASH_AFTER")
    folder = queue("0-first")
    assert [session.num_samples for session in read_manifest(folder).sessions] == [4, 2]
    queue("0-first")
    assert "this run is finished already" in capsys.readouterr().out
    assert [session.num_samples for session in read_manifest(queue("0-second")).sessions] == [NUM_SAMPLES]


def test_an_engine_that_was_edited_makes_another_run_and_names_the_old_one(byte_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("harness.config_checks.inference_device", lambda: "cpu")
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "somebodys_engine.py"
    source.write_text("from tests.scripted_engine import ScriptedEngine as Engine\n")
    wanted = ["engine.name=somebodys_engine:Engine", "benchmark.tasks=[qasper]"]
    config = scripted_config(byte_model, tmp_path / "runs", *wanted)
    run(config, COMMAND)
    old = only_folder(tmp_path / "runs")
    run(config, COMMAND)
    assert "other code" not in capsys.readouterr().out
    source.write_text(source.read_text() + "EXTRA = 1\n")
    sys.modules.pop("somebodys_engine")
    run(config, COMMAND)
    assert f"the same settings ran before with other code: {old}" in capsys.readouterr().out
    assert len(list((tmp_path / "runs").iterdir())) == 2
    run(config, COMMAND)
    assert "other code" not in capsys.readouterr().out


def test_another_budget_is_another_folder(start, tmp_path):
    first = start()
    set_aside(tmp_path)
    assert start("policy.budget=256").name != first.name


def test_a_share_of_each_prompt_is_one_run_and_recorded_in_tokens(start, capsys):
    folder = start("policy.budget=25%", "policy=snapkv", "policy.options.window=900")
    out = capsys.readouterr()
    assert folder.name.startswith("snapkv-b0.25-smollm2-135m-")
    assert "policy=snapkv budget=25 % model=" in out.out
    assert "snapkv, budget 25 % on smollm2-135m" in " ".join(out.out.split())
    assert read_manifest(folder).config["policy"]["budget"] == 0.25
    predictions = read_predictions(folder)
    least = 928  # a window of 900 and one token more, in blocks of 32
    wanted = {p.sample_id: -(-p.num_prompt_tokens // (4 * 32)) * 32 for p in predictions}
    assert {p.sample_id: p.budget_tokens for p in predictions} == {
        name: max(least, tokens) for name, tokens in wanted.items()
    }
    assert all(p.planned_tokens == p.budget_tokens == p.final_resident_tokens for p in predictions)
    num_least = sum(tokens < least for tokens in wanted.values())
    assert 0 < num_least < NUM_SAMPLES
    assert f"policy.budget=25 % of {num_least} of 6 prompts is less than policy=snapkv can work with" in out.err
    eviction = json.loads((folder / "metrics.json").read_text())["eviction"]
    assert (eviction["budget"], eviction["num_over_budget"]) == (0.25, NUM_SAMPLES)
    assert eviction["num_with_least_budget"] == num_least
    assert start("policy.budget=0.25", "policy=snapkv", "policy.options.window=900") == folder, "the same run"
    assert "finished already" in capsys.readouterr().out


def test_a_share_of_a_policy_without_budget_is_refused(start):
    with pytest.raises(UserError, match=r"policy=corm lets the data decide, so policy\.budget=0\.25 has no effect"):
        start("policy=corm", "policy.budget=0.25")


def test_a_policy_whose_plan_lets_all_prompts_stay_need_not_evict(start, tmp_path, monkeypatch, capsys):
    """Half of the layers keep everything: a page above the budget in each of the others is no block of the pool."""
    longest = max(p.num_prompt_tokens for p in read_predictions(start()))
    set_aside(tmp_path)
    budget = (longest - 1) // 32 * 32
    half = ("policy=mix_attention", "policy.options.full_every=2")
    folder = start(*half, f"policy.budget={budget}")
    assert read_manifest(folder).status == "finished"
    assert {p.planned_tokens - p.num_prompt_tokens for p in read_predictions(folder)} == {0}
    assert "no prompt is long enough for policy=mix_attention" in capsys.readouterr().err
    folder.rename(tmp_path / "set_aside_too")
    monkeypatch.setenv("SCRIPTED_NEVER_EVICT", str(budget - 64))
    with pytest.raises(UserError, match="evicted nothing, although it had to from"):
        start(*half, f"policy.budget={budget - 64}")


def test_a_policy_that_had_to_evict_and_did_not_fails_the_run(start, tmp_path, monkeypatch):
    monkeypatch.setenv("SCRIPTED_NEVER_EVICT", "512")
    with pytest.raises(UserError, match="evicted nothing, although it had to from 6 of 6 prompts"):
        start()
    assert read_manifest(only_folder(tmp_path / "runs")).status == "failed"
    assert not (only_folder(tmp_path / "runs") / "metrics.json").exists()
    monkeypatch.delenv("SCRIPTED_NEVER_EVICT")
    with pytest.raises(UserError, match="evicted nothing"):
        start()
    assert read_manifest(start("overwrite=true")).status == "finished"


def test_a_policy_with_nothing_to_do_is_warned_about(start, capsys):
    start("policy.budget=8192")
    assert (
        "no prompt is long enough for policy=paged_eviction with policy.budget=8192 to evict" in capsys.readouterr().err
    )


def test_the_full_cache_needs_no_eviction(start, capsys):
    folder = start("policy=full")
    assert read_manifest(folder).status == "finished"
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "reason"), [("SCRIPTED_ABORT", r"\(abort\)"), ("SCRIPTED_DROP", r"\(no answer\)")]
)
def test_a_sample_without_an_answer_is_never_left_out_silently(start, tmp_path, monkeypatch, variable, reason):
    monkeypatch.setenv(variable, "trec")
    with pytest.raises(UserError, match=rf"2 of 6 samples failed: trec/\S+ {reason}"):
        start()
    folder = only_folder(tmp_path / "runs")
    assert read_manifest(folder).status == "failed"
    assert len(by_id(folder)) == 4
    monkeypatch.delenv(variable)
    assert len(by_id(start())) == NUM_SAMPLES


def test_an_interrupt_keeps_what_is_finished(start, tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("tests.scripted_engine.ScriptedEngine.stats", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start()
    folder = only_folder(tmp_path / "runs")
    assert read_manifest(folder).status == "interrupted"
    monkeypatch.undo()
    assert len(by_id(folder)) == NUM_SAMPLES


def test_prompts_of_unwanted_length_are_left_out_and_the_count_shows_it(start, tmp_path):
    whole = by_id(start())
    set_aside(tmp_path)
    shortest = min(p.num_prompt_tokens for p in whole.values() if not p.truncated)
    folder = start(f"benchmark.max_prompt_tokens={shortest}")
    assert [p.num_prompt_tokens for p in read_predictions(folder)] == [shortest]
    counts = [(t["num_samples"], t["num_expected"]) for t in json.loads((folder / "metrics.json").read_text())["tasks"]]
    assert sorted(counts) == [(0, LIMIT), (0, LIMIT), (1, LIMIT)]


def test_a_mistyped_policy_option_is_named(start):
    with pytest.raises(UserError, match=r"policy.options.protect_frist is not an option.*Did you mean protect_first"):
        start("+policy.options.protect_frist=4")


def test_an_unknown_engine_is_named(start):
    with pytest.raises(UserError, match=r"engine.name=vlm is unknown"):
        start("engine.name=vlm")
