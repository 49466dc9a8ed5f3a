"""The engine's side of the protocol, against a real subprocess that speaks it."""

import json
import sys
from pathlib import Path

import psutil
import pytest

from harness.engines.contract import GenerationRequest, KeptTokens
from harness.engines.kvpress.engine import KvpressEngine
from harness.errors import UserError

FAKE_WORKER = Path(__file__).with_name("fake_worker.py")
BUDGET, BLOCK_SIZE = 8, 4
PRESS = {"name": "KnormPress"}


@pytest.fixture
def start(tmp_path):
    """Start an engine on the fake worker; all are closed after the test."""
    engines = []

    def start_engine(press=PRESS, **settings) -> KvpressEngine:
        engine = KvpressEngine(
            str(tmp_path),
            press,
            BUDGET if press else None,
            "float32",
            BLOCK_SIZE,
            interpreter=Path(sys.executable),
            worker=FAKE_WORKER,
            **settings,
        )
        engines.append(engine)
        return engine

    yield start_engine
    for engine in engines:
        engine.close()


def request(request_id: str, num_tokens: int, **settings) -> GenerationRequest:
    return GenerationRequest(request_id, list(range(num_tokens)), max_new_tokens=5, **settings)


def test_a_request_arrives_whole_and_its_answer_comes_back(start):
    asked = request("a", 20, stop_token_ids=(2, 3), min_new_tokens=1)
    (result,) = start().generate([asked])
    assert (result.request_id, result.token_ids, result.finish_reason) == ("a", [2, 3, 1, 5], "length")
    assert (result.num_prompt_tokens, result.ttft_s, result.e2e_s) == (20, 0.25, 0.5)


def test_ignore_eos_sends_no_stop_token(start):
    (result,) = start().generate([request("a", 20, stop_token_ids=(2, 3), ignore_eos=True)])
    assert result.token_ids == [0, 5]


def test_results_come_one_by_one_in_order(start):
    results = start().generate(request(name, 20) for name in "abc")
    assert next(results).request_id == "a"
    assert [result.request_id for result in results] == ["b", "c"]


def test_counts_are_means_over_layers_of_the_real_lengths(start):
    engine = start()
    long, short = (result.eviction for result in engine.generate([request("long", 20), request("short", 6)]))
    # 20 tokens are cut to 8 and 9; while the first layer holds 8, the second one holds all 20.
    assert (long.num_evictions, long.num_evicted_tokens) == (1, 11)
    assert (long.peak_resident_tokens, long.final_resident_tokens, long.peak_blocks) == (14, 11, 4)
    assert (short.num_evictions, short.num_evicted_tokens) == (0, 0)
    assert (short.peak_resident_tokens, short.final_resident_tokens, short.peak_blocks) == (8, 8, 2)
    stats = engine.stats()
    assert (stats.block_size, stats.bytes_per_block) == (BLOCK_SIZE, 32)
    assert (stats.peak_blocks, stats.num_steps) == (4, 6)
    times = [sample.t_s for sample in stats.block_usage]
    weighted = [blocks * (end - begin) for blocks, begin, end in zip([4, 3, 3, 2, 2], times, times[1:], strict=False)]
    assert stats.mean_blocks == pytest.approx(sum(weighted) / (times[-1] - times[0]))
    assert (stats.num_evictions, stats.num_evicted_tokens, stats.eviction_time_s) == (1, 11, 0.125)
    assert stats.kept == KeptTokens.over([[[8, 8], [9, 9]]])
    # One row a forward, as vLLM has one a step, so that the mean blocks of a request are the same measure.
    assert [sample.blocks for sample in stats.block_usage] == [4, 3, 3, 2, 2, 2]
    assert [sample.prefilling for sample in stats.block_usage] == [1, 0, 0, 1, 0, 0]
    assert {sample.running for sample in stats.block_usage} == {1}
    assert [sample.t_s for sample in stats.block_usage[:3]] == [0, 0.125, 0.25]


def test_each_prompt_may_have_a_budget_of_its_own(start):
    engine = start(budget_of=lambda num_tokens: num_tokens // 2)
    assert [result.eviction.num_evicted_tokens for result in engine.generate([request("a", 20), request("b", 30)])] == [
        9,  # 20 tokens are cut to 10 and 11
        14,
    ]


def test_the_worker_is_told_press_and_budget_and_runs_isolated(start, tmp_path, capsys):
    start(press={"name": "AdaKVPress", "press": {"name": "SnapKVPress"}}, revision="v1")
    told = json.loads((tmp_path / "worker.json").read_text())
    assert told["options"] == {
        "model": None,
        "revision": "v1",
        "dtype": "float32",
        "press": {"name": "AdaKVPress", "press": {"name": "SnapKVPress"}},
        "budget": BUDGET,
    }
    assert told["isolated"] == 1
    assert capsys.readouterr().out == "peer: kvpress 0.0\n"


def test_without_a_press_nothing_is_compressed(start, tmp_path):
    (result,) = start(press=None).generate([request("a", 20)])
    assert result.eviction.num_evictions == 0
    assert json.loads((tmp_path / "worker.json").read_text())["options"]["press"] is None


def test_close_ends_the_worker(start, tmp_path):
    engine = start()
    worker = psutil.Process(json.loads((tmp_path / "worker.json").read_text())["pid"])
    engine.close()
    assert not worker.is_running()


def test_a_dying_worker_is_one_clear_error_with_its_last_words(start):
    results = start().generate([request("a", 20), request("dies", 20), request("c", 20)])
    assert next(results).request_id == "a"
    with pytest.raises(UserError) as error:
        next(results)
    first, *tail = str(error.value).splitlines()
    assert first == "the kvpress worker died at dies, exit code 7:"
    assert tail == [f"  line {number}" for number in range(85, 100)]


def test_a_worker_that_cannot_start_is_one_clear_error(start, tmp_path):
    (tmp_path / "worker.json").mkdir()
    with pytest.raises(UserError, match=r"died while it started, exit code 1:\n(.*\n)*.*IsADirectoryError"):
        start()


def test_a_refused_press_is_the_workers_own_message(start):
    with pytest.raises(UserError, match=r"^policy\.name=kvpress:UnknownPress is unknown\.$"):
        start(press={"name": "UnknownPress"})


def test_a_missing_environment_says_how_to_make_it(tmp_path):
    with pytest.raises(UserError, match="Run `make setup-kvpress`"):
        KvpressEngine(str(tmp_path), PRESS, BUDGET, "float32", BLOCK_SIZE, interpreter=tmp_path / "bin" / "python")
