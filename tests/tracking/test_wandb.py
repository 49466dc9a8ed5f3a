"""W&B: what is written is read back from the offline files; what cannot be reached never costs a run."""

import json
import runpy
import sys
import time
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hydra import compose, initialize_config_module

from harness.config import TrackerConfig, register_schema
from harness.config_checks import to_dataclass
from harness.run.experiment import read_metrics, run
from harness.store.manifest import read_manifest
from harness.store.predictions import read_predictions
from harness.tracking import FILE_NAME, track
from harness.tracking.__main__ import main
from harness.tracking.wandb import MAX_HISTORY, MAX_TEXT, SAMPLE_COLUMNS, sample_row, summary
from harness.tracking.workspace import SECTIONS, make_workspace
from tests.report.synthetic import bench_rows, write_bench
from tests.scripted_run import COMMAND, only_folder, scripted_config

ROOT = Path(__file__).resolve().parents[2]
READER = Path(__file__).resolve().parents[3] / "shared" / "tools" / "wandb_offline_reader.py"
TASKS = "benchmark.tasks=[qasper,trec]"


@pytest.fixture(autouse=True)
def nobody(tmp_path, monkeypatch):
    """No account, no sweep agent, no settings of whoever runs the tests."""
    for name in ("WANDB_API_KEY", "WANDB_SWEEP_ID", "WANDB_RUN_ID", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))


@pytest.fixture(scope="module")
def finished(byte_model, tmp_path_factory) -> Path:
    """A finished run that was reported nowhere."""
    results = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.config_checks.inference_device", lambda: "cpu")
        run(scripted_config(byte_model, results, TASKS), COMMAND)
    return only_folder(results)


@pytest.fixture(autouse=True)
def unreported(finished):
    """Every test starts with the run not reported."""
    yield
    (finished / FILE_NAME).unlink(missing_ok=True)


def tracker(name: str, *overrides: str) -> TrackerConfig:
    register_schema()
    with initialize_config_module(version_base="1.3", config_module="conf"):
        return to_dataclass(compose("config", [f"tracker={name}", "policy=full", *overrides])).tracker


def report(folder: Path, config: TrackerConfig) -> None:
    track(config, folder, read_manifest(folder), read_metrics(folder))


def read_back(folder: Path) -> dict[str, dict]:
    """Every record of the only offline run below `folder`: run, config, summary, exit code."""
    if not READER.exists():
        pytest.skip("needs the offline reader that lies beside this checkout")
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(READER), str(folder / "nothing")])
        records = runpy.run_path(str(READER))["records"]
    for _ in range(50):  # W&B's own process may still be writing the last records
        found = _parsed(records(path), wandb_internal_pb2.Record)
        if "exit" in found:
            break
        time.sleep(0.2)
    return found


def _parsed(records: Iterable[bytes], kind_of_record: type) -> dict[str, Any]:
    found: dict[str, Any] = {"config": {}, "summary": {}, "history": [], "artifact": set()}
    for data in records:
        record = kind_of_record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind in ("run", "exit"):
            found[kind] = getattr(record, kind)
        if kind == "history":
            items = record.history.item
            found["history"].append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
        if kind == "artifact" and record.artifact.type != "run_table":
            found["artifact"] |= {entry.path for entry in record.artifact.manifest.contents}
        for part, updates in (("config", record.run.config.update), ("summary", record.summary.update)):
            found[part] |= {u.key or "/".join(u.nested_key): json.loads(u.value_json) for u in updates}
    return found


def test_an_offline_run_reads_back_whole(finished):
    report(finished, tracker("wandb_offline", "tracker.tags=[mine]", "tracker.group=sweep-1"))
    found, manifest, metrics = read_back(finished), read_manifest(finished), read_metrics(finished)
    written = found["run"]
    assert (written.run_id, written.project, written.run_group, written.job_type) == (
        manifest.run_id,
        "kv-eviction",
        "sweep-1",
        "accuracy",
    )
    assert written.display_name == "paged_eviction-b512-smollm2-135m-longbench_mini"
    assert list(written.tags) == ["paged_eviction", "smollm2-135m", "longbench_mini", "mine"]
    for part in ("policy", "model", "benchmark", "engine"):
        assert found["config"][part] == manifest.config[part]
    assert found["config"]["hardware"] == manifest.hardware
    assert found["config"]["versions"] == manifest.versions
    for task in metrics["tasks"]:
        name = f"longbench/{task['task']}"
        assert found["summary"][name] == task["score"]
        assert (found["summary"][f"{name}.n"], found["summary"][f"{name}.expected"]) == (
            task["num_samples"],
            task["num_expected"],
        )
    assert found["summary"]["longbench/average"] == metrics["overall"]["score"]
    assert found["summary"]["longbench/average.n"] == metrics["overall"]["n"]
    assert found["summary"]["status"] == "finished"
    assert found["summary"]["memory/peak_kv_bytes"] == metrics["memory"]["peak_kv_bytes"]
    assert found["summary"]["speed/output_tokens_per_s"] == metrics["speed"]["output_tokens_per_s"]
    assert found["summary"]["eviction/num_evictions"] == 2
    assert found["exit"].exit_code == 0
    steps = [line.split(",") for line in (finished / "block_usage.csv").read_text().splitlines()[1:]]
    history = [step for step in found["history"] if "kv/blocks" in step]
    assert len(history) == len(steps) <= MAX_HISTORY
    assert max(step["kv/blocks"] for step in history) == max(int(step[2]) for step in steps)
    assert any(name.startswith("figures/blocks-over-time") for step in found["history"] for name in step)
    (figure,) = finished.glob("wandb/offline-run-*/files/media/html/**/*.html")
    assert "KV blocks in use" in figure.read_text()
    assert {"manifest.json", "metrics.json", "predictions.jsonl"} <= found["artifact"]
    (table,) = finished.glob("wandb/offline-run-*/files/media/table/*.json")
    content = json.loads(table.read_text())
    assert content["columns"] == list(SAMPLE_COLUMNS)
    assert sorted(row[0] for row in content["data"]) == sorted(p.sample_id for p in read_predictions(finished))


class RecordingWandb:
    """Stands in for the package: remembers what it is told."""

    def __init__(self) -> None:
        self.inits: list[dict] = []

    Settings = SimpleNamespace
    Artifact = Mock()

    def Html(self, text: str, inject: bool) -> str:
        return text

    def Table(self, columns: list[str], data: list[list]) -> list[list]:
        return data

    @contextmanager
    def init(self, **names):
        self.inits.append(names)
        yield SimpleNamespace(
            log=lambda values: None,
            define_metric=lambda *names, **settings: None,
            log_artifact=lambda artifact: None,
            summary={},
            url=f"https://wandb.example/{names.get('id')}",
            settings=SimpleNamespace(sync_dir="folder"),
        )


@pytest.fixture
def wandb(monkeypatch) -> RecordingWandb:
    recorder = RecordingWandb()
    monkeypatch.setitem(sys.modules, "wandb", recorder)
    return recorder


def test_the_same_report_is_made_once_and_another_one_is_made(finished, wandb, capsys):
    for _ in range(2):
        report(finished, tracker("wandb"))
    (names,) = wandb.inits
    assert (names["id"], names["resume"], names["mode"]) == (finished.name, "allow", "online")
    assert names["reinit"] == "finish_previous"
    assert names["dir"] == finished
    assert f"W&B          https://wandb.example/{finished.name}" in capsys.readouterr().out
    report(finished, tracker("wandb", "tracker.project=other"))
    assert [each["project"] for each in wandb.inits] == ["kv-eviction", "other"]


def test_below_a_sweep_agent_the_agents_run_is_filled_in(finished, wandb, monkeypatch):
    report(finished, tracker("wandb"))
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")
    for outer in ("outer-1", "outer-2"):
        monkeypatch.setenv("WANDB_RUN_ID", outer)
        report(finished, tracker("wandb"))
    assert [sorted(names.keys() & {"id", "project", "resume"}) for names in wandb.inits] == [
        ["id", "project", "resume"],
        [],
        [],
    ]


def test_the_configuration_given_to_wandb_is_plain_data(finished, wandb):
    report(finished, tracker("wandb"))
    config = wandb.inits[0]["config"]
    assert json.loads(json.dumps(config)) == config
    assert config["policy"]["budget"] == 512


def test_without_a_tracker_wandb_is_not_even_imported(finished, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    report(finished, tracker("none"))
    assert not (finished / FILE_NAME).exists()


def test_online_without_an_account_is_one_warning_and_the_run_is_kept(byte_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("harness.config_checks.inference_device", lambda: "cpu")
    run(scripted_config(byte_model, tmp_path / "runs", TASKS, "tracker=wandb"), COMMAND)
    folder = only_folder(tmp_path / "runs")
    printed = capsys.readouterr()
    warnings = [line for line in printed.err.splitlines() if line.strip()]
    assert len(warnings) == 1
    assert "was not reported to wandb (online): " in warnings[0]
    assert "API key" in warnings[0]
    assert read_manifest(folder).status == "finished"
    assert not (folder / FILE_NAME).exists()
    assert printed.out.splitlines()[-1].split() == ["Run", "folder", str(folder)]


def test_long_texts_are_shortened_in_the_middle_and_others_are_not(finished):
    prediction = read_predictions(finished)[0]
    row = dict(zip(SAMPLE_COLUMNS, sample_row(replace(prediction, prediction="a" * 999 + "z")), strict=True))
    assert len(row["prediction"]) == MAX_TEXT + len(" [...] ")
    assert row["prediction"].endswith("az")
    assert dict(zip(SAMPLE_COLUMNS, sample_row(prediction), strict=True))["prediction"] == prediction.prediction


def test_a_run_of_an_own_task_alone_has_no_average_of_longbench(finished):
    metrics = read_metrics(finished)
    assert "longbench/average" in summary(metrics)
    own = summary(metrics | {"overall": metrics["overall"] | {"name": "own tasks"}})
    assert "longbench/average" not in own
    assert own["own_tasks/average"] == metrics["overall"]["score"]


def test_a_load_test_is_one_run_with_its_rows_medians_and_files(tmp_path, capsys):
    folder = write_bench(tmp_path, bench_rows(), "throughput-tiny", load_format="dummy")
    assert main([str(tmp_path), "--offline", "--group", "g"]) == 0
    assert "offline-run-" in capsys.readouterr().out
    found = read_back(folder)
    assert (found["run"].display_name, found["run"].job_type, found["run"].run_group) == (
        "throughput-tiny",
        "load test",
        "g",
    )
    assert found["summary"]["load_test/window@128/output_tok_s"] == pytest.approx(220)
    assert found["summary"]["load_test/full/tpot_p50"] == pytest.approx(10 / 110)
    assert {"bench.json", "bench_manifest.json"} <= found["artifact"]
    assert "random weights" in found["config"]["conditions"]


def test_nothing_to_report_is_one_line(tmp_path, capsys):
    assert main([str(tmp_path), "--offline"]) == 2
    assert "no run and no load test there" in capsys.readouterr().err


def test_the_workspace_charts_what_runs_report(finished):
    pytest.importorskip("wandb_workspaces")
    workspace = make_workspace("someone", "kv-eviction")
    assert [section.name for section in workspace.sections] == list(SECTIONS)
    known = set(summary(read_metrics(finished))) | {"kv/t_s", "kv/blocks", "kv/running"}
    named = {name for content in SECTIONS.values() for _, *names in content for name in names if name}
    assert named <= known
