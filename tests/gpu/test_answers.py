"""The plugin's answers on a CUDA device.

Compared exactly where both sides run the same kernels on the same batches: keeping everything against stock vLLM.
Compiled kernels, padded batches and the order of asynchronous steps round otherwise, and a random model has near-ties,
so there one request may part from its twin; a cache that is read at the wrong place parts nearly all.
"""

from dataclasses import replace

import pytest
from vllm.compilation.counter import compilation_counter
from vllm.config import CUDAGraphMode

from harness.engines.vllm.arguments import eviction_arguments
from harness.engines.vllm.settings import EvictionSettings
from tests.engines.vllm.live import live_engine, run_live, run_stock, runner_of

pytestmark = pytest.mark.gpu

POLICIES = {"paged_eviction": CUDAGraphMode.FULL_AND_PIECEWISE, "h2o": CUDAGraphMode.PIECEWISE}
ROOM_FOR_ALL = 1024


def settings_of(name):
    return EvictionSettings(name, budget=64)


def num_parted(answers, others):
    """Requests whose tokens differ."""
    assert answers.keys() == others.keys()
    return sum(tokens != others[request] for request, tokens in answers.items())


@pytest.fixture(scope="module")
def eager(shape, requests):
    """Answers of each policy without graphs, steps one after the other."""
    return {name: run_live(shape, settings_of(name), requests) for name in POLICIES}


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_keeping_everything_gives_the_tokens_of_stock_vllm(shape, requests, enforce_eager):
    shape = replace(shape, enforce_eager=enforce_eager)
    stock = run_stock(shape, requests)
    for name, budget in (("full", None), ("streaming_llm", ROOM_FOR_ALL)):
        run = run_live(shape, EvictionSettings(name, budget=budget), requests)
        assert run.texts() == stock
        assert run.stats.num_evictions == 0


def test_a_tight_budget_changes_the_tokens(shape, requests, eager):
    """Otherwise the equality above would hold for a plugin that does nothing."""
    stock = run_stock(shape, requests)
    for run in eager.values():
        assert run.stats.num_evictions > 0
        assert num_parted(run.texts(), stock) > len(requests) / 2


@pytest.mark.parametrize("name", POLICIES)
def test_cuda_graphs_do_not_change_the_answers(shape, requests, eager, name):
    captured = compilation_counter.num_cudagraph_captured
    with live_engine(replace(shape, enforce_eager=False), settings_of(name)) as engine:
        assert compilation_counter.num_cudagraph_captured > captured
        assert runner_of(engine.llm_engine).compilation_config.cudagraph_mode is POLICIES[name]
        answers = {result.request_id: result.token_ids for result in engine.generate(requests)}
        stats = engine.stats()
    assert num_parted(answers, eager[name].texts()) <= 1
    assert stats.num_evictions == eager[name].stats.num_evictions
    assert stats.free_blocks_at_end == stats.num_blocks - 1


@pytest.mark.parametrize("name", POLICIES)
def test_asynchronous_scheduling_does_not_change_the_answers(shape, requests, eager, name):
    overlapping = replace(shape, async_scheduling=True)
    assert eviction_arguments(overlapping, settings_of(name))["scheduler_cls"].endswith("AsyncEvictionScheduler")
    run = run_live(overlapping, settings_of(name), requests)
    assert num_parted(run.texts(), eager[name].texts()) <= 1
    assert run.stats.num_evictions >= eager[name].stats.num_evictions
    assert run.stats.free_blocks_at_end == run.stats.num_blocks - 1


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["synchronous", "asynchronous"])
def test_a_pool_that_is_too_small_preempts_and_all_finish(shape, requests, async_scheduling):
    """The pool holds one of the longest requests and little more."""
    small = replace(shape, max_model_len=800, num_kv_blocks=60, async_scheduling=async_scheduling)
    run = run_live(small, EvictionSettings("paged_eviction", budget=640, reserve=False), requests)
    assert run.stats.num_preemptions > 0
    assert {len(tokens) for tokens in run.texts().values()} == {60}
    assert run.stats.free_blocks_at_end == run.stats.num_blocks - 1
