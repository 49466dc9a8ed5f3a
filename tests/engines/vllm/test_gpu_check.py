"""`make gpu-check`: what it prints, and what it says where there is nothing to check."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from harness.engines.vllm import gpu_check

ROOT = Path(__file__).resolve().parents[3]
CHECKS = """
import pytest

def test_tokens_are_equal(record_property):
    record_property("note", "2.5 x [fast]")

def test_blocks_return():
    raise AssertionError("3 blocks lost")

def test_broken_set_up(absent):
    pass

@pytest.mark.skip(reason="one GPU only")
def test_two_ranks():
    pass

@pytest.mark.parametrize("name", ["a[b]"])
def test_policy(name):
    pass
"""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """Read from the report of a real run."""
    folder = tmp_path_factory.mktemp("checks")
    (folder / "test_checks.py").write_text(CHECKS)
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(folder), "--junitxml", "report.xml"]
    subprocess.run(command, cwd=folder, capture_output=True, check=False)
    return {verdict.check: verdict for verdict in gpu_check.read_verdicts(folder / "report.xml")}


def test_each_check_gets_a_verdict(verdicts):
    results = {name: verdict.result for name, verdict in verdicts.items()}
    assert results == {
        "tokens are equal": "passed",
        "blocks return": "failed",
        "broken set up": "failed",
        "two ranks": "skipped",
        "policy[a[b]]": "passed",
    }


def test_a_verdict_says_what_was_measured_or_why_it_is_not_a_pass(verdicts):
    assert verdicts["tokens are equal"].note == "2.5 x [fast]"
    assert verdicts["blocks return"].note == "AssertionError: 3 blocks lost"
    assert verdicts["two ranks"].note == "one GPU only"


def test_the_table_shows_all_of_it(verdicts):
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(gpu_check.table_of(list(verdicts.values()), "gpu-check on GPU"))
    text = console.export_text()
    for verdict in verdicts.values():
        assert verdict.check in text
        assert verdict.note in text


def test_without_a_gpu_there_is_one_clear_error():
    result = subprocess.run(
        [sys.executable, "-m", "harness.engines.vllm.gpu_check"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == gpu_check.CANNOT_RUN
    assert result.stderr.startswith("error: gpu-check: no CUDA device found")
    assert "Traceback" not in result.stderr


def test_a_cpu_build_of_vllm_beside_a_gpu_is_told(monkeypatch):
    monkeypatch.setattr(gpu_check, "cuda_gpus", lambda: (("GPU", 80.0),))
    monkeypatch.setattr(gpu_check, "inference_device", lambda: "cpu")
    assert "make setup EXTRA=gpu" in gpu_check.reason_not_to_run()
    monkeypatch.setattr(gpu_check, "inference_device", lambda: "cuda")
    assert gpu_check.reason_not_to_run() is None


def test_a_dry_run_collects_the_checks_and_reads_the_load_tests():
    result = subprocess.run(
        [sys.executable, "-m", "harness.engines.vllm.gpu_check", "--dry-run"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    for check in ("test_bfloat16_texts_and_positions[h2o]", "test_server_answers_24_clients[paged_eviction]"):
        assert check in result.stdout
    for name in gpu_check.LOAD_TESTS:
        assert name in result.stdout


def test_load_tests_stop_when_their_time_is_over(monkeypatch, capsys):
    sleepy = [sys.executable, "-c", "import time; time.sleep(30)"]
    monkeypatch.setattr(gpu_check, "load_test_command", lambda arguments: sleepy)
    assert not gpu_check.print_rows(1)
    said = capsys.readouterr().out
    assert "stopped: 1 s for all load tests are over" in said
    assert f"0 of {len(gpu_check.LOAD_TESTS)} load tests finished" in said
    monkeypatch.setattr(gpu_check, "load_test_command", lambda arguments: [sys.executable, "-c", "print('row')"])
    assert gpu_check.print_rows(60)
