"""What vLLM reads from the environment."""

import os

import pytest

from harness.engines.vllm import environment


@pytest.fixture
def variables(monkeypatch):
    variables = {}
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(environment, "num_cores", lambda: 8)
    monkeypatch.setattr(environment, "inference_device", lambda: "cpu")
    return variables


@pytest.mark.parametrize(("num_workers", "threads"), [(1, "7"), (2, "3"), (16, "1")])
def test_workers_leave_a_core_to_the_engine_that_waits_for_them(variables, num_workers, threads):
    environment.prepare_environment(in_process=False, num_workers=num_workers)
    assert variables["OMP_NUM_THREADS"] == threads


def test_threads_are_not_limited_in_one_process_on_a_gpu_or_against_the_user(variables, monkeypatch):
    environment.prepare_environment(in_process=True)
    assert "OMP_NUM_THREADS" not in variables
    variables["OMP_NUM_THREADS"] = "2"
    environment.prepare_environment(in_process=False)
    assert variables["OMP_NUM_THREADS"] == "2"
    del variables["OMP_NUM_THREADS"]
    monkeypatch.setattr(environment, "inference_device", lambda: "cuda")
    environment.prepare_environment(in_process=False)
    assert "OMP_NUM_THREADS" not in variables
