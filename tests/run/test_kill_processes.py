"""The command line and the real engine, killed and interrupted: nothing is left running, nothing is lost."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.store.manifest import read_manifest
from tests.scripted_run import GENEROUS_S, by_id, only_folder, wait_for

ROOT = Path(__file__).resolve().parents[2]


def command_line(model: Path, results: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "harness", f"model.path={model}", f"results_dir={results}", *arguments]


def answered(results: Path) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in results.glob("*/predictions.jsonl"))


@pytest.fixture
def begin(tmp_path):
    """Start the command line and wait until a sample is answered; returns the process and all below it."""
    begun = []

    def begin_run(command: list[str], **environment: str) -> tuple[subprocess.Popen, list[psutil.Process]]:
        before = answered(tmp_path / "runs")
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            stderr=subprocess.PIPE,
            text=True,
            stdout=subprocess.DEVNULL,
        )
        begun.append(process)
        wait_for(lambda: answered(tmp_path / "runs") > before or process.poll() is not None)
        assert process.poll() is None, process.stderr.read()
        return process, psutil.Process(process.pid).children(recursive=True)

    yield begin_run
    for process in begun:
        process.kill()
        process.communicate()


@pytest.fixture
def scripted(byte_model, tmp_path) -> list[str]:
    """A run of six samples."""
    tasks = ["benchmark.tasks=[qasper,trec,lcc]", "benchmark.limit=2"]
    return command_line(byte_model, tmp_path / "runs", "engine.name=tests.scripted_engine:ScriptedEngine", *tasks)


@pytest.mark.slow
def test_where_the_one_that_watches_is_killed_nothing_is_left_running_and_the_same_command_goes_on(
    scripted, tmp_path, begin
):
    parent, below = begin(scripted, SCRIPTED_DELAY_S="0.5")
    parent.kill()
    parent.communicate(timeout=GENEROUS_S)
    assert psutil.wait_procs(below, timeout=10)[1] == []
    assert 1 <= len(by_id(only_folder(tmp_path / "runs"))) < 6
    subprocess.run(scripted, cwd=ROOT, check=True, capture_output=True, timeout=GENEROUS_S)
    assert len(by_id(only_folder(tmp_path / "runs"))) == 6


@pytest.mark.slow
def test_where_the_one_that_works_is_killed_the_other_says_so_and_how_to_go_on(scripted, tmp_path, begin):
    parent, below = begin(scripted, SCRIPTED_DELAY_S="0.5")
    below[0].kill()
    _, errors = parent.communicate(timeout=GENEROUS_S)
    assert psutil.wait_procs(below, timeout=10)[1] == []
    assert parent.returncode == 1
    assert errors.startswith("error: the run was killed by SIGKILL (out of memory?). Finished samples are kept; to go")
    assert 1 <= len(by_id(only_folder(tmp_path / "runs"))) < 6


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> Path:
    """A tiny Llama for the real engine."""
    pytest.importorskip("vllm", reason="needs vLLM (make setup)")
    from tests.tiny_llama import save_tiny_llama

    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


def real_run(model: Path, results: Path, limit: int) -> list[str]:
    """A run of the real engine in processes of its own, one request at a time, so that texts are comparable."""
    settings = ["model.max_model_len=2048", "engine.kv_cache_gib=0.25", "engine.max_num_seqs=1", "policy.budget=256"]
    tasks = ["benchmark.tasks=[gov_report]", f"benchmark.limit={limit}", "engine.in_process=false"]
    return command_line(model, results, *settings, *tasks)


@pytest.mark.parity
def test_vllm_killed_in_the_middle_goes_on_to_the_predictions_of_an_undisturbed_run(tiny_model, tmp_path, begin):
    command = real_run(tiny_model, tmp_path / "runs", limit=10)
    for victim in (lambda parent, below: parent, lambda parent, below: below[0]):
        parent, below = begin(command)
        psutil.Process(victim(parent, below).pid).kill()
        assert psutil.wait_procs(below, timeout=15)[1] == []
        parent.wait(GENEROUS_S)
    for each in (command, real_run(tiny_model, tmp_path / "whole", limit=10)):
        subprocess.run(each, cwd=ROOT, check=True, capture_output=True, timeout=GENEROUS_S)
    killed, whole = by_id(only_folder(tmp_path / "runs")), by_id(only_folder(tmp_path / "whole"))
    assert {name: (p.prediction, p.score) for name, p in killed.items()} == {
        name: (p.prediction, p.score) for name, p in whole.items()
    }
    assert len(read_manifest(only_folder(tmp_path / "runs")).sessions) == 3


@pytest.mark.slow
def test_ctrl_c_ends_vllm_in_seconds_and_in_silence(tiny_model, tmp_path, begin):
    parent, below = begin(real_run(tiny_model, tmp_path / "runs", limit=20))
    for process in (parent, *below):
        if os.getpgid(process.pid) == os.getpgid(parent.pid):
            os.kill(process.pid, signal.SIGINT)
    began = time.monotonic()
    _, errors = parent.communicate(timeout=GENEROUS_S)
    assert time.monotonic() - began < 20
    assert parent.returncode == 130
    assert [line for line in errors.splitlines() if line and "warn" not in line.lower()][-1].startswith("interrupted;")
    assert not re.search(r"Traceback|leaked|Error", errors), errors
    assert psutil.wait_procs(below, timeout=10)[1] == []
    assert read_manifest(only_folder(tmp_path / "runs")).status == "interrupted"
