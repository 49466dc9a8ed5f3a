"""Real vLLM engines on a tiny random Llama, in this process."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM (make setup)")

from harness.engines.vllm.environment import prepare_environment

prepare_environment(in_process=True)

from harness.engines.vllm.arguments import EngineShape
from tests.engines.vllm.quick import old_objects_are_no_garbage
from tests.tiny_llama import save_tiny_llama


@pytest.fixture(scope="module", autouse=True)
def quick_engines():
    """See `old_objects_are_no_garbage`."""
    with old_objects_are_no_garbage():
        yield


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


@pytest.fixture
def copies_as_on_a_gpu(monkeypatch):
    """Host numbers really go to the device: vLLM's CPU worker, once imported, replaces the copy by none."""
    import torch

    from harness.engines.vllm import compaction
    from harness.engines.vllm.ragged import table
    from harness.engines.vllm.signals import mass, newest, page_sums, window

    def copied(data, device=None, dtype=None, out=None):
        host = torch.as_tensor(data, dtype=dtype)
        return host.to(device, non_blocking=True) if out is None else out.copy_(host, non_blocking=True)

    for module in (compaction, table, mass, newest, page_sums, window):
        monkeypatch.setattr(module, "async_tensor_h2d", copied)
