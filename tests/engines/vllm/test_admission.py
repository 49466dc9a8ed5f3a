"""Which requests run when: admission, order and preemption, on schedulers without a model."""

from dataclasses import replace

import pytest

from harness.engines.vllm.plan import peak_resident_tokens
from harness.engines.vllm.prompt_rows import MOST_PROMPTS
from harness.engines.vllm.settings import EvictionSettings
from policies import Phase, build_policy
from policies.registry import policy_class
from tests.engines.vllm.schedulers import add_request, answer, build_scheduler

CHUNK = 64
CHUNKED = {"prefill": "chunked", "prefill_chunk": CHUNK}


def run(scheduler, limit=5000):
    """Until all is done: requests in the order in which they started; steps; preemptions; most running at once."""
    started, steps, preempted, running = [], 0, 0, 0
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        preempted += len(output.preempted_req_ids or ())
        running = max(running, len(scheduler.running))
        started += [name for name in output.num_scheduled_tokens if name not in started]
        answer(scheduler, output)
        steps += 1
        assert steps < limit, "no progress"
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    return started, steps, preempted, running


@pytest.fixture(scope="module")
def crowd(shape):
    """Room for many requests at once."""
    return replace(shape, max_num_seqs=64, max_num_batched_tokens=2048)


def test_a_server_that_reserves_nothing_takes_as_many_steps_as_stock(crowd):
    """Chat clients name no max_tokens: each could fill the context, and hardly one does."""
    steps = {}
    for name, settings in (
        ("stock", None),
        ("ours", EvictionSettings("full", reserve=False)),
        ("evicting", EvictionSettings("paged_eviction_literal", 128, reserve=False)),
        ("reserving", EvictionSettings("full", reserve=True)),
    ):
        scheduler = build_scheduler(crowd, settings, num_blocks=230)
        for index in range(64):
            add_request(scheduler, f"r{index}", 30, crowd.max_model_len - 30)
        for _ in range(40):
            answer(scheduler, scheduler.schedule())
        steps[name] = sum(request.num_output_tokens for request in scheduler.requests.values())
    assert steps["ours"] == steps["evicting"] == steps["stock"] == 64 * 40
    assert steps["reserving"] < steps["stock"] / 5


@pytest.mark.parametrize("name", ["paged_eviction_literal", "h2o"])
def test_prompts_read_in_chunks_count_as_budget_and_chunk(crowd, name):
    """48 of them on a pool that holds 10: none is preempted, and the pool is used."""
    scheduler = build_scheduler(crowd, EvictionSettings(name, 128, CHUNKED, reserve=False), num_blocks=64)
    for index in range(48):
        add_request(scheduler, f"r{index}", 384, 128)
    _, _, preempted, running = run(scheduler)
    assert preempted == 0
    assert running >= 63 // (-(-(128 + CHUNK) // 32))


def test_a_prompt_longer_than_the_pool_is_read_in_chunks_without_reserve(crowd):
    scheduler = build_scheduler(
        crowd, EvictionSettings("paged_eviction_literal", 128, CHUNKED, reserve=False), num_blocks=16
    )
    add_request(scheduler, "long", 900, 20)
    _, steps, preempted, _ = run(scheduler)
    assert (steps, preempted) == (-(-900 // CHUNK) + 19, 0)


def test_short_prompts_are_not_held_back_for_what_they_might_become(crowd):
    scheduler = build_scheduler(
        crowd, EvictionSettings("paged_eviction_literal", 512, CHUNKED, reserve=False), num_blocks=150
    )
    for index in range(64):
        add_request(scheduler, f"r{index}", 30, 900)
    answer(scheduler, scheduler.schedule())
    assert len(scheduler.running) == 64


def test_no_prompt_overtakes_another_whose_chunk_does_not_fit(shape):
    """32 tokens are left in the first step: the second prompt's chunk waits, and the third, which would fit, too."""
    small = replace(shape, max_num_batched_tokens=CHUNK + 32)
    scheduler = build_scheduler(
        small, EvictionSettings("paged_eviction_literal", 128, CHUNKED, reserve=False), num_blocks=200
    )
    for name, length in (("a", 64), ("b", 200), ("c", 20), ("d", 64)):
        add_request(scheduler, name, length, 30)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 64}
    answer(scheduler, output)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 1, "b": 64, "c": 20}
    answer(scheduler, output)
    started, *_ = run(scheduler)
    assert started == ["a", "b", "c", "d"]


def test_order_holds_where_vllm_skips_a_prompt_that_does_not_fit(shape):
    """vLLM 0.33 goes on to the next waiting request where 0.32 stops: the hook itself must hold it back."""
    scheduler = build_scheduler(
        shape, EvictionSettings("paged_eviction_literal", 128, CHUNKED, reserve=False), num_blocks=200
    )
    for name, length in (("b", 200), ("c", 20)):
        add_request(scheduler, name, length, 30)
    requests = scheduler.requests
    assert scheduler._reserve_prefill_lookahead(requests["b"], 0, 32) == 0
    assert scheduler._reserve_prefill_lookahead(requests["c"], 0, 20) == 0
    assert scheduler._reserve_prefill_lookahead(requests["c"], 19, 1) == 1, "decoding goes on"
    scheduler.schedule()
    assert scheduler._reserve_prefill_lookahead(requests["c"], 0, 20) == 20, "a new step"


@pytest.mark.parametrize("options", [{"window": 16}, {"window": 16, "prefill": "chunked", "prefill_chunk": CHUNK}])
def test_prompts_are_held_back_where_the_workers_have_no_row_for_them(crowd, options):
    """Rows are for prompts that will be evicted from, until then; short prompts and decoding requests need none."""
    if options.get("prefill", "after") not in policy_class("snapkv").modes:
        pytest.skip("not defined for this policy")
    scheduler = build_scheduler(crowd, EvictionSettings("snapkv", 64, options, reserve=False), num_blocks=2000)
    for index in range(40):
        add_request(scheduler, f"r{index}", 40 if index % 2 else 90, 20 if index % 5 else 1)
    most = 0
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        rows = {name for name in scheduler._watched if name in output.num_scheduled_tokens}
        assert output.kv_eviction.prefilling <= rows
        most = max(most, len(scheduler._watched))
        answer(scheduler, output)
    assert most == MOST_PROMPTS
    scheduler.schedule()
    assert not scheduler._watched


def test_the_record_of_a_request_holds_its_peaks(shape):
    scheduler = build_scheduler(shape, EvictionSettings("paged_eviction_literal", 64), num_blocks=200)
    add_request(scheduler, "r", 150, 100)
    records = []
    free = scheduler._free_request
    scheduler._free_request = lambda *args: records.append(free(*args)) or records[-1]
    run(scheduler)
    record = records[0][0]["kv_eviction"]
    assert (record["peak_resident_tokens"], record["peak_blocks"]) == (150, 5)
    assert record["num_evictions"] == 1 + (100 - 1) // 32
    assert record["num_evicted_tokens"] == 150 - 64 + 32 * ((100 - 1) // 32)
    assert record["final_resident_tokens"] == 150 + 99 - record["num_evicted_tokens"]
    assert scheduler._totals.num_evicted_tokens == record["num_evicted_tokens"]


@pytest.mark.parametrize(
    ("name", "options"), [("mix_attention", {"full_every": 3}), ("paged_eviction", {}), ("h2o", {})]
)
@pytest.mark.parametrize("budget", [64, 96, 256])
def test_no_request_ever_holds_more_than_it_was_promised(name, options, budget):
    """What `reserve` sets aside, against a request that is stepped through token by token."""
    policy = build_policy(name, budget=budget, block_size=32, options=options).for_model(3, 2)
    for prompt in range(1, 380, 7):
        resident = seen = peak = prompt
        resident = policy.plan(Phase.PREFILL_END, resident, seen)
        for new in range(1, 90):
            assert peak <= peak_resident_tokens(policy, prompt, prompt, prompt + new)
            resident, seen = resident + 1, seen + 1
            peak = max(peak, resident)
            resident = policy.plan(Phase.DECODE, resident, seen)


def test_a_policy_that_evicts_nothing_reads_each_prompt_once(crowd):
    """Steps in which a prompt ends are those that a run with `record_retention` writes down."""
    scheduler = build_scheduler(
        replace(crowd, max_num_batched_tokens=64), EvictionSettings("quest", 128), num_blocks=64
    )
    add_request(scheduler, "a", 100, 6)
    reading = []
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        reading.append(set(output.kv_eviction.prefilling))
        answer(scheduler, output)
    assert reading == [{"a"}, {"a"}, *[set()] * 5]
