"""Every preset composes, and every mistake is named before an engine starts."""

from pathlib import Path

import pytest

import conf
from harness.bench.run import announcement
from harness.errors import UserError
from tests.bench.scripted_server import composed_plan

PRESETS = sorted(path.stem for path in (Path(conf.__file__).parent / "bench" / "preset").glob("*.yaml"))


def as_on_a_gpu(monkeypatch):
    for module in ("harness.config_checks", "harness.bench.config"):
        monkeypatch.setattr(f"{module}.inference_device", lambda: "cuda")
        monkeypatch.setattr(f"{module}.cuda_gpus", lambda: (("A100", 40.0),))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_makes_a_plan_on_its_device(preset, monkeypatch):
    if not preset.startswith("cpu_"):
        as_on_a_gpu(monkeypatch)
    plan = composed_plan(f"preset={preset}")
    assert plan.config.name == preset
    assert plan.config.side_by_side is preset.startswith("cpu_")
    assert "full" in {variant.policy for variant in plan.variants}
    assert "paged_eviction" in {variant.policy for variant in plan.variants}
    assert not plan.config.engine.reserve


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_begins_with_its_command(preset):
    text = (Path(conf.__file__).parent / "bench" / "preset" / f"{preset}.yaml").read_text()
    assert text.splitlines()[1].startswith("# python -m harness.bench")
    assert f"preset={preset}" in text.splitlines()[1]


@pytest.mark.parametrize("preset", ["throughput", "latency"])
def test_the_papers_load(preset, monkeypatch):
    as_on_a_gpu(monkeypatch)
    plan = composed_plan(f"preset={preset}")
    load = plan.config.load
    assert (load.num_requests, plan.input_tokens.longest, plan.output_tokens.longest) == (64, 1024, 8192)
    assert (plan.config.engine.block_size, load.request_rate, load.ignore_eos) == (16, None, True)
    budgets = {variant.config.policy.budget for variant in plan.variants} - {None}
    assert budgets == ({256, 512, 1024, 2048, 4096} if preset == "throughput" else {4096})


def test_a_budget_may_be_a_share_of_each_prompt():
    plan = composed_plan("variants.policies=[keydiff]", "variants.budgets=[25%,128]")
    assert [variant.config.policy.budget for variant in plan.variants] == [None, 0.25, 128]
    assert [variant.label for variant in plan.variants][1:] == ["keydiff-0.25-b32", "keydiff-128-b32"]


def test_variants_are_the_product_and_every_block_size_has_its_full_cache():
    plan = composed_plan(
        "variants.policies=[paged_eviction,keydiff]",
        "variants.budgets=[128,256]",
        "variants.block_sizes=[32,64]",
        "variants.stock=true",
    )
    labels = [variant.label for variant in plan.variants]
    assert labels[:6] == [
        "full-b32",
        "stock-b32",
        "paged_eviction-128-b32",
        "paged_eviction-256-b32",
        "keydiff-128-b32",
        "keydiff-256-b32",
    ]
    assert labels[6:] == [label.replace("b32", "b64") for label in labels[:6]]


def test_a_policy_has_the_options_of_its_file_and_the_users_on_top():
    plan = composed_plan("variants.options={paged_eviction:{protect_first:32}}")
    variant = plan.variants[-1]
    assert variant.config.policy.options["protect_first"] == 32
    assert variant.config.policy.options["decode_scope"] == "layer"
    assert variant.note == "protect_first=32"


def test_engines_take_requests_of_the_loads_length_and_no_longer():
    plan = composed_plan("load.input_tokens=[10,100]", "load.output_tokens={5:1,50:2}")
    assert {variant.config.model.max_model_len for variant in plan.variants} == {150}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["load.input_tokens=ten"], "load.input_tokens=ten is no length"),
        (["load.input_tokens=[9,3]"], "is no length"),
        (["load.output_tokens=0"], "load.output_tokens=0 has a length below 1"),
        (["load.output_tokens={8:0}"], "no positive weight"),
        (["load.output_tokens=9000"], "reach 9384 tokens together, and model=smollm2-135m takes 8192"),
        (["load.num_requests=0"], "load.num_requests=0 is not positive"),
        (["load.request_rate=-1"], "load.request_rate=-1.0 is not positive"),
        (["repeats=0"], "repeats=0 is not positive"),
        (["load_format=random"], "load_format=random is unknown. Use auto or dummy."),
        (["load_format=dummy", "load.ignore_eos=false"], "load.ignore_eos=false has no meaning"),
        (["variants.policies=[full]"], "full is always measured"),
        (["engine=hf"], "engine=hf serves no load. Use engine=vllm."),
        (["variants.options=5"], "variants.options=5 is not {policy: {option: value}}"),
        (["variants.options={keydiff:{eps:1}}"], "variants.options has options of keydiff"),
        (["variants.budgets=[100]"], "policy.budget=100 is not a multiple of engine.block_size=32"),
        (["variants.block_sizes=[8]"], "engine.block_size=8 is not a positive multiple of 32"),
        (["engine.num_kv_blocks=20"], "cannot hold one request of 640 tokens in the full cache. Use 21 or more."),
        (["engine.in_process=true"], "engine.in_process=true holds one engine only"),
        (["repeats=???", "name=???"], "no value for name, repeats"),
    ],
)
def test_mistakes_are_named(overrides, message):
    with pytest.raises(UserError) as caught:
        composed_plan(*overrides)
    assert message in str(caught.value)


def test_a_block_size_that_no_gpu_kernel_takes_is_one_clear_error(monkeypatch):
    as_on_a_gpu(monkeypatch)
    with pytest.raises(UserError, match=r"engine.block_size=8 is not a positive multiple of 16, as vLLM needs on cuda"):
        composed_plan("preset=page_size", "variants.block_sizes=[8,16,32]")


def test_engines_do_not_share_a_gpu(monkeypatch):
    as_on_a_gpu(monkeypatch)
    with pytest.raises(UserError, match="side_by_side=true on a GPU"):
        composed_plan("preset=throughput", "side_by_side=true")


def test_the_announcement_counts_runs_and_hours(monkeypatch):
    as_on_a_gpu(monkeypatch)
    text = announcement(composed_plan("preset=latency"))
    assert text.startswith("latency on llama3.2-1b: 3 variants x 3 repeats = 9 runs, about ")
