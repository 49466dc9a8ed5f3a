"""Runs that end in the middle: killed, out of disk, started twice, edited; the same command then goes on."""

import contextlib
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest

from harness.config import HarnessConfig
from harness.errors import UserError
from harness.run.experiment import run
from harness.store.manifest import read_manifest
from tests.scripted_run import COMMAND, GENEROUS_S, by_id, only_folder, scripted_config, wait_for

ROOT = Path(__file__).resolve().parents[2]
NUM_KILLS = 20
NUM_SAMPLES = 24
TASKS = ["benchmark.tasks=[qasper,trec,lcc]", "benchmark.limit=8"]
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def config(byte_model, tmp_path, monkeypatch) -> HarnessConfig:
    """A run of 24 samples."""
    monkeypatch.setattr("harness.config_checks.inference_device", lambda: "cpu")
    return scripted_config(byte_model, tmp_path / "runs", *TASKS)


@pytest.fixture
def whole(config, tmp_path) -> dict:
    """The predictions of the same run, undisturbed."""
    run(config, COMMAND)
    only_folder(tmp_path / "runs").rename(tmp_path / "whole")
    return by_id(tmp_path / "whole")


def start(config: HarnessConfig, prepare: Callable[[], None] = lambda: None) -> multiprocessing.Process:
    """The run in a process of its own, which imports nothing anew; its exit code is 0, or 3 after a UserError."""

    def in_process() -> None:
        os.setsid()
        prepare()
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
            try:
                run(config, COMMAND)
            except UserError as error:
                sys.stderr.write(str(error))
                sys.exit(3)

    process = FORK.Process(target=in_process)
    process.start()
    return process


def ignoring_scores(predictions: dict) -> dict:
    return {name: (p.prediction, p.num_prompt_tokens, p.num_evicted_tokens) for name, p in predictions.items()}


@pytest.mark.slow
def test_20_kills_at_random_moments_leave_the_predictions_of_an_undisturbed_run(config, whole, tmp_path, monkeypatch):
    monkeypatch.setenv("SCRIPTED_DELAY_S", "0.02")
    moments = random.Random(0)
    results, num_kills, num_finished, longest, kept = tmp_path / "runs", 0, 0, 2.0, {}
    while num_kills < NUM_KILLS or not num_finished:
        began = time.monotonic()
        process = start(config)
        process.join(GENEROUS_S if num_kills >= NUM_KILLS else moments.uniform(0, longest))
        if process.is_alive():
            process.kill()
            process.join()
            num_kills += 1
        found = by_id(only_folder(results)) if results.exists() and any(results.iterdir()) else {}
        assert kept.keys() <= found.keys()
        assert ignoring_scores(found) == {name: ignoring_scores(whole)[name] for name in found}
        kept = found
        if process.exitcode == 0:
            check_undisturbed(only_folder(results), whole)
            shutil.rmtree(results)
            num_finished, longest, kept = num_finished + 1, time.monotonic() - began, {}


def check_undisturbed(folder: Path, whole: dict) -> None:
    manifest = read_manifest(folder)
    assert by_id(folder) == whole
    assert manifest.status == "finished"
    assert json.loads((folder / "metrics.json").read_text())["overall"]["n"] == NUM_SAMPLES
    assert sorted(path.name for path in folder.iterdir() if path.name != "block_usage.csv") == [
        ".lock",
        "manifest.json",
        "metrics.json",
        "predictions.jsonl",
        "summary.csv",
    ]
    if (folder / "block_usage.csv").exists():
        assert pd.read_csv(folder / "block_usage.csv")["session"].max() <= len(manifest.sessions)


def test_a_second_process_on_the_same_run_is_refused(config, tmp_path, monkeypatch):
    monkeypatch.setenv("SCRIPTED_DELAY_S", "1")
    first = start(config)
    try:
        wait_for(lambda: list((tmp_path / "runs").glob("*/predictions.jsonl")))
        with pytest.raises(UserError, match=rf"in use by process {first.pid}"):
            run(config, COMMAND)
    finally:
        first.kill()
        first.join()


@pytest.mark.parametrize("status", ["failed", "finished"])
def test_a_record_that_was_edited_is_refused_with_the_difference(config, tmp_path, monkeypatch, status):
    if status == "failed":
        monkeypatch.setenv("SCRIPTED_CRASH_AFTER", "1")
    with contextlib.suppress(RuntimeError):
        run(config, COMMAND)
    path = only_folder(tmp_path / "runs") / "manifest.json"
    record = json.loads(path.read_text())
    assert record["status"] == status
    record["config"]["policy"]["budget"] = 256
    record["config"]["tracker"]["name"] = "wandb"
    path.write_text(json.dumps(record))
    with pytest.raises(UserError) as refused:
        run(config, COMMAND)
    assert "not the record of this run: policy.budget is 256 there and 512 here. Move" in str(refused.value)


def test_a_record_that_is_no_record_is_refused(config, tmp_path):
    run(config, COMMAND)
    path = only_folder(tmp_path / "runs") / "manifest.json"
    path.write_text(path.read_text()[:100])
    with pytest.raises(UserError, match=r"manifest\.json is no manifest"):
        run(config, COMMAND)


def limit_files(num_bytes: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


@pytest.mark.parametrize("num_bytes", [2_000, 10_000])
def test_a_file_that_may_not_grow_ends_the_run_in_one_message(config, whole, tmp_path, capfd, num_bytes):
    process = start(config, limit_files(num_bytes))
    process.join(GENEROUS_S)
    assert process.exitcode == 3
    message = capfd.readouterr().err
    assert re.search(r"/runs/\S+: File too large\. Finished samples are kept; mend that and run", message)
    folder = only_folder(tmp_path / "runs")
    assert len(by_id(folder)) == (0 if num_bytes == 2_000 else pytest.approx(12, abs=8))
    run(config, COMMAND)
    check_undisturbed(folder, whole)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A disk of 96 KiB at the place of the results: twice the predictions, which are written anew at the end."""
    disk = tmp_path / "runs"
    disk.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("num_free_bytes", [4096, 16384, 28672])
def test_a_full_disk_ends_the_run_in_one_message_and_loses_nothing(
    config, whole, small_disk, tmp_path, capfd, num_free_bytes
):
    (tmp_path / "runs" / "filler").write_bytes(b"x" * (96 * 1024 - num_free_bytes))
    process = start(config)
    process.join(GENEROUS_S)
    assert process.exitcode == 3
    message = capfd.readouterr().err
    assert re.search(r"/runs/\S+: No space left on device\. Finished samples are kept", message)
    (small_disk / "filler").unlink()
    folder = only_folder(small_disk)
    kept = ignoring_scores(by_id(folder))
    assert kept == {name: ignoring_scores(whole)[name] for name in kept}
    run(config, COMMAND)
    check_undisturbed(folder, whole)
