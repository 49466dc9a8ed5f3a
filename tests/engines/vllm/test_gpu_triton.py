"""Eviction between vLLM's own Triton kernels: they write the cache, the compactor evicts, they attend to what is left.

The kernels run on CPU tensors in Triton's interpreter, on caches of every memory layout that vLLM knows.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm.v1.kv_cache_layout import KVCacheLayout

ROOT = Path(__file__).resolve().parents[3]
ROUNDING = 1e-5  # float32; the kernel sums tile by tile

pytest.importorskip("triton", reason="needs Triton (Linux)")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def errors():
    result = subprocess.run(
        [sys.executable, "-m", "tests.gpu.interpreted_kernels"], cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.name)
def test_attention_after_an_eviction_is_attention_to_the_kept_tokens(errors, layout):
    resident, logical = errors[layout.name]
    assert resident < ROUNDING
    assert logical > 100 * ROUNDING, "with the lengths before the eviction the same comparison fails"
