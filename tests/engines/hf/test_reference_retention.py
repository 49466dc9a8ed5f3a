"""`retention.jsonl` of the reference: what is left of every prompt, and at the end after the last eviction."""

from pathlib import Path

import pytest

from harness.engines.hf.engine import ReferenceEngine
from harness.engines.hf.generate import run_reference
from harness.retention import read_retention
from policies import Policy, Unit, build_policy
from tests.policy_names import ragged_policy
from tests.retention_samples import BUDGET, LENGTHS, REQUESTS, window
from tests.tiny_llama import save_tiny_llama, tiny_llama

BLOCK, NUM_LAYERS, NUM_HEADS = 16, 3, 2
RAGGED = [("ada_kv", {"window": 8}), ("kv_compress", {"protect_last": 16}), ("corm", {"window": 8, "protect_last": 24})]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return str(save_tiny_llama(tmp_path_factory.mktemp("models") / "uneven", uneven=True))


def answer(model_path: str, policy: Policy, folder: Path | None) -> ReferenceEngine:
    """An engine that has answered all requests."""
    engine = ReferenceEngine(model_path, policy, retention=folder)
    assert len(list(engine.generate(REQUESTS))) == len(REQUESTS)
    return engine


def records(folder: Path) -> dict:
    found = read_retention(folder)
    assert [(one.sample_id, one.phase) for one in found] == [(n, p) for n in LENGTHS for p in ("prefill_end", "end")]
    assert all(one.num_prompt_tokens == LENGTHS[one.sample_id][0] for one in found)
    return {(one.sample_id, one.phase): one.layers for one in found}


def test_the_positions_are_those_of_the_policy_and_never_more_than_its_budget(model_path, tmp_path):
    answer(model_path, build_policy("streaming_llm", budget=BUDGET, block_size=BLOCK), tmp_path)
    for moment, layers in records(tmp_path).items():
        assert layers == [[window(*moment)]] * NUM_LAYERS, moment


@pytest.mark.parametrize(("name", "options"), RAGGED)
def test_every_head_has_its_own_positions_and_number_of_them(model_path, tmp_path, name, options):
    policy = ragged_policy(name, options, BUDGET, BLOCK)
    answer(model_path, policy, tmp_path)
    found = records(tmp_path)
    traces = {
        one.request_id: run_reference(
            tiny_llama(uneven=True), policy, one.prompt_token_ids, one.max_new_tokens, ignore_eos=True
        )
        for one in REQUESTS
    }
    assert found["long", "prefill_end"] == traces["long"].decisions[0].kept == found["long-one-token", "end"]
    assert len({len(positions) for heads in found["long", "prefill_end"] for positions in heads}) > 1
    for request, trace in traces.items():
        last = found[request, "end"]
        assert [len(heads) for heads in last] == [NUM_HEADS] * NUM_LAYERS
        for ours, held in zip(last, trace.resident_positions, strict=True):
            assert all(set(kept) <= set(before) for kept, before in zip(ours, held, strict=True))
        if policy.decode_unit is Unit.NONE and LENGTHS[request][1] > 1:
            assert last == [[sorted(positions) for positions in heads] for heads in trace.resident_positions]


def test_recording_changes_no_count(model_path, tmp_path):
    policy = build_policy("tova", budget=BUDGET, block_size=BLOCK)
    recorded, plain = (answer(model_path, policy, folder).stats() for folder in (tmp_path, None))
    assert (recorded.num_evictions, recorded.num_evicted_tokens) == (plain.num_evictions, plain.num_evicted_tokens)
    assert [usage.blocks for usage in recorded.block_usage] == [usage.blocks for usage in plain.block_usage]


def test_the_full_cache_records_nothing_as_in_vllm(model_path, tmp_path):
    answer(model_path, build_policy("full", budget=None, block_size=BLOCK), tmp_path)
    assert not list(tmp_path.iterdir())
