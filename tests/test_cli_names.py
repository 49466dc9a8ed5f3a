"""Misspelt names on the command line: one line, the nearest right name, exit code 1; nothing is started."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("program", "argument", "words"),
    [
        (
            "harness",
            "policy=pagedeviction",
            "is not an option of policy. Did you mean policy=paged_eviction?",
        ),
        ("harness", "model=llama-3.1-8b", "Did you mean model=llama3.1-8b?"),
        ("harness", "policy.buget=256", "policy.buget is not a key. Did you mean policy.budget?"),
        ("harness", "+policy.buget=256", "policy.buget is not a key. Did you mean policy.budget?"),
        ("harness", "+hydra.swep.dir=x", "hydra.swep is not a key. Did you mean hydra.sweep?"),
        ("harness.bench", "preset=cpucurve", "Did you mean preset=cpu_curve?"),
        ("harness.bench", "+load.num_request=3", "load.num_request is not a key. Did you mean load.num_requests?"),
        ("harness.bench", "load.num_request=3", "load.num_request is not a key. Did you mean load.num_requests?"),
    ],
)
def test_a_misspelt_name_is_one_line_with_the_right_one(program, argument, words):
    done = subprocess.run(
        [sys.executable, "-m", program, argument], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert "+" not in line
