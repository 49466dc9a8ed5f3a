"""Unequal counts on vLLM's GPU runner and FlashAttention backend, in a box (`box.py`)."""

from dataclasses import replace

import pytest

from harness.engines.contract import GenerationRequest
from harness.engines.vllm.ragged.refusals import layouts_of_pages
from harness.engines.vllm.settings import EvictionSettings
from tests.engines.vllm.box import Box, in_a_box
from tests.engines.vllm.live import run_live
from tests.policy_names import SENTENCE_ENDS
from tests.tiny_llama import random_prompt, save_tiny_llama

BUDGET = 128
LENGTHS = (5, 100, 257, 400, 333)


@pytest.fixture(scope="module")
def requests():
    return [GenerationRequest(f"r{n}", random_prompt(n, seed=n), 36, ignore_eos=True) for n in LENGTHS]


@pytest.fixture(scope="module")
def uneven(shape, tmp_path_factory):
    return replace(shape, model=str(save_tiny_llama(tmp_path_factory.mktemp("models") / "uneven", uneven=True)))


@pytest.mark.parametrize(
    ("name", "options", "overlapping"),
    [
        ("ada_kv", {"window": 16}, False),
        ("kv_compress", {"protect_last": 16}, True),
        pytest.param("mix_attention", {"full_every": 3, "share": 2}, True, marks=pytest.mark.parity),
        ("corm", {"window": 8, "protect_last": 24}, None),
    ],
)
def test_positions_and_texts_are_those_of_the_cpu_backend(uneven, requests, name, options, overlapping):
    """CORM's counts are known after a step only, so that by default it does not overlap with the next."""
    settings = EvictionSettings(name, None if name == "corm" else BUDGET, options)
    expected = run_live(uneven, settings, requests)
    with in_a_box(Box(graphs=not overlapping)) as box:
        boxed = run_live(replace(uneven, async_scheduling=overlapping), settings, requests)
    assert boxed.texts() == expected.texts()
    assert boxed.decisions == expected.decisions
    assert boxed.stats.num_evictions == expected.stats.num_evictions > 0
    assert boxed.stats.free_blocks_at_end == boxed.stats.num_blocks - 1
    assert box.steps["FULL"] == 0


@pytest.mark.parametrize(
    ("name", "budget", "options"),
    [
        ("quest", BUDGET, {"dense_layers": 1}),
        ("sentencekv", 2 * BUDGET, {"ends": SENTENCE_ENDS, "factor": 1.5, "window": 8}),
    ],
)
def test_what_is_read_is_that_of_the_cpu_backend(uneven, requests, name, budget, options):
    settings = EvictionSettings(name, budget, options)
    expected = run_live(uneven, settings, requests)
    with in_a_box(Box(graphs=True)) as box:
        boxed = run_live(replace(uneven, async_scheduling=True), settings, requests)
    assert boxed.texts() == expected.texts()
    assert boxed.decisions == expected.decisions
    assert boxed.stats.read == expected.stats.read
    assert sum(map(sum, boxed.stats.read.read)) < sum(map(sum, boxed.stats.read.resident))
    assert boxed.stats.free_blocks_at_end == boxed.stats.num_blocks - 1
    assert box.steps["FULL"] == 0


def test_only_the_layout_in_which_a_page_is_one_run_of_memory_is_asked_for(monkeypatch):
    assert layouts_of_pages(["LBNHC", "BLNHC", "LBHNC"]) == ["LBHNC"]
    with pytest.raises(ValueError, match="supports the KV cache layouts LBNHC, and this policy needs LBHNC"):
        layouts_of_pages(["LBNHC"])
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "NHD")
    with pytest.raises(ValueError, match="VLLM_KV_CACHE_LAYOUT=NHD mixes KV heads"):
        layouts_of_pages(["LBNHC", "LBHNC"])
