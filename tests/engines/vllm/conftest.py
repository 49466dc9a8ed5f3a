"""Real vLLM engines on a tiny random Llama, in this process."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM (make setup)")

from harness.engines.vllm.environment import prepare_environment

prepare_environment(in_process=True)

from harness.engines.vllm.arguments import EngineShape
from tests.tiny_llama import save_tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Folder of the tiny Llama."""
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def shape(tiny_model):
    """An engine with room for everything."""
    return EngineShape(
        model=str(tiny_model),
        dtype="float32",
        max_model_len=1024,
        block_size=32,
        kv_cache_gib=0.25,
        num_kv_blocks=300,
        max_num_batched_tokens=512,
    )
