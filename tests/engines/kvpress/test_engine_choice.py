"""`engine=hf` and `engine=kvpress`: what they are built from, what they refuse, and a whole run on the reference."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from harness.config import register_schema
from harness.config_checks import to_dataclass
from harness.engines.choose import build_engine, check_policy
from harness.engines.hf.engine import ReferenceEngine
from harness.errors import UserError
from harness.report.reading.retention import read_maps
from harness.report.reading.runs import make_groups, read_runs
from harness.report.tables.costs import memory_table
from harness.retention import read_retention
from harness.run.experiment import run
from harness.store.predictions import read_predictions
from policies.snapkv import SnapKV
from tests.tiny_llama import save_tiny_llama

BUDGET = 64


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def configure(monkeypatch):
    """The configuration of a command line."""
    monkeypatch.setattr("harness.config_checks.inference_device", lambda: "cpu")
    register_schema()

    def compose_config(*overrides: str):
        with initialize_config_module(version_base="1.3", config_module="conf"):
            return to_dataclass(compose("config", list(overrides)))

    return compose_config


@pytest.fixture
def run_on_reference(configure, tiny_path, tmp_path):
    """A finished run of one sample under `overrides`: its folder."""

    def run_folder(*overrides: str) -> Path:
        model = (f"model.path={tiny_path}", "model.max_model_len=256")
        config = configure("engine=hf", *overrides, *model, "benchmark.tasks=[trec]", f"results_dir={tmp_path}")
        run(config, "python -m harness")
        (folder,) = tmp_path.iterdir()
        return folder

    return run_folder


class Recorder:
    """Takes the place of `KvpressEngine`."""

    def __init__(self, *arguments, **named):
        self.arguments, self.named = arguments, named


def memory_cells(folder: Path) -> dict[str, str]:
    """What the report's memory table says of a run, by title of the column."""
    (group,) = make_groups(read_runs([folder]))
    table = memory_table(group)
    return {column.title: cell.text for column, cell in zip(table.columns, table.rows[0], strict=True)}


@pytest.mark.parametrize("policy", ["full", "snapkv", "h2o"])
def test_a_run_on_the_reference(run_on_reference, policy):
    budget = [] if policy == "full" else [f"policy.budget={BUDGET}"]
    folder = run_on_reference(f"policy={policy}", *budget, "record_retention=true")
    (prediction,) = read_predictions(folder)
    assert prediction.num_prompt_tokens > 2 * BUDGET
    assert prediction.num_output_tokens > 1
    num_decoded = prediction.num_output_tokens - 1
    at_end = {"full": prediction.num_prompt_tokens + num_decoded, "snapkv": BUDGET + num_decoded, "h2o": BUDGET + 1}
    assert prediction.final_resident_tokens == at_end[policy]
    retained = {} if policy == "full" else {"prefill_end": BUDGET, "end": at_end[policy] - (policy == "h2o")}
    assert {
        (one.sample_id, one.phase): [[len(positions) for positions in heads] for heads in one.layers]
        for one in read_retention(folder)
    } == {(prediction.sample_id, phase): [[length] * 2] * 3 for phase, length in retained.items()}


def test_a_run_records_what_layers_and_heads_kept(run_on_reference, capsys):
    options = ("policy.budget=96", "policy.options.beta=2", "record_retention=true")
    folder = run_on_reference("policy=pyramid_kv", *options)
    metrics = json.loads((folder / "metrics.json").read_text())
    split = [[128, 128], [96, 96], [64, 64]]  # beside the window of 8: 132, 88 and 44 tokens, in pages of 32
    assert metrics["kept_by_head"] == {"num_prompts": 1, "mean": split, "least": split, "most": split}
    memory = metrics["memory"]
    assert (memory["mean_kept_tokens"], memory["least_kept_tokens"], memory["most_kept_tokens"]) == (96, 64, 128)
    (prediction,) = read_predictions(folder)
    num_tokens = prediction.num_prompt_tokens + prediction.num_output_tokens
    assert memory["mean_resident_share"] == pytest.approx(prediction.final_resident_tokens / num_tokens, abs=1e-4)
    assert "a layer and head kept 64 to 128 tokens of a prompt, 96 on average" in " ".join(
        capsys.readouterr().out.split()
    )
    cells = memory_cells(folder)
    assert (cells["Kept of a prompt"], cells["Least"], cells["Most"]) == ("96", "64", "128")
    (alone,) = read_runs([folder])
    after_prompt = read_maps(alone)[prediction.sample_id, "prefill_end"]
    width = after_prompt.num_tokens / after_prompt.shares.shape[1]
    widths = [prediction.num_prompt_tokens * share for share in after_prompt.shares.mean(axis=1)]
    assert widths == pytest.approx([128, 96, 64], abs=width), "bins are equally wide but for one token"


def test_the_reference_gets_policy_block_size_and_dtype(configure, tiny_path, tmp_path):
    config = configure("engine=hf", "policy=snapkv", "engine.block_size=64", "policy.options.window=16")
    engine = build_engine(config, str(tiny_path), tmp_path)
    assert isinstance(engine, ReferenceEngine)
    assert engine.stats().block_size == 64
    assert engine._policy == SnapKV(budget=512, block_size=64, window=16)


@pytest.mark.parametrize(
    ("overrides", "press", "budget"),
    [
        (["policy=full"], None, None),
        (["policy=keydiff", "policy.budget=128"], {"name": "KeyDiffPress"}, 128),
        (
            [
                "policy=full",
                "policy.name=kvpress:AdaKVPress",
                "policy.budget=96",
                "+policy.options={press: {name: SnapKVPress, window_size: 32}}",
            ],
            {"name": "AdaKVPress", "press": {"name": "SnapKVPress", "window_size": 32}},
            96,
        ),
    ],
)
def test_the_peer_gets_press_and_budget(configure, monkeypatch, overrides, press, budget):
    monkeypatch.setattr("harness.engines.kvpress.engine.KvpressEngine", Recorder)
    engine = build_engine(configure("engine=kvpress", *overrides, "model.revision=v1"), "model", Path("run"))
    assert engine.arguments == ("model", press, budget, "float32", 32, "v1")


@pytest.mark.parametrize(
    ("policy", "budgets"),
    [
        (["policy=keydiff"], {100: 64, 1000: 256, 1025: 288}),
        (["policy=snapkv", "policy.options.window=70"], {100: 96, 1000: 256, 1025: 288}),
        (["policy=full", "policy.name=kvpress:KnormPress"], {100: 64, 1000: 256, 1025: 288}),
    ],
    ids=str,
)
def test_the_peer_keeps_as_much_of_each_prompt_as_we_do(configure, monkeypatch, policy, budgets):
    monkeypatch.setattr("harness.engines.kvpress.engine.KvpressEngine", Recorder)
    engine = build_engine(configure("engine=kvpress", *policy, "policy.budget=25%"), "model", Path("run"))
    assert engine.arguments[2] is None
    assert {length: engine.named["budget_of"](length) for length in budgets} == budgets


def test_the_peer_records_no_positions(configure):
    with pytest.raises(UserError, match=r"record_retention=true is not for engine=kvpress\. Use engine=vllm or hf"):
        check_policy(configure("engine=kvpress", "policy=snapkv", "record_retention=true"))


def test_the_peer_checks_its_policy_before_the_model_is_loaded(configure, monkeypatch):
    monkeypatch.setattr("harness.engines.kvpress.process.check_environment", lambda: None)
    check_policy(configure("engine=kvpress", "policy=snapkv"))
    with pytest.raises(UserError, match="ObservedAttentionPress"):
        check_policy(configure("engine=kvpress", "policy=h2o"))
    with pytest.raises(UserError, match=r"policy\.options\.kernel=4 is even"):
        check_policy(configure("engine=kvpress", "policy=snapkv", "policy.options.kernel=4"))


@pytest.mark.parametrize(
    ("policy", "budget", "num_chosen"),
    [("lagkv", 256, 124), ("lagkv", 288, None), ("paged_eviction", 96, 32), ("paged_eviction", 128, None)],
)
def test_a_choice_that_is_mostly_made_by_position_is_named(configure, capsys, policy, budget, num_chosen):
    check_policy(configure("engine=hf", f"policy={policy}", f"policy.budget={budget}"))
    said = capsys.readouterr().err
    expected = f"warning: policy={policy} chooses at most {num_chosen} of policy.budget={budget} tokens by score"
    assert said.startswith(expected) if num_chosen else not said


@pytest.mark.parametrize(("budget", "warned"), [(192, True), (256, True), (512, False)])
def test_sentences_that_can_hardly_be_chosen_are_named(configure, capsys, budget, warned):
    check_policy(configure("engine=hf", "policy=sentencekv", f"policy.budget={budget}", "engine.block_size=32"))
    assert ("hardly a sentence is chosen" in capsys.readouterr().err) == warned


def test_a_press_is_no_policy_of_another_engine(configure):
    with pytest.raises(UserError, match=r"policy\.name=kvpress:KnormPress is unknown"):
        check_policy(configure("engine=hf", "policy=full", "policy.name=kvpress:KnormPress", "policy.budget=96"))


@pytest.mark.parametrize("engine", ["hf", "kvpress"])
@pytest.mark.parametrize("setting", ["max_num_seqs=4", "num_kv_blocks=100", "kv_cache_gib=1", "in_process=true"])
def test_settings_of_vllm_have_no_silent_effect(configure, engine, setting):
    with pytest.raises(UserError, match=f"no effect with engine={engine}"):
        configure(f"engine={engine}", f"engine.{setting}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["policy=snapkv", "policy.budget=null"], "policy=snapkv needs policy.budget"),
        (["policy=corm", "policy.budget=128"], "policy=corm lets the data decide, so policy.budget=128 has no effect"),
        (["policy=head_classes"], "policy=head_classes needs policy.options.heads, a list of [layer, head]"),
        (
            ["policy=head_classes", "policy.options.heads=[[30,0]]"],
            "policy.options.heads names [30, 0], but the model has 30 layers of 3 KV heads",
        ),
        (["policy=inverse_key_l2", "policy.options.skip_layers=30"], "skip_layers=30 is too large for a model of 30"),
    ],
)
def test_a_policy_that_does_not_fit_is_refused_before_a_model_is_loaded(configure, overrides, message):
    with pytest.raises(UserError) as error:
        check_policy(configure("engine=hf", *overrides))
    assert message in str(error.value)


def test_a_run_records_what_was_read_beside_what_was_freed(run_on_reference, capsys):
    folder = run_on_reference("policy=quest", "policy.budget=96", "policy.options.dense_layers=1")
    (prediction,) = read_predictions(folder)
    metrics = json.loads((folder / "metrics.json").read_text())
    memory, read = metrics["memory"], metrics["read_by_head"]
    num_steps = prediction.num_output_tokens - 1
    held = [prediction.num_prompt_tokens + step + 1 for step in range(num_steps)]
    pages = [64 + (tokens - 1) % 32 + 1 for tokens in held]  # two whole pages and the newest
    assert prediction.num_evictions == 0
    assert memory["mean_resident_share"] == pytest.approx(1, abs=0.01)
    assert read["num_steps"] == num_steps > 1
    by_layer = [sum(held), sum(pages), sum(pages)]
    assert read["mean_tokens"] == [[round(total / num_steps, 2)] * 2 for total in by_layer]
    assert memory["mean_read_share"] == pytest.approx(sum(by_layer) / (3 * sum(held)), abs=1e-4)
    assert memory["mean_read_tokens"] == pytest.approx(sum(by_layer) / 3 / num_steps, abs=0.1)
    said = f"a decode step read {100 * memory['mean_read_share']:.1f} % of them, which frees nothing"
    assert said in " ".join(capsys.readouterr().out.split())
    assert memory_cells(folder)["Read"] == f"{100 * memory['mean_read_share']:.1f}"
