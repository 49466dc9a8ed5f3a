"""W&B: what is written is read back from the offline files; what cannot be reached never costs a run."""

import json
import runpy
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_module

from harness.config import TrackerConfig, register_schema
from harness.config_checks import to_dataclass
from harness.run.experiment import read_metrics, run
from harness.store.manifest import read_manifest
from harness.store.predictions import read_predictions
from harness.tracking import FILE_NAME, track
from harness.tracking.wandb import MAX_TEXT, SAMPLE_COLUMNS, sample_row
from tests.scripted_run import COMMAND, only_folder, scripted_config

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
    found: dict[str, dict] = {"config": {}, "summary": {}}
    for data in records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind in ("run", "exit"):
            found[kind] = getattr(record, kind)
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
        assert found["summary"][f"longbench/{task['task']}"] == task["score"]
    assert found["summary"]["longbench/average"] == metrics["overall"]["score"]
    assert found["summary"]["memory/peak_kv_bytes"] == metrics["memory"]["peak_kv_bytes"]
    assert found["summary"]["speed/output_tokens_per_s"] == metrics["speed"]["output_tokens_per_s"]
    assert found["summary"]["eviction/num_evictions"] == 2
    assert found["exit"].exit_code == 0
    (table,) = finished.glob("wandb/offline-run-*/files/media/table/*.json")
    content = json.loads(table.read_text())
    assert content["columns"] == list(SAMPLE_COLUMNS)
    assert sorted(row[0] for row in content["data"]) == sorted(p.sample_id for p in read_predictions(finished))


class RecordingWandb:
    """Stands in for the package: remembers what it is told."""

    def __init__(self) -> None:
        self.inits: list[dict] = []

    Settings = SimpleNamespace

    def Table(self, columns: list[str], data: list[list]) -> list[list]:
        return data

    @contextmanager
    def init(self, **names):
        self.inits.append(names)
        yield SimpleNamespace(
            log=lambda values: None,
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
