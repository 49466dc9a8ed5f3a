"""Defaults and presets of GPUs fill the pool of the card that is there."""

import pytest

from harness.errors import UserError
from harness.pool import pool_tokens, sequences_that_fill
from tests.bench.scripted_server import composed_plan
from tests.test_config import composed
from tests.test_models import LLAMA

CARDS = {"24 GB": 24.0, "80 GB": 79.6, "141 GB": 139.8}


def on_gpus(monkeypatch, *memories):
    for module in ("harness.config_checks", "harness.bench.config"):
        monkeypatch.setattr(f"{module}.inference_device", lambda: "cuda")
        monkeypatch.setattr(f"{module}.cuda_gpus", lambda: tuple(("GPU", memory) for memory in memories))


def test_tokens_of_an_8b_model_by_arithmetic():
    """131,072 bytes a token: 2 x 32 layers x 8 heads x 128 x 2 bytes."""
    assert pool_tokens(LLAMA, [24.0]) == int((0.9 * 24 - 15 - 2) * 2**30) // 131_072
    assert pool_tokens(LLAMA, [24.0, 24.0]) == int((0.9 * 48 - 15 - 4) * 2**30) // 131_072
    assert pool_tokens(LLAMA, [16.0]) == 0


@pytest.mark.parametrize(("card", "sequences"), [("24 GB", 64), ("80 GB", 512), ("141 GB", 512)])
def test_sequences_of_a_card(monkeypatch, card, sequences):
    on_gpus(monkeypatch, CARDS[card])
    engine = composed("model=llama3.1-8b").engine
    assert (engine.max_num_seqs, engine.enforce_eager) == (sequences, False)
    tokens = pool_tokens(LLAMA, [CARDS[card]])
    assert sequences == sequences_that_fill(tokens)
    assert sequences == 512 or sequences * 1024 >= tokens


def test_a_cpu_stays_as_it_was():
    engine = composed().engine
    assert (engine.max_num_seqs, engine.enforce_eager) == (16, True)


def test_ray_may_have_more_gpus_than_this_machine(monkeypatch):
    on_gpus(monkeypatch, 80.0, 80.0)
    monkeypatch.setattr("harness.config_checks.find_spec", lambda name: object())
    engine = composed("engine.tensor_parallel_size=4", "engine.distributed_executor_backend=ray").engine
    assert engine.tensor_parallel_size == 4
    with pytest.raises(UserError, match=r"only 2 CUDA GPUs .* engine.distributed_executor_backend=ray"):
        composed("engine.tensor_parallel_size=4")


@pytest.mark.parametrize("card", CARDS)
def test_a_load_that_fills_the_pool(monkeypatch, card):
    on_gpus(monkeypatch, CARDS[card])
    plan = composed_plan("preset=full_pool", "model=llama3.1-8b", "load_format=dummy")
    needed = plan.config.load.num_requests * (2048 + 1024)
    assert needed > 1.8 * pool_tokens(plan.config.model, [CARDS[card]])


def test_without_a_gpu_a_number_is_asked_for():
    with pytest.raises(UserError, match=r"load.num_requests=null means twice what a GPU's KV pool holds"):
        composed_plan("preset=full_pool", "load_format=dummy")
