"""`retention.jsonl` of a real engine: what is left of every prompt, and at the end after the last eviction."""

from dataclasses import replace
from operator import attrgetter

import pytest

from harness.engines.hf.engine import ReferenceEngine
from harness.engines.vllm.settings import EvictionSettings
from harness.retention import read_retention
from policies import build_policy
from tests.engines.vllm.live import run_live
from tests.retention_samples import BUDGET, LENGTHS, REQUESTS, window


@pytest.fixture(scope="module", params=[False, True], ids=["in turn", "overlapping steps"])
def found(request, shape, tmp_path_factory):
    folder = tmp_path_factory.mktemp("retention")
    settings = EvictionSettings("streaming_llm", budget=BUDGET, retention=str(folder))
    run_live(replace(shape, async_scheduling=request.param), settings, REQUESTS)
    return read_retention(folder)


def test_every_sample_has_both_moments_once(found):
    assert sorted((record.sample_id, record.phase) for record in found) == sorted(
        (name, phase) for name in LENGTHS for phase in ("prefill_end", "end")
    )


def test_the_positions_are_those_of_the_policy_and_never_more_than_its_budget(found):
    for record in found:
        assert record.num_prompt_tokens == LENGTHS[record.sample_id][0]
        for layer in record.layers:
            assert all(positions == window(record.sample_id, record.phase) for positions in layer), record.sample_id


def test_the_reference_records_the_same(found, shape, tmp_path):
    policy = build_policy("streaming_llm", budget=BUDGET, block_size=shape.block_size)
    list(ReferenceEngine(shape.model, policy, retention=tmp_path).generate(REQUESTS))
    key = attrgetter("sample_id", "phase")
    assert sorted(read_retention(tmp_path), key=key) == sorted(found, key=key)
