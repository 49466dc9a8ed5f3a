"""Models for a machine with a CUDA device; everything here is skipped without one (see tests/conftest.py)."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM (make setup)")

from harness.engines.contract import GenerationRequest
from harness.engines.vllm.arguments import EngineShape
from harness.hardware import inference_device
from tests.tiny_llama import random_prompt, save_tiny_llama

BLOCK = 16
LENGTHS = (5, 31, 64, 100, 257, 400, 600, 333)


@pytest.fixture(scope="session", autouse=True)
def cuda_build(request):
    """Vllm for CUDA, not only a device."""
    if inference_device() != "cuda" and any(item.get_closest_marker("gpu") for item in request.session.items):
        pytest.skip("needs vLLM for CUDA (make setup EXTRA=gpu)")


@pytest.fixture(scope="session")
def shape(tmp_path_factory):
    """An engine of the tiny Llama in float32, with room for everything."""
    return EngineShape(
        model=str(save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")),
        dtype="float32",
        max_model_len=1024,
        block_size=BLOCK,
        kv_cache_gib=0.25,
        num_kv_blocks=600,
        max_num_batched_tokens=512,
    )


@pytest.fixture(scope="session")
def requests():
    """Mixed lengths, below and above every budget used here."""
    return [GenerationRequest(f"r{n}", random_prompt(n, seed=n), 60, ignore_eos=True) for n in LENGTHS]
