"""Every policy runs on a CUDA device, evicts, gives its blocks back, and never makes the host wait for the device."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.policy_names import EQUAL

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
SHORT_WINDOWS = {
    "snapkv": {"window": 16},
    "chunkkv": {"window": 16},
    "lagkv": {"lag": 16},
    "cascading": {"protect_first": 4},
}
POLICIES = {name: SHORT_WINDOWS.get(name, {}) for name in sorted(EQUAL)}


@pytest.fixture(scope="module")
def outcomes(shape, requests):
    job = {"shape": asdict(shape), "requests": [asdict(request) for request in requests], "policies": POLICIES}
    result = subprocess.run(
        [sys.executable, "-m", "tests.gpu.every_policy"], cwd=ROOT, input=json.dumps(job), capture_output=True,
        env=os.environ | {"VLLM_GPU_SYNC_CHECK": "error"}, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_runs_without_waiting_and_gives_its_blocks_back(outcomes, requests, name):
    outcome = outcomes[name]
    assert outcome["error"] is None
    assert outcome["lengths"] == [request.max_new_tokens for request in requests]
    assert (outcome["evictions"] > 0) == (name != "full")
    assert outcome["lost_blocks"] == 0
