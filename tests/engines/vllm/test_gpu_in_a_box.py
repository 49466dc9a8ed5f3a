"""The plugin's CUDA classes on vLLM's GPU runner and FlashAttention backend, in a box (`box.py`).

What a CUDA device does differently (buffers of host and device apart, another cache layout, padded batches, overlapping
steps) may change neither which positions stay nor a token of the text.
"""

from dataclasses import replace

import pytest

from harness.engines.contract import GenerationRequest
from harness.engines.vllm.rotation import rotary_of
from harness.engines.vllm.settings import EvictionSettings
from harness.engines.vllm.slices import transient_bytes
from harness.retention import read_retention
from tests.engines.vllm.box import GIB, Box, in_a_box
from tests.engines.vllm.live import live_engine, run_live, run_stock, runner_of, scheduler_of
from tests.engines.vllm.soak import Arrival, serve
from tests.policy_names import EQUAL
from tests.tiny_llama import random_prompt

BUDGET = 64
OPTIONS = {
    "snapkv": {"window": 16},
    "chunkkv": {"window": 16},
    "lagkv": {"lag": 16},
    "cascading": {"protect_first": 4},
}
CHUNKED = {"prefill": "chunked", "prefill_chunk": 64}
QUICK = ("paged_eviction_literal", "h2o")
SETTINGS = [
    *((name, OPTIONS.get(name, {})) for name in sorted(set(EQUAL) - {"full"})),
    ("paged_eviction_literal", CHUNKED),
    ("streaming_llm", {"position_mode": "cache"}),
]
EVERY = [
    pytest.param(name, options, marks=[] if name in QUICK and options is not CHUNKED else pytest.mark.parity)
    for name, options in SETTINGS
]
LENGTHS = (5, 31, 64, 100, 257, 400, 333)


@pytest.fixture(scope="module")
def requests():
    return [GenerationRequest(f"r{n}", random_prompt(n, seed=n), 36, ignore_eos=True) for n in LENGTHS]


@pytest.fixture(scope="module")
def on_cpu(shape, requests):
    """Runs of the CPU backend, by settings."""
    runs = {}

    def run(name, options):
        key = name, str(options)
        if key not in runs:
            runs[key] = run_live(shape, EvictionSettings(name, BUDGET, options), requests)
        return runs[key]

    return run


def assert_same(boxed, expected):
    assert boxed.texts() == expected.texts()
    assert boxed.decisions == expected.decisions
    assert boxed.stats.num_evictions == expected.stats.num_evictions > 0
    assert boxed.stats.free_blocks_at_end == boxed.stats.num_blocks - 1


@pytest.mark.parametrize(("name", "options"), EVERY)
def test_positions_and_texts_are_those_of_the_cpu_backend(shape, requests, on_cpu, name, options):
    """In batches padded as CUDA graphs pad them."""
    with in_a_box(Box(graphs=True)) as box:
        boxed = run_live(shape, EvictionSettings(name, BUDGET, options), requests)
    assert_same(boxed, on_cpu(name, options))
    assert box.steps["PIECEWISE"] > 0
    if name == "paged_eviction_literal":
        assert box.steps["FULL"] > 20, "decode steps are whole graphs where nobody watches"
    assert all(len(addresses) == 1 for addresses in box.addresses.values()), "graphs replay addresses"
    assert bool(box.addresses) == (box.steps["FULL"] > 0)


@pytest.mark.parametrize("name", ["paged_eviction_literal", pytest.param("h2o", marks=pytest.mark.parity)])
def test_asynchronous_steps_give_the_same_texts(shape, requests, on_cpu, name):
    with in_a_box() as box:
        overlapping = replace(shape, async_scheduling=True)
        with live_engine(overlapping, EvictionSettings(name, BUDGET)) as engine:
            assert engine.llm_engine.engine_core.engine_core.batch_queue is not None, "steps overlap"
            assert type(scheduler_of(engine.llm_engine)).__name__ == "AsyncEvictionScheduler"
            texts = {result.request_id: result.token_ids for result in engine.generate(requests)}
            stats = engine.stats()
    assert texts == on_cpu(name, {}).texts()
    assert stats.free_blocks_at_end == stats.num_blocks - 1
    assert not box.addresses


def test_an_answer_that_ends_beside_another_is_written_down_as_steps_in_turn_do(shape, tmp_path):
    """Its last eviction is due when the step after has begun without it."""
    requests = [GenerationRequest(f"r{n}", random_prompt(90, seed=n), 5 + 6 * n, ignore_eos=True) for n in range(3)]
    folders = [tmp_path / name for name in ("in turn", "overlapping")]
    for folder in folders:
        folder.mkdir()
    settings = [EvictionSettings("tova", BUDGET, retention=str(folder)) for folder in folders]
    run_live(shape, settings[0], requests)
    with in_a_box():
        run_live(replace(shape, async_scheduling=True), settings[1], requests)
    expected, found = ({(one.sample_id, one.phase): one.layers for one in read_retention(folder)} for folder in folders)
    assert len(expected) == 2 * len(requests)
    assert found == expected


@pytest.fixture(scope="module")
def bf16(shape):
    return replace(shape, dtype="bfloat16", block_size=16, num_kv_blocks=600)


def test_bfloat16_in_blocks_of_16_keeps_everything_as_stock_does(bf16, requests):
    """The only test of stock vLLM's own runner in the box: the box itself must not change it."""
    with in_a_box(Box(graphs=True)):
        kept = run_live(bf16, EvictionSettings("streaming_llm", 1024), requests)
        assert kept.texts() == run_stock(bf16, requests)
    assert kept.stats.num_evictions == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [("paged_eviction_literal", {}), *(pytest.param(*one, marks=pytest.mark.parity) for one in SETTINGS)],
)
def test_bfloat16_decisions_do_not_depend_on_padding_or_overlap(bf16, requests, name, options):
    settings = EvictionSettings(name, BUDGET, options)
    with in_a_box():
        plain = run_live(bf16, settings, requests)
    with in_a_box(Box(graphs=True)):
        padded = run_live(replace(bf16, async_scheduling=True), settings, requests)
    assert plain.stats.num_evictions > 0
    assert padded.texts() == plain.texts()


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.parity)])
def test_preempted_and_aborted_requests_leave_nothing_behind(shape, asynchronous):
    """A pool of little more than the longest request; every fifth client goes away."""
    small = replace(shape, max_model_len=512, num_kv_blocks=24, max_num_seqs=8, async_scheduling=asynchronous)
    requests = [GenerationRequest(f"r{n}", random_prompt(60 + 31 * n, n), 50, ignore_eos=True) for n in range(10)]
    arrivals = [Arrival(one, 2 * n, 2 * n + 20 if n % 5 == 4 else None) for n, one in enumerate(requests)]
    with in_a_box(Box(graphs=True)), live_engine(small, EvictionSettings("h2o", 256, reserve=False)) as engine:
        texts, _, aborted = serve(engine, arrivals)
        assert engine.stats().num_preemptions > 0
    assert len(aborted) == 2
    assert {len(tokens) for tokens in texts.values()} == {50}
    assert len(texts) + len(aborted) == len(requests)


@pytest.mark.parametrize("name", ["expected_attention", pytest.param("h2o", marks=pytest.mark.parity)])
def test_cache_and_what_lies_beside_it_fit_into_the_card(shape, requests, name):
    """The GPU worker decides how many blocks there are; nobody names a size."""
    card = GIB // 8
    free = replace(shape, kv_cache_gib=None, num_kv_blocks=None, max_num_seqs=4)
    with in_a_box(Box(memory=card)), live_engine(free, EvictionSettings(name, BUDGET, OPTIONS.get(name, {}))) as engine:
        list(engine.generate(requests))
        runner, worker = runner_of(engine.llm_engine), engine.llm_engine.engine_core.engine_core.model_executor
        requested = worker.driver_worker.worker.requested_memory
        held = sum(cache.untyped_storage().nbytes() for cache in runner.kv_caches[:1]) + bytes_of(runner)
    assert 0.97 * requested < held + transient_bytes(runner.device) <= requested


def bytes_of(runner):
    """Everything that the plugin keeps on the device; the model's rotary table is the model's."""
    tensors, seen, waiting = {}, set(), [runner.compactor, runner._observers]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        module = type(item).__module__
        if hasattr(item, "untyped_storage"):
            tensors[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, (list, tuple)):
            waiting += item
        elif isinstance(item, dict):
            waiting += item.values()
        elif module.startswith("harness.engines.vllm") and not module.endswith("layout"):
            waiting += vars(item).values()
    tensors.pop(rotary_of(runner.model).cos_sin_cache.untyped_storage().data_ptr(), None)
    return sum(tensors.values())
