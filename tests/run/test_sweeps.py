"""Sweeps: every job in a process of its own, failures apart, runs once, launchers, and the W&B agent's way in."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml
from hydra import compose, initialize_config_module

import conf
from harness.config import register_schema
from harness.config_checks import to_dataclass
from harness.errors import UserError
from harness.run.launching import Job, resuming_command, run_apart
from harness.run.sweep import Outcome, SweepCallback, claim, conclude, read_outcomes, write_outcome
from harness.store.manifest import read_manifest
from tests.scripted_run import only_folder, scripted_config

ROOT = Path(__file__).resolve().parents[2]
GENEROUS_S = 400
SCRIPTED = "engine.name=tests.scripted_engine:ScriptedEngine"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Where the sweep of this module keeps its runs."""
    return tmp_path_factory.mktemp("sweeps")


@pytest.fixture(scope="module")
def sweep(byte_model, place) -> Callable[..., subprocess.CompletedProcess]:
    """Start a sweep with the scripted engine and wait for its end."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
        return run_command(sweep_command(byte_model, place, *arguments), **environment)

    return run


def run_command(command: list[str], **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=GENEROUS_S,
        check=False,
    )


def sweep_command(model: Path, place: Path, *arguments: str) -> list[str]:
    fixed = [SCRIPTED, f"model.path={model}", f"results_dir={place / 'runs'}", "benchmark.tasks=[qasper,trec]"]
    where = f"hydra.sweep.dir={place}/sweeps/${{now:%H%M%S-%f}}"
    return [sys.executable, "-m", "harness", "-m", *arguments, *fixed, where]


def latest_outcomes(place: Path) -> list[tuple[str, str]]:
    folder = max((place / "sweeps").iterdir(), key=lambda path: path.name)
    return [(outcome.status, outcome.note) for outcome in read_outcomes(folder).values()]


POLICIES = ("policy=full,paged_eviction", "policy.budget=128,256")
SAME_AS_FIRST = ("skipped", "the same run as job 0")


@pytest.mark.slow
def test_jobs_fail_apart_run_once_and_are_skipped_when_finished(sweep, place):
    first = sweep(*POLICIES, "tracker=wandb_offline", SCRIPTED_KILLED_BUDGET="256", SCRIPTED_NEVER_EVICT="128")
    assert first.returncode == 1
    ok, killed = ("ok", ""), ("failed", "the run was killed by SIGKILL")
    *others, idle, last = latest_outcomes(place)
    assert (others, last) == ([ok, SAME_AS_FIRST], killed)
    assert idle[0] == "failed"
    assert idle[1].startswith("policy=paged_eviction with policy.budget=128 evicted nothing")
    assert f"error: {idle[1]}" in first.stderr
    assert "4 jobs: 1 ok, 1 skipped, 2 failed. Sweep folder" in first.stdout
    to_go_on = first.stdout.split("to go on, the same sweep again, or:\n")[1].splitlines()
    assert [re.search(r"policy=\S+ policy.budget=\d+", line)[0] for line in to_go_on] == [
        "policy=paged_eviction policy.budget=128",
        "policy=paged_eviction policy.budget=256",
    ]
    assert "Traceback" not in first.stderr

    second = sweep(*POLICIES)
    assert second.returncode == 1
    assert latest_outcomes(place) == [("skipped", "finished before"), SAME_AS_FIRST, idle, ok]
    assert idle[1].endswith("run it again with overwrite=true.")
    runs = list((place / "runs").iterdir())
    assert sorted(read_manifest(run).status for run in runs) == ["failed", "finished", "finished"]
    (reported,) = (path for run in runs for path in (run / "wandb").glob("offline-run-*"))
    assert reported.name.endswith(reported.parents[1].name), "of the one that finished with a tracker"


@pytest.mark.slow
def test_jobs_of_a_launcher_plugin_run_at_once_and_still_apart_and_once(byte_model, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs hydra-submitit-launcher")
    policies = ["policy=full,paged_eviction", "policy.budget=100,101", "hydra/launcher=submitit_local"]
    done = run_command(sweep_command(byte_model, tmp_path, *policies))
    full, others = latest_outcomes(tmp_path)[:2], latest_outcomes(tmp_path)[2:]
    owner = [status for status, _ in full].index("ok")
    assert full[1 - owner] == ("skipped", f"the same run as job {owner}")
    assert [status for status, _ in others] == ["failed", "failed"]
    assert all(note.startswith("policy.budget=10") for _, note in others)
    assert done.returncode == 1
    assert "4 jobs: 1 ok, 1 skipped, 2 failed." in done.stdout or "4 jobs: 1 skipped, 1 ok, 2 failed." in done.stdout
    assert "Traceback" not in done.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.slow
def test_a_job_that_is_queued_again_overwrites_once_and_then_goes_on(byte_model, tmp_path, monkeypatch):
    monkeypatch.setattr("harness.config_checks.inference_device", lambda: "cpu")
    monkeypatch.chdir(ROOT)
    settings = ["benchmark.tasks=[qasper]", "benchmark.limit=3", "overwrite=true"]
    job = Job(scripted_config(byte_model, tmp_path / "runs", *settings), "command", tmp_path / "sweep" / "0")
    job.sweep_folder.mkdir(parents=True)
    monkeypatch.setenv("SCRIPTED_CRASH_AFTER", "1")
    assert run_apart(job) == 1
    monkeypatch.delenv("SCRIPTED_CRASH_AFTER")
    assert run_apart(job) == 0
    manifest = read_manifest(only_folder(tmp_path / "runs"))
    assert [session.num_samples for session in manifest.sessions] == [1, 2]


@pytest.mark.slow
def test_ctrl_c_stops_the_whole_sweep(byte_model, tmp_path):
    process = subprocess.Popen(
        sweep_command(byte_model, tmp_path, "policy.budget=256,512"),
        cwd=ROOT,
        env=os.environ | {"SCRIPTED_DELAY_S": "60"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    give_up = time.monotonic() + GENEROUS_S
    while not list((tmp_path / "runs").glob("*/predictions.jsonl")):
        assert time.monotonic() < give_up
        assert process.poll() is None
        time.sleep(0.05)
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=GENEROUS_S)
    assert process.returncode == 130
    assert latest_outcomes(tmp_path) == [("interrupted", "")]
    assert "1 jobs: 1 interrupted" in output
    assert "Traceback" not in errors
    assert psutil.wait_procs(below, timeout=10)[1] == []


def test_a_run_belongs_to_the_first_job_that_claims_it_also_when_that_job_is_queued_again(tmp_path):
    first = claim(tmp_path / "0", "run")
    assert first.job == "0"
    assert claim(tmp_path / "1", "run") == first
    assert claim(tmp_path / "0", "run") == first
    assert claim(tmp_path / "1", "other").job == "1"
    assert claim(tmp_path / "policy=full-2", "third").job == "policy=full-2"


def test_a_new_sweep_in_the_folder_of_an_old_one_claims_anew(tmp_path, monkeypatch):
    for remembered in ("folder", "overwrites", "results"):
        monkeypatch.setattr(SweepCallback, remembered, None)
    monkeypatch.setattr("harness.run.sweep_check.problems_of_members", lambda config: [])
    monkeypatch.setattr("harness.run.sweep.announcement", lambda config: "")
    old = claim(tmp_path / "3", "run")
    SweepCallback().on_multirun_start(composed(f"hydra.sweep.dir={tmp_path}", return_hydra_config=True))
    new = claim(tmp_path / "3", "run")
    assert (new.job, new.name != old.name) == ("3", True)


def test_the_conclusion_lists_every_job_in_order_and_what_is_left_to_do(tmp_path, capsys):
    outcomes = {
        2: Outcome("ok", "command 2", "run-2", 12.5),
        10: Outcome("failed", "command 10", note="[bad] options"),
        11: Outcome("interrupted", "command 11"),
    }
    for number, outcome in outcomes.items():
        (tmp_path / str(number)).mkdir()
        write_outcome(tmp_path / str(number), outcome)
    (tmp_path / "12").mkdir()
    assert conclude(tmp_path) is False
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]
    assert [row[:3] for row in rows] == [
        ["2", "ok", "12.50"],
        ["10", "failed", "-"],
        ["11", "interrupted", "-"],
        ["12", "failed", "-"],
    ]
    assert rows[1][4] == "[bad] options"
    assert rows[3][4].startswith("its process ended without a word")
    assert "4 jobs: 1 ok, 2 failed, 1 interrupted." in printed
    assert printed.splitlines()[-2:] == ["  command 10", "  command 11"]


def test_a_sweep_of_done_jobs_is_done(tmp_path, capsys):
    for number, status in enumerate(("ok", "skipped")):
        (tmp_path / str(number)).mkdir()
        write_outcome(tmp_path / str(number), Outcome(status, "command"))
    assert conclude(tmp_path) is True
    assert "to go on" not in capsys.readouterr().out


def composed(*overrides: str, **more: bool):
    register_schema()
    with initialize_config_module(version_base="1.3", config_module="conf"):
        return compose("config", list(overrides), **more)


@pytest.mark.parametrize("word", ["overwrite=true", "++overwrite=true"])
def test_the_command_that_goes_on_has_every_setting_and_does_not_overwrite(tmp_path, word):
    place = f"hydra.searchpath=[file://{tmp_path}]"
    overrides = [place, "policy=h2o", word, "hydra.sweep.dir=elsewhere", "+policy.options.note='overwrite=true'"]
    config = composed(*overrides, return_hydra_config=True)
    settings = ["policy=h2o", "policy.options.note='overwrite=true'", "overwrite=false"]
    expected = ["python", "-m", "harness", place, *settings]
    assert shlex.split(resuming_command(config.hydra, config)) == expected
    config.hydra.job.config_name = "mine"
    expected[3:3] = ["--config-name", "mine"]
    assert shlex.split(resuming_command(config.hydra, config)) == expected


def test_a_configuration_that_overwrites_by_itself_goes_on_without():
    config = composed("policy=h2o", return_hydra_config=True)
    assert resuming_command(config.hydra, config) == "python -m harness policy=h2o"
    config.overwrite = True
    assert resuming_command(config.hydra, config) == "python -m harness policy=h2o overwrite=false"


def test_the_slurm_launcher_is_the_plugins_with_values_for_this_program():
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs hydra-submitit-launcher")
    launcher = composed("hydra/launcher=slurm", "hydra.launcher.partition=gpu", return_hydra_config=True).hydra.launcher
    assert launcher._target_.endswith("SlurmLauncher")
    assert (launcher.partition, launcher.gpus_per_node, launcher.array_parallelism) == ("gpu", 1, 8)


@pytest.mark.parametrize("backend", [None, "mp"])
def test_the_executor_of_vllm_is_reachable(backend, monkeypatch):
    monkeypatch.setattr("harness.config_checks.inference_device", lambda: "cpu")
    value = "null" if backend is None else backend
    config = to_dataclass(composed(f"engine.distributed_executor_backend={value}", "engine.tensor_parallel_size=2"))
    from harness.engines.choose import engine_shape

    shape = engine_shape(config, "model")
    assert (shape.distributed_executor_backend, shape.tensor_parallel_size) == (backend, 2)


@pytest.mark.parametrize(("device", "gib"), [("cpu", 64 * 32 * 2 * 30 * 3 * 64 * 4 / 2**30), ("cuda", None)])
def test_a_pool_counted_in_blocks_has_their_size_on_cpu(device, gib, monkeypatch):
    """Without a size vLLM's CPU worker claims most of the machine's memory, whatever the number of blocks."""
    from harness.engines.choose import engine_shape

    monkeypatch.setattr("harness.config_checks.inference_device", lambda: "cpu")
    monkeypatch.setattr("harness.engines.choose.inference_device", lambda: device)
    shape = engine_shape(to_dataclass(composed("engine.num_kv_blocks=64", "engine.block_size=32")), "model")
    assert (shape.num_kv_blocks, shape.kv_cache_gib) == (64, gib)


def test_an_executor_that_cannot_be_had_is_named(monkeypatch):
    monkeypatch.setattr("harness.config_checks.inference_device", lambda: "cpu")
    monkeypatch.setattr("harness.config_checks.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"engine.distributed_executor_backend=ray needs the package ray"):
        to_dataclass(composed("engine.distributed_executor_backend=ray"))
    with pytest.raises(UserError, match=r"engine.distributed_executor_backend=slurm is unknown. Use mp or ray"):
        to_dataclass(composed("engine.distributed_executor_backend=slurm"))


def wandb_sweep() -> dict:
    return yaml.safe_load((Path(conf.__file__).parent / "sweep" / "wandb.yml").read_text())


def agent_arguments(values: dict[str, object]) -> list[str]:
    """What the W&B agent puts in place of ${args_no_hyphens}."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    assert "${args_no_hyphens}" in wandb_sweep()["command"]
    return create_sweep_command_args({"args": {name: {"value": value} for name, value in values.items()}})[
        "args_no_hyphens"
    ]


def test_every_run_of_the_shipped_wandb_sweep_composes(monkeypatch):
    monkeypatch.setattr("harness.config_checks.inference_device", lambda: "cpu")
    parameters = wandb_sweep()["parameters"]
    fixed = {name: spec["value"] for name, spec in parameters.items() if "value" in spec}
    for policy in parameters["policy"]["values"]:
        for budget in parameters["policy.budget"]["values"]:
            config = to_dataclass(composed(*agent_arguments(fixed | {"policy": policy, "policy.budget": budget})))
            assert (config.policy.name, config.policy.budget) == (policy, budget)
            assert (config.tracker.name, config.tracker.mode) == ("wandb", "online")


def test_the_shipped_wandb_sweep_maximises_a_number_that_runs_report():
    from harness.tracking.wandb import summary

    overall = {"name": "all tasks", "score": 1.0, "ci_low": None, "ci_high": None}
    metrics = {"status": "finished", "tasks": [], "overall": overall, "memory": {}, "speed": {}, "eviction": {}}
    assert wandb_sweep()["metric"]["name"] in summary(metrics)
    assert [part for part in wandb_sweep()["command"] if part.startswith("--")] == []


def test_python_none_from_the_agent_is_refused_and_not_taken_for_a_value():
    (argument,) = agent_arguments({"policy.budget": None})
    with pytest.raises(UserError, match=r"policy\.budget='None' is neither a whole number"):
        to_dataclass(composed(argument))


def test_the_outcome_of_a_job_is_one_json_file(tmp_path):
    write_outcome(tmp_path, Outcome("ok", "command", "run", 1.5))
    assert json.loads((tmp_path / "outcome.json").read_text()) == {
        "status": "ok",
        "command": "command",
        "run_id": "run",
        "score": 1.5,
        "note": "",
    }
