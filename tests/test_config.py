"""Every option composes, and every mistake is named before anything heavy starts."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException

import conf
from harness.config import HarnessConfig, register_schema
from harness.config_checks import to_dataclass
from harness.config_keys import nearest, with_open_keys, without_pluses
from harness.errors import UserError

CONF = Path(conf.__file__).parent
GROUPS = ("model", "policy", "benchmark", "engine", "tracker", "experiment")
OPTIONS = [f"{group}={path.stem}" for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setattr("harness.config_checks.inference_device", lambda: "cpu")


def composed(*overrides: str) -> HarnessConfig:
    register_schema()
    with initialize_config_module(version_base="1.3", config_module="conf"):
        return to_dataclass(compose("config", list(overrides)))


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_every_group_composes(option):
    group, name = option.split("=")
    config = composed(option)
    if group not in ("experiment", "engine", "tracker"):
        assert name.startswith(getattr(config, group).name)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_begins_with_its_command(option):
    group, name = option.split("=")
    first_lines = (CONF / group / f"{name}.yaml").read_text().splitlines()[:2]
    assert any(line.startswith("# python -m harness") and option in line for line in first_lines)


def test_the_default_is_paged_eviction_on_the_embedded_model():
    config = composed()
    assert (config.model.name, config.policy.name, config.benchmark.name) == (
        "smollm2-135m",
        "paged_eviction",
        "longbench_mini",
    )
    assert (config.model.path, config.engine.block_size, config.engine.kv_cache_gib) == (None, 32, 4.0)
    assert config.engine.in_process is True


@pytest.mark.parametrize(
    ("name", "geometry"),
    [
        ("llama3.1-8b", (32, 32, 8, 128)),
        ("llama3.2-3b", (28, 24, 8, 128)),
        ("llama3.2-1b", (16, 32, 8, 64)),
        ("smollm2-135m", (30, 9, 3, 64)),
        ("qwen2.5-7b", (28, 28, 4, 128)),
        ("qwen3-8b", (36, 32, 8, 128)),
        ("mistral-7b-v0.3", (32, 32, 8, 128)),
        ("smollm3-3b", (36, 16, 4, 128)),
    ],
)
def test_the_geometry_of_a_model_is_the_published_one(name, geometry):
    model = composed(f"model={name}").model
    assert (model.num_layers, model.num_query_heads, model.num_kv_heads, model.head_dim) == geometry


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["policy.budget=100"], "policy.budget=100 is not a multiple of engine.block_size=32. Use 96 or 128."),
        (["policy.budget=32"], "policy.budget=32 is less than two blocks of engine.block_size=32. Use 64 or more."),
        (["policy.budget=1"], "policy.budget=1 is less than two blocks of engine.block_size=32. Use 64 or more."),
        (["policy.budget=1.5"], "policy.budget=1.5 is neither a whole number of tokens nor a share of each prompt"),
        (["policy.budget=0"], "policy.budget=0 is less than two blocks"),
        (["policy.budget=abc%"], "policy.budget='abc%' is neither a whole number"),
        (["engine.block_size=16"], "engine.block_size=16 is not a positive multiple of 32, as vLLM needs on cpu."),
        (["engine.block_size=-32"], "engine.block_size=-32 is not a positive multiple of 32"),
        (["engine.max_num_seqs=0"], "engine.max_num_seqs=0 is not positive"),
        (["model.dtype=float8"], "model.dtype=float8 is unknown. Use float32, bfloat16, float16."),
        (["engine.num_kv_blocks=9", "engine.kv_cache_gib=1"], "both set the size of the KV pool"),
        (
            ["model.dtype=???", "model.head_dim=???"],
            "no value for model.dtype, model.head_dim. Give each as key=value.",
        ),
    ],
)
def test_values_that_do_not_fit_together_are_named(overrides, message):
    with pytest.raises(UserError) as error:
        composed(*overrides)
    assert message in str(error.value)


def test_a_budget_that_fits_a_larger_block_is_taken():
    assert composed("engine.block_size=64", "policy.budget=128").policy.budget == 128


def test_a_share_of_the_prompt_is_one_value_however_it_is_written():
    assert composed("policy.budget=0.25") == composed("policy.budget=25%") == composed('policy.budget="25 %"')
    assert composed("policy.budget=25%").policy.budget == 0.25
    assert composed("policy=full", "policy.budget=25%").policy.budget is None


@pytest.mark.parametrize("override", ["policy.bugdet=512", "polcy=full", "policy=paged", "policy.budget=much"])
def test_a_typo_is_refused_and_named(override):
    with pytest.raises(Exception, match=r"polcy|policy/paged|policy\.bugdet|policy\.budget") as error:
        composed(override)
    assert isinstance(error.value, ConfigCompositionException | ValueError | UserError)


def test_the_full_cache_says_that_it_ignores_a_budget(capsys):
    assert composed("policy=full", "policy.budget=512").policy.budget is None
    assert "policy=full ignores policy.budget=512" in capsys.readouterr().err


def test_block_size_on_a_gpu_may_be_16(monkeypatch):
    monkeypatch.setattr("harness.config_checks.inference_device", lambda: "cuda")
    monkeypatch.setattr("harness.config_checks.cuda_gpus", lambda: (("H200", 140.0),))
    engine = composed().engine
    assert (engine.block_size, engine.kv_cache_gib, engine.in_process) == (16, None, False)
    with pytest.raises(UserError, match="but only 1 CUDA GPUs"):
        composed("engine.tensor_parallel_size=2")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+policy.buget=256", "policy.buget is not a key. Did you mean policy.budget?"),
        ("+polcy=snapkv", "polcy is not a key. Did you mean policy?"),
        ("+engine.max_seqs=4", "engine.max_seqs is not a key. Did you mean engine.max_num_seqs?"),
        ("++benchmark.limt=4", "benchmark.limt is not a key. Did you mean benchmark.limit?"),
        ("+max_num_seqs=4", "max_num_seqs is not a key. Did you mean engine.max_num_seqs?"),
        ("+xyzzy=4", "xyzzy is not a key. `--help`"),
    ],
)
def test_an_added_key_that_nobody_reads_is_refused_with_the_nearest(override, message):
    with pytest.raises(UserError) as error:
        composed(override)
    assert message in str(error.value)


def test_unknown_keys_of_a_file_of_one_s_own_are_refused(tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "sticky.yaml").write_text("name: streaming_llm\nbudgt: 512\n")
    with pytest.raises(ConfigCompositionException):
        composed(f"hydra.searchpath=[file://{tmp_path}]", "policy=sticky")


def test_options_of_a_policy_are_left_to_the_policy():
    assert composed("policy=snapkv", "+policy.options.prefill=after").policy.options["prefill"] == "after"


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("pagedeviction", ["chunkkv", "paged_eviction"], "paged_eviction"),
        ("llama-3.1-8b", ["llama3.1-8b", "smollm2-135m"], "llama3.1-8b"),
        ("mistral", ["chunkkv"], None),
    ],
)
def test_the_nearest_name(name, known, meant):
    assert nearest(name, known) == meant


def test_an_option_needs_no_plus():
    assert with_open_keys(["policy.options.prefill=x", "policy.budget=64"]) == [
        "++policy.options.prefill=x",
        "policy.budget=64",
    ]
    assert without_pluses("++policy.options.prefill=x") == "policy.options.prefill=x"
    assert without_pluses("+policy.budget=64") == "+policy.budget=64"


def test_one_task_needs_no_brackets():
    assert composed("benchmark.tasks=qasper").benchmark.tasks == ["qasper"]
    assert composed("benchmark.tasks=[qasper,trec]").benchmark.tasks == ["qasper", "trec"]
    assert composed().benchmark.tasks is None
    with pytest.raises(UserError, match=r"benchmark\.tasks=3 is neither a name nor a list of names"):
        composed("benchmark.tasks=3")
