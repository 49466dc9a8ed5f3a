"""Policies with unequal counts give the same answers however the engine is run, in as many blocks as equal ones."""

from dataclasses import replace

import pytest

from harness.engines.contract import GenerationRequest
from harness.engines.vllm.settings import EvictionSettings
from tests.engines.vllm.live import run_live
from tests.engines.vllm.test_modes import LENGTHS, run_asynchronously, run_in_other_processes
from tests.tiny_llama import random_prompt, save_tiny_llama

BUDGET = 128
ADA_KV = EvictionSettings("ada_kv", BUDGET, {"window": 16})


@pytest.fixture(scope="module")
def requests():
    return [GenerationRequest(f"r{n}", random_prompt(n, n), 50 + n % 40, (2,), ignore_eos=n % 3 > 0) for n in LENGTHS]


@pytest.fixture(scope="module")
def uneven(shape, tmp_path_factory):
    """The engine of `shape` over a model whose heads attend in unlike ways."""
    return replace(shape, model=str(save_tiny_llama(tmp_path_factory.mktemp("models") / "uneven", uneven=True)))


@pytest.fixture(scope="module")
def together(uneven, requests):
    return run_live(replace(uneven, max_num_seqs=16), ADA_KV, requests)


def test_sixteen_mixed_requests_together_answer_as_one_at_a_time(uneven, requests, together):
    alone = run_live(replace(uneven, max_num_seqs=1), ADA_KV, requests)
    assert together.texts() == alone.texts()
    assert together.decisions == alone.decisions
    kept = [decision.kept for decisions in together.decisions.values() for decision in decisions]
    assert any(len({len(head) for heads in layers for head in heads}) > 2 for layers in kept)


def test_how_vllm_chunks_the_prefill_does_not_matter(uneven, requests, together):
    chunked = run_live(replace(uneven, max_num_batched_tokens=100, max_num_seqs=8), ADA_KV, requests)
    assert chunked.texts() == together.texts()


def test_a_mean_budget_takes_as_many_blocks_as_an_equal_one(uneven, requests, together):
    equal = run_live(replace(uneven, max_num_seqs=16), EvictionSettings("snapkv", BUDGET, {"window": 16}), requests)
    for request in (request for request in requests if request.ignore_eos):  # others end where their text does
        found, expected = (run.results[request.request_id].eviction for run in (together, equal))
        assert found.peak_blocks == expected.peak_blocks
    assert together.stats.free_blocks_at_end == together.stats.num_blocks - 1


def test_asynchronous_scheduling_gives_the_same_text(uneven, requests, together):
    texts, evicted = run_asynchronously(uneven, ADA_KV, requests)
    assert texts == together.texts()
    assert evicted >= together.stats.num_evicted_tokens


def test_where_the_data_decide_asynchronous_scheduling_is_refused(uneven, requests):
    with pytest.raises(ValueError, match=r"policy=corm .* async_scheduling=False"):
        run_asynchronously(uneven, EvictionSettings("corm"), requests)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "num_ranks"),
    [
        pytest.param(EvictionSettings("corm", options={"window": 8, "protect_last": 24}), 1, id="corm"),
        pytest.param(ADA_KV, 2, id="ada_kv on two ranks", marks=pytest.mark.parity),
    ],
)
def test_other_processes_evict_and_give_everything_back(uneven, requests, tmp_path, settings, num_ranks):
    """What stays of a request comes back from another process; each rank splits the pages of its own heads."""
    found = run_in_other_processes(tmp_path, replace(uneven, tensor_parallel_size=num_ranks), settings, requests)
    here = run_live(uneven, settings, requests)
    assert found["free"] == here.stats.num_blocks - 1
    assert found["evicted"] == here.stats.num_evicted_tokens > 0
    if num_ranks == 1:
        assert found["texts"] == here.texts()


def test_a_list_of_heads_is_refused_where_ranks_divide_them():
    from types import SimpleNamespace

    model = SimpleNamespace(
        get_num_layers=lambda parallel: 3, get_total_num_kv_heads=lambda: 2, get_num_kv_heads=lambda parallel: 1
    )
    config = SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(tensor_parallel_size=2))
    settings = EvictionSettings("head_classes", BUDGET, {"heads": [[0, 1]]})
    with pytest.raises(ValueError, match=r"policy=head_classes .* tensor_parallel_size=2"):
        settings.model_policy(config, 32)
    by_layer = EvictionSettings("mix_attention", BUDGET, {"full_every": 3})
    assert by_layer.model_policy(config, 32).whole_rows == [[True], [False], [False]]
