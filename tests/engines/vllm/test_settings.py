"""What `--additional-config` may hold, and what a server makes of it before anything starts."""

import copy
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from vllm import EngineArgs
from vllm.usage.usage_lib import UsageContext

from harness.engines.vllm.arguments import AdditionalConfig, eviction_arguments, stock_arguments
from harness.engines.vllm.counters import CounterFile, Counters, forget_name, temporary_counter_file
from harness.engines.vllm.plugin import configure, register, start_line
from harness.engines.vllm.settings import CONFIG_KEY, EvictionSettings, parse_settings, refuse_near_misses

GOOD = {"policy": "paged_eviction", "budget": 64}


def server_arguments(shape, settings, **changes):
    """As `vllm serve MODEL --additional-config ...` makes them."""
    return EngineArgs(model=shape.model, block_size=shape.block_size, additional_config=settings, **changes)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"budget": "256"}, r'\["budget"\]=\'256\' is neither a whole number of tokens nor a share of each prompt'),
        ({"budget": 256.0}, r'\["budget"\]=256.0 is neither a whole number'),
        ({"budget": True}, r'\["budget"\]=True is neither a whole number'),
        ({"reserve": "false"}, r'\["reserve"\]="false" is not true or false'),
        ({"reserve": None}, r'\["reserve"\]=null is not true or false'),
        ({"policy": 3}, r'\["policy"\]=3 is not the name of a policy'),
        ({"options": [1]}, r'\["options"\]=\[1\] is not a mapping'),
        ({"trace": 1}, r'\["trace"\]=1 is not the path'),
        ({"budgett": 64}, r"does not know budgett. Did you mean budget\? It takes policy, budget"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(setting, message):
    with pytest.raises(ValueError, match=message):
        parse_settings(GOOD | setting)


@pytest.mark.parametrize("budget", [0.25, "25%"])
def test_a_budget_may_be_a_share_of_each_prompt(budget):
    assert parse_settings(GOOD | {"budget": budget}).budget == 0.25


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "corm", "budget": 0.25}, "lets the data decide, so policy.budget=0.25 has no effect"),
        ({"policy": "paged_evicton", "budget": 64}, "Did you mean paged_eviction"),
        ({"policy": "paged_eviction"}, "needs policy.budget"),
        ({"policy": "paged_eviction", "budget": 100}, "is not a multiple of engine.block_size=32"),
        (GOOD | {"options": {"prefil": "after"}}, "Did you mean prefill"),
        (GOOD | {"retention": "nowhere/at/all"}, "there is no folder nowhere/at/all. Make it first"),
        (GOOD | {"counters": "nowhere/counters"}, "there is no folder nowhere"),
        ("paged_eviction", "names no policy"),
    ],
)
def test_a_server_refuses_before_anything_starts(shape, settings, message):
    arguments = server_arguments(shape, {CONFIG_KEY: settings})
    with pytest.raises(ValueError, match=message):
        configure(arguments)
    assert arguments.scheduler_cls is None, "nothing was changed"


@pytest.mark.parametrize("key", ["kv_evicton", "kv-eviction", "KV_EVICTION", "kvEviction", "kv_evictions"])
def test_a_near_miss_of_the_key_is_refused(key):
    with pytest.raises(ValueError, match=f'has "{key}", which nothing reads. Did you mean "kv_eviction"'):
        refuse_near_misses({key: GOOD})


@pytest.mark.parametrize("key", ["kv_eviction", "gdn_prefill_backend", "kv_transfer", "my_plugin"])
def test_keys_of_others_are_left_alone(key):
    refuse_near_misses({key: GOOD})


@pytest.fixture
def plugin(monkeypatch):
    """The entry point, undone afterwards."""
    monkeypatch.setattr(EngineArgs, "create_engine_config", inner_of(EngineArgs.create_engine_config))
    register()


def inner_of(function):
    return getattr(function, "__wrapped__", function)


@pytest.mark.usefixtures("plugin")
def test_a_server_ends_with_one_line_and_a_program_gets_an_exception(shape):
    for settings, message in (({"kv-eviction": GOOD}, "Did you mean"), ({CONFIG_KEY: {"policy": "no"}}, "is unknown")):
        with pytest.raises(SystemExit, match=f"^error: .*{message}") as ended:
            server_arguments(shape, settings).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
        assert ended.value.__cause__ is None
        assert "\n" not in str(ended.value)
        with pytest.raises(ValueError, match=message):
            server_arguments(shape, settings).create_engine_config()


@pytest.mark.usefixtures("plugin")
def test_settings_of_the_engine_are_refused_before_it_starts(shape):
    arguments = server_arguments(shape, {CONFIG_KEY: GOOD | {"policy": "h2o"}}, enable_prefix_caching=True)
    with pytest.raises(SystemExit, match="error: KV eviction cannot run: prefix caching is on"):
        arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)


def test_a_server_admits_as_stock_vllm_unless_told_otherwise(shape):
    for given, reserve in (({}, False), ({"reserve": True}, True), ({"reserve": False}, False)):
        arguments = server_arguments(shape, {CONFIG_KEY: GOOD | given})
        configure(arguments)
        assert arguments.additional_config[CONFIG_KEY]["reserve"] is reserve
    assert EvictionSettings("paged_eviction", 64).reserve, "benchmark runs are never preempted"


def test_a_server_says_at_start_what_it_does(shape, monkeypatch):
    said = []
    monkeypatch.setattr(EngineArgs, "create_engine_config", inner_of(EngineArgs.create_engine_config))
    register()
    monkeypatch.setattr("vllm.logger._VllmLogger.info", lambda *words, **options: None, raising=False)
    monkeypatch.setattr("logging.Logger.info", lambda self, message, *words, **options: said.append(message % words))
    server_arguments(shape, {CONFIG_KEY: {"policy": "h2o", "budget": 64}}).create_engine_config()
    (line,) = [message for message in said if message.startswith("KV eviction")]
    assert line == (
        "KV eviction is on: policy=h2o, budget=64 tokens, prefill=after, block_size=32; admission: as stock vLLM "
        "(reserve=false); switched off: prefix caching, full CUDA graphs (attention is watched, or called by head)"
    )
    assert "policy=h2o, budget=25 % of each prompt, prefill=after" in start_line(EvictionSettings("h2o", 0.25), 32, [])
    kept = start_line(EvictionSettings("full"), 32, [])
    assert kept.startswith("KV eviction is on: policy=full, which keeps everything, block_size=32; admission: the pool")
    assert kept.endswith("switched off: nothing")


def test_only_what_changes_a_graph_enters_the_hash_of_compiled_graphs(shape, tmp_path):
    """Two starts with their own temporary files, two policies: one hash. Another model length: another one."""

    def hash_of(shape, name, folder):
        settings = EvictionSettings(name, 64, trace=str(folder / "trace"), retention=str(folder))
        return EngineArgs(**eviction_arguments(shape, settings)).create_engine_config().compute_hash()

    first, second = (hash_of(shape, "paged_eviction", tmp_path / name) for name in "ab")
    assert first == second == hash_of(shape, "keydiff", tmp_path)
    assert hash_of(replace(shape, max_model_len=512), "keydiff", tmp_path) != first


def test_additional_config_reaches_other_processes_whole_and_hashes_what_others_put_there(shape):
    ours = AdditionalConfig({CONFIG_KEY: GOOD, "other": 1})
    config = EngineArgs(**stock_arguments(shape), additional_config=ours).create_engine_config()
    for copied in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert parse_settings(copied.additional_config[CONFIG_KEY]).budget == 64
    assert ours.compute_hash() != AdditionalConfig({CONFIG_KEY: GOOD, "other": 2}).compute_hash()


def test_a_counter_file_lives_on_without_its_name_and_shows_both_writers(tmp_path):
    path = temporary_counter_file()
    scheduler, worker, server = (CounterFile(path) for _ in range(3))
    forget_name(path)
    assert not Path(path).exists()
    scheduler.write(1, 2, 3, 4, 5)
    worker.report_bad_scores()
    scheduler.write(6, 7, 8, 9, 10)
    assert server.read() == Counters(6, 7, 8, 9, 10, bad_scores=1)
    own = tmp_path / "counters"
    CounterFile(str(own))
    forget_name(str(own))
    assert own.exists(), "a file that the user named stays"
