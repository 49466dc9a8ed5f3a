"""Which GPUs a process may use, by a stand-in for nvidia-smi, so that it is checked on machines without one too."""

import pytest

from harness.hardware import cuda_gpus

LISTING = """0, GPU-aa11, 81559, NVIDIA H100 80GB HBM3
1, GPU-bb22, 143771, NVIDIA H200
"""
H100, H200 = ("NVIDIA H100 80GB HBM3", 79.6), ("NVIDIA H200", 140.4)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (H100, H200)),
        ("0,1", (H100, H200)),
        ("1", (H200,)),
        ("GPU-aa", (H100,)),
        ("MIG-cc33", (H100, H200)),
        ("7", ()),
        ("", ()),
        ("-1", ()),
    ],
)
def test_only_the_gpus_that_cuda_may_see_are_counted(visible, expected, tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTING}END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cuda_gpus.__wrapped__() == expected
