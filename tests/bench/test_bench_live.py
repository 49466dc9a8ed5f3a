"""A load test from plan to files on real engines with a tiny model, one engine at a time in this process."""

import json
import shutil

import pytest

pytest.importorskip("vllm", reason="needs vLLM (make setup)")

from harness.bench.run import MANIFEST, run
from harness.errors import UserError
from tests.bench.scripted_server import composed_plan
from tests.tiny_llama import save_tiny_llama

pytestmark = pytest.mark.slow
POOL = 20
NUM_REQUESTS = 6


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    """Six requests of up to 7 blocks: the full cache outgrows 19 of them, two blocks each and a prompt do not."""
    folder = tmp_path_factory.mktemp("bench")
    model = save_tiny_llama(folder / "tiny")
    geometry = {"num_layers": 3, "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 32, "max_model_len": 1024}
    return [
        "name=live",
        "model.name=tiny",
        f"model.path={model}",
        *(f"model.{key}={value}" for key, value in geometry.items()),
        f"results_dir={folder}",
        "repeats=2",
        "side_by_side=false",
        "engine.in_process=true",
        f"engine.num_kv_blocks={POOL}",
        f"load.num_requests={NUM_REQUESTS}",
        "load.input_tokens=[60,90]",
        "load.output_tokens=[100,120]",
        "variants.budgets=[64]",
        "warmup.output_tokens=4",
    ]


@pytest.fixture(scope="module")
def result(overrides):
    with pytest.MonkeyPatch.context() as patch:
        for module in ("harness.config_checks", "harness.bench.config"):
            patch.setattr(f"{module}.inference_device", lambda: "cpu")
        folder = run(composed_plan(*overrides, "overwrite=true"), "a test")
    rows = json.loads((folder / "bench.json").read_text())
    return folder, {policy: [row for row in rows if row["policy"] == policy] for policy in ("full", "paged_eviction")}


def test_a_pool_that_the_full_cache_overfills_preempts_it_and_not_paged_eviction(result):
    _, rows = result
    assert [row["num_preemptions"] > 0 for row in rows["full"]] == [True, True]
    assert [row["num_preemptions"] for row in rows["paged_eviction"]] == [0, 0]


def test_paged_eviction_evicts_from_every_request_and_needs_fewer_steps(result):
    """More requests fit at once."""
    _, rows = result
    full, paged = rows["full"][0], rows["paged_eviction"][0]
    assert full["num_evictions"] == 0
    assert paged["num_evictions"] >= NUM_REQUESTS
    assert paged["num_steps"] < full["num_steps"]
    assert full["peak_blocks"] >= POOL - 2
    assert paged["peak_blocks"] <= POOL - 1


def test_the_peak_of_paged_eviction_is_in_prefill(result):
    """A prompt of up to 90 tokens takes three blocks, a decoding request 64 tokens and one block that fills."""
    _, rows = result
    for row in rows["paged_eviction"]:
        assert 3 <= row["peak_prefill_blocks"] <= row["peak_blocks"] <= NUM_REQUESTS * 3


def test_repeats_carry_the_same_load_and_times_add_up(result):
    _, rows = result
    for row in [*rows["full"], *rows["paged_eviction"]]:
        assert row["input_tokens"] == rows["full"][0]["input_tokens"]
        assert row["output_tok_s"] * row["duration_s"] == pytest.approx(row["output_tokens"] * NUM_REQUESTS)
        assert 0 < row["ttft_p50"] < row["e2e_p50"] <= row["duration_s"]
        assert 0 < row["itl_p50"] <= row["itl_p99"]
        assert 0 <= row["eviction_time_s"] < row["decode_s"] < row["duration_s"]


def test_the_folder_says_what_was_measured(result):
    folder, _ = result
    manifest = json.loads((folder / MANIFEST).read_text())
    assert (manifest["status"], manifest["command"]) == ("finished", "a test")
    assert manifest["config"]["load"]["num_requests"] == NUM_REQUESTS
    assert (folder / "bench.csv").read_text().count("\n") == 5
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"full-b32", "paged_eviction-64-b32"}


def test_a_finished_load_test_is_shown_and_not_measured_anew(result, overrides, capsys):
    folder, _ = result
    before = (folder / "bench.json").read_text()
    assert run(composed_plan(*overrides), "a test") == folder
    printed = capsys.readouterr().out
    assert "was finished before; overwrite=true measures it anew" in printed
    assert "output tok/s" in printed
    assert (folder / "bench.json").read_text() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ["load.num_requests=5"],
            r"another load test already: load.num_requests is 6 there and 5 here",
        ),
        (
            ["variants.options={paged_eviction: {protect_first: 32}}"],
            r"policy.options.protect_first is None there and 32",
        ),
    ],
)
def test_another_load_test_of_the_same_name_is_refused(result, overrides, change, message):
    folder, _ = result
    before = (folder / "bench.json").read_text()
    with pytest.raises(UserError, match=message):
        run(composed_plan(*overrides, *change), "a test")
    assert (folder / "bench.json").read_text() == before


@pytest.fixture
def cut(result, tmp_path):
    """The folder as a kill in the fourth run leaves it, whose steps were written and whose row was not."""
    folder = tmp_path / result[0].name
    shutil.copytree(result[0], folder)
    rows, manifest = json.loads((folder / "bench.json").read_text()), json.loads((folder / MANIFEST).read_text())
    (folder / "bench.json").write_text(json.dumps(rows[:3]))
    (folder / MANIFEST).write_text(json.dumps(manifest | {"status": "started"}))
    return folder, rows


def test_one_that_was_killed_goes_on(cut, overrides):
    folder, rows = cut
    run(composed_plan(*overrides, f"results_dir={folder.parent}"), "the second")
    found, manifest = json.loads((folder / "bench.json").read_text()), json.loads((folder / MANIFEST).read_text())
    assert found[:3] == rows[:3]
    assert [(row["label"], row["repeat"]) for row in found[3:]] == [(rows[3]["label"], 1)]
    assert (manifest["status"], manifest["command"]) == ("finished", "the second")
    assert [session["status"] for session in manifest["sessions"]] == ["finished", "finished"]
    usage = (folder / rows[3]["label"] / "block_usage.csv").read_text().splitlines()[1:]
    assert sum(line.startswith("1,") for line in usage) == sum(line.startswith("0,") for line in usage)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hardware", {"cpu": "another"}, r"cpu is another there"),
        ("versions", {"torch": "2.0"}, r"torch is 2.0 there"),
        ("own_code", {"harness.bench": "0"}, r"the code is another"),
        ("model", {"config.json": "0"}, r"model_files.config.json is 0 there"),
    ],
)
def test_one_of_other_circumstances_does_not_go_on(cut, overrides, field, value, message):
    folder, _ = cut
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {field: manifest[field] | value}))
    with pytest.raises(UserError, match=message):
        run(composed_plan(*overrides, f"results_dir={folder.parent}"), "the second")


def test_a_poisson_load_lets_requests_wait_for_their_arrival(overrides):
    poisson = ["name=poisson", "load.request_rate=10", "repeats=1", "variants.policies=[]"]
    folder = run(composed_plan(*overrides, *poisson), "a test")
    (row,) = json.loads((folder / "bench.json").read_text())
    assert row["duration_s"] > 0.3
    assert row["ttft_p50"] < row["duration_s"] / 2


def test_an_engine_that_does_not_start_is_one_clear_error(overrides):
    """The pool fits one request by the harness's count, and vLLM refuses the memory."""
    huge = ["name=huge", "engine.num_kv_blocks=null", "engine.kv_cache_gib=100000"]
    with pytest.raises(UserError, match=r"the engine of full-b32 did not start: .*[Mm]emory"):
        run(composed_plan(*overrides, *huge), "a test")
