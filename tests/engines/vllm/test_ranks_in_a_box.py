"""Two tensor-parallel ranks on vLLM's GPU worker, runner and FlashAttention backend, in a box (`box.py`)."""

from dataclasses import replace

import pytest

from harness.engines.contract import GenerationRequest
from harness.engines.vllm.settings import EvictionSettings
from tests.engines.vllm.live import run_live
from tests.engines.vllm.ranks import Job, run_on_two_ranks
from tests.tiny_llama import random_prompt, save_tiny_llama

LENGTHS = (5, 100, 257, 400, 333)
REQUESTS = [GenerationRequest(f"r{n}", random_prompt(n, seed=n), 36, ignore_eos=True) for n in LENGTHS]
PAGED = EvictionSettings("paged_eviction", 64)
EQUAL = [EvictionSettings("h2o", 64), PAGED]
ELASTIC = EvictionSettings("elastic_cache", 64)
ADA_KV = EvictionSettings("ada_kv", 128, {"window": 16})

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def four_heads(shape, tmp_path_factory):
    """Two KV heads a rank, which attend in unlike ways."""
    folder = tmp_path_factory.mktemp("models") / "four_heads"
    return replace(shape, model=str(save_tiny_llama(folder, uneven=True, num_kv_heads=4)))


@pytest.fixture(scope="module")
def runs(four_heads, tmp_path_factory):
    jobs = [
        *(Job(settings, boxed=True) for settings in (*EQUAL, ADA_KV)),
        *(Job(settings, boxed=False) for settings in (PAGED, ELASTIC, ADA_KV)),
    ]
    return run_on_two_ranks(four_heads, jobs, REQUESTS, tmp_path_factory.mktemp("ranks"))


def assert_same(found, expected):
    assert found.texts() == expected.texts()
    assert found.decisions == expected.decisions
    assert found.stats.num_evictions == expected.stats.num_evictions > 0
    assert found.stats.free_blocks_at_end == found.stats.num_blocks - 1


@pytest.mark.parametrize("settings", EQUAL, ids=lambda settings: settings.policy)
def test_equal_counts_on_two_ranks_are_those_of_one_on_the_cpu_backend(four_heads, runs, settings):
    """Watched attention, each head its own choice; and one choice of all heads, from scores averaged over the ranks."""
    assert_same(runs[settings.policy, True], run_live(four_heads, settings, REQUESTS))


@pytest.mark.parametrize("settings", [PAGED, ELASTIC], ids=lambda settings: settings.policy)
def test_two_ranks_on_the_cpu_backend_answer_as_one(four_heads, runs, settings):
    """Scores that are averaged come with any strides: those of attention sums are not contiguous."""
    assert_same(runs[settings.policy, False], run_live(four_heads, settings, REQUESTS))


def test_unequal_counts_are_those_of_two_ranks_on_the_cpu_backend(runs):
    """Each rank splits the pages of its own heads, so one rank would choose otherwise."""
    found = runs["ada_kv", True]
    assert_same(found, runs["ada_kv", False])
    first = found.decisions["r400"][0]
    for ranks_heads in (slice(0, 2), slice(2, 4)):
        counts = [[len(head) for head in heads[ranks_heads]] for heads in first.kept]
        assert any(one != other for one, other in counts)
        assert {sum(pair) for pair in counts} == {2 * ADA_KV.budget}
