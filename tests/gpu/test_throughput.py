"""Whether eviction pays: a pool that holds 15 whole requests at once, or all 64 pruned ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]


def measure(name):
    result = subprocess.run(
        [sys.executable, "-m", "tests.gpu.throughput", name], cwd=ROOT, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.strip().splitlines()[-1])


def test_eviction_raises_the_throughput_of_a_full_pool(record_property):
    full, paged = measure("full"), measure("paged_eviction")
    ratio = paged["tokens_per_s"] / full["tokens_per_s"]
    record_property(
        "note",
        f"{ratio:.2f} x full cache ({full['tokens_per_s']:.0f} -> {paged['tokens_per_s']:.0f} tokens/s, "
        f"{paged['eviction_host_share']:.1%} of the time queueing evictions)",
    )
    assert full["evictions"] == full["preemptions"] == paged["preemptions"] == 0
    assert paged["evictions"] >= 64
    assert ratio > 1
