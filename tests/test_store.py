"""A run folder survives crashes, never holds a sample twice, and belongs to one process at a time."""

import json
import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.engines.contract import BlockUsageSample
from harness.errors import UserError
from harness.store import manifest as manifests
from harness.store.block_usage import append_block_usage
from harness.store.lock import LOCK, locked
from harness.store.manifest import Session, new_manifest, read_manifest, write_atomically, write_manifest
from harness.store.predictions import (
    FILE_NAME,
    SCORES,
    Prediction,
    append_prediction,
    append_score,
    fold_scores,
    open_for_append,
    read_predictions,
    replace_predictions,
)
from harness.store.result_code import ResultCode, policy_classes
from harness.store.run_folder import (
    check_same_run,
    clear,
    find_namesake,
    has_run,
    make_run_id,
    was_begun_under,
)

CONFIG = {
    "model": {"name": "smollm2-135m", "dtype": "float32"},
    "policy": {"name": "paged_eviction", "budget": 512, "options": {"eps": 1e-6}},
    "benchmark": {"name": "longbench", "path": None, "limit": 5},
    "engine": {"block_size": 32},
    "tracker": {"name": "none"},
    "results_dir": "results/runs",
    "overwrite": False,
}
MODEL = {"config.json": "c", "model.safetensors": "w"}
CODE = ResultCode("shared", {"policies.paged_eviction:PagedEviction": "own"})


def prediction(sample_id: str, text: str = "answer") -> Prediction:
    return Prediction(
        sample_id=sample_id,
        task="qasper",
        row_id=sample_id,
        prediction=text,
        answers=["answer"],
        all_classes=None,
        length=10,
        context_sha256="c",
        prompt_sha256="p",
        num_prompt_tokens=100,
        truncated=False,
        num_output_tokens=1,
        finish_reason="stop",
        num_evictions=0,
        num_evicted_tokens=0,
        peak_resident_tokens=100,
        final_resident_tokens=100,
        peak_blocks=4,
        num_preemptions=0,
        ttft_s=0.1,
        e2e_s=0.2,
    )


def write(folder, *predictions):
    with open_for_append(folder) as file:
        for one in predictions:
            append_prediction(file, one)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(), min_size=1, max_size=4), data=st.data())
def test_a_file_cut_at_any_byte_keeps_every_whole_line(tmp_path, texts, data):
    (tmp_path / FILE_NAME).unlink(missing_ok=True)
    whole = [prediction(str(number), text) for number, text in enumerate(texts)]
    write(tmp_path, *whole)
    content = (tmp_path / FILE_NAME).read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    (tmp_path / FILE_NAME).write_bytes(content[:cut])
    kept = whole[: content[:cut].count(b"\n")]
    assert read_predictions(tmp_path) == kept
    write(tmp_path, prediction("new"))
    assert read_predictions(tmp_path) == [*kept, prediction("new")]


def test_a_last_line_of_nul_bytes_is_cut_off(tmp_path):
    write(tmp_path, prediction("a"))
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(b"\0" * 40 + b"\n")
    assert read_predictions(tmp_path) == [prediction("a")]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    write(tmp_path, prediction("a"), prediction("b"))
    lines = (tmp_path / FILE_NAME).read_text().splitlines()
    (tmp_path / FILE_NAME).write_text("\n".join([lines[0][:-5], lines[1]]) + "\n")
    with pytest.raises(UserError, match=r"predictions\.jsonl:1 is no prediction"):
        read_predictions(tmp_path)


def test_a_sample_that_occurs_twice_is_refused(tmp_path):
    write(tmp_path, prediction("a"), prediction("a"))
    with pytest.raises(UserError, match=r"predictions\.jsonl:2 has sample a again"):
        read_predictions(tmp_path)


def test_line_separators_inside_a_prediction_do_not_split_its_line(tmp_path):
    tricky = prediction("a", "one\u2028two\x85three\r\nfour\x0bfive")
    write(tmp_path, tricky, prediction("b"))
    assert read_predictions(tmp_path) == [tricky, prediction("b")]


def test_scores_are_filled_in_without_losing_a_sample(tmp_path):
    write(tmp_path, prediction("a"), prediction("b"))
    scored = [replace(p, score=0.5, empty=False, extra_scores={"rouge1": 0.1}) for p in read_predictions(tmp_path)]
    replace_predictions(tmp_path, scored)
    assert read_predictions(tmp_path) == scored


def test_a_score_is_there_as_soon_as_it_is_written_and_joins_its_line_at_the_end(tmp_path):
    write(tmp_path, prediction("a"), prediction("b"))
    with open_for_append(tmp_path, SCORES) as file:
        append_score(file, "a", 0.5, {"rouge1": 0.1}, False)
        file.write('{"sample_id": "b", "sco')
    a, b = read_predictions(tmp_path)
    assert (a.score, a.extra_scores, a.empty, b.score) == (0.5, {"rouge1": 0.1}, False, None)
    fold_scores(tmp_path)
    assert not (tmp_path / SCORES).exists()
    assert read_predictions(tmp_path) == [a, b]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "manifest.json"
    write_atomically(path, "old")

    def full_disk(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"


def test_a_manifest_reads_back_equal(tmp_path):
    written = replace(
        new_manifest("id", CONFIG, "python -m harness", {"num_rows": 3}, {"engine": 0}),
        sessions=[Session("2026-01-01T00:00:00+00:00", "interrupted", num_samples=2)],
    )
    write_manifest(tmp_path, written)
    assert read_manifest(tmp_path) == written
    assert has_run(tmp_path)
    assert set(policy_classes().values()) <= written.own_code.keys()
    assert written.versions["hydra-core"] == "1.3.8"
    assert written.hardware["num_cores"] >= 1
    assert written.hardware["omp_num_threads"] == os.environ.get("OMP_NUM_THREADS")


def test_a_manifest_of_another_version_is_refused(tmp_path, monkeypatch):
    write_manifest(tmp_path, new_manifest("id", CONFIG, "python -m harness", {}, {}))
    monkeypatch.setattr(manifests, "SCHEMA_VERSION", 2)
    with pytest.raises(UserError, match="schema_version=1, this harness reads 2"):
        read_manifest(tmp_path)


def changed(**parts) -> dict:
    config = json.loads(json.dumps(CONFIG))
    for part, values in parts.items():
        config[part] = config[part] | values if isinstance(values, dict) else values
    return config


def test_a_run_id_is_readable_and_shows_budget_and_limit():
    run_id = make_run_id(CONFIG, "data", CODE, MODEL)
    assert run_id.startswith("paged_eviction-b512-smollm2-135m-longbench-limit5-")
    assert make_run_id(changed(), "data", CODE, MODEL) == run_id


@pytest.mark.parametrize(
    "parts",
    [
        {"policy": {"budget": 256}},
        {"policy": {"options": {"eps": 1e-3}}},
        {"engine": {"block_size": 64}},
        {"benchmark": {"limit": 6}},
        {"model": {"dtype": "bfloat16"}},
    ],
)
def test_what_decides_results_changes_the_run_id(parts):
    assert make_run_id(changed(**parts), "data", CODE, MODEL) != make_run_id(CONFIG, "data", CODE, MODEL)


def test_other_data_another_model_or_other_code_is_another_run():
    run_id = make_run_id(CONFIG, "data", CODE, MODEL)
    assert make_run_id(CONFIG, "data", CODE, MODEL | {"model.safetensors": "tuned"}) != run_id
    assert make_run_id(CONFIG, "other data", CODE, MODEL) != run_id
    for edited in (replace(CODE, shared_sha256="edited"), replace(CODE, own=dict.fromkeys(CODE.own, "edited"))):
        assert make_run_id(CONFIG, "data", edited, MODEL) != run_id


def leave_run(results, code: ResultCode, started_at: str = "2026-01-01T00:00:00+00:00", model=None, **parts):
    """A run that was begun with this code; returns its folder."""
    config = changed(**parts)
    data = {"content_sha256": "data"}
    model = MODEL if model is None else model
    run_id = make_run_id(config, "data", code, model)
    record = new_manifest(run_id, config, "python -m harness", data, {}, code, model)
    folder = results / record.run_id
    folder.mkdir(parents=True)
    write_manifest(folder, replace(record, claim="3-c0ffee", sessions=[Session(started_at)]))
    return folder


def test_the_newest_run_of_the_same_settings_and_other_code_is_found(tmp_path):
    wanted = read_manifest(leave_run(tmp_path / "elsewhere", CODE))
    folder = tmp_path / "runs" / wanted.run_id
    assert find_namesake(folder, wanted) is None
    leave_run(tmp_path / "runs", replace(CODE, shared_sha256="old"), "2026-01-01T00:00:00+00:00")
    newer = leave_run(tmp_path / "runs", replace(CODE, own={}), "2026-01-03T00:00:00+00:00", results_dir="elsewhere")
    leave_run(tmp_path / "runs", replace(CODE, shared_sha256="older"), "2026-01-02T00:00:00+00:00")
    leave_run(tmp_path / "runs", CODE, "2026-01-04T00:00:00+00:00", policy={"options": {"eps": 1e-3}})
    (tmp_path / "runs" / f"{wanted.run_id[:-10]}{'0' * 10}").mkdir()
    (tmp_path / "runs" / f"{wanted.run_id[:-10]}{'0' * 10}" / "manifest.json").write_text("torn")
    assert find_namesake(folder, wanted) == (newer, "other code")
    moved = leave_run(tmp_path / "runs", CODE, "2026-01-05T00:00:00+00:00", model=MODEL | {"config.json": "new"})
    assert find_namesake(folder, wanted) == (moved, "other files (config.json)")


def test_a_record_of_other_code_is_refused_with_the_module_that_differs(tmp_path):
    wanted = read_manifest(leave_run(tmp_path, CODE))
    with pytest.raises(UserError, match=r"own_code.*:PagedEviction is own there and edited here"):
        check_same_run(tmp_path, wanted, replace(wanted, own_code=dict.fromkeys(CODE.own, "edited")))


def test_a_run_knows_the_claim_that_it_was_begun_under(tmp_path):
    folder = leave_run(tmp_path, CODE)
    assert was_begun_under("3-c0ffee", folder)
    assert not was_begun_under("3-decade", folder)
    assert not was_begun_under(None, folder)
    (folder / "manifest.json").write_text("torn")
    assert not was_begun_under("3-c0ffee", folder)


@pytest.mark.parametrize(
    "parts",
    [
        {"benchmark": {"path": "elsewhere"}},
        {"model": {"path": "elsewhere"}},
        {"results_dir": "elsewhere"},
        {"tracker": {"name": "x"}},
        {"overwrite": True},
    ],
)
def test_what_does_not_decide_results_does_not(parts):
    assert make_run_id(changed(**parts), "data", CODE, MODEL) == make_run_id(CONFIG, "data", CODE, MODEL)


def test_clearing_a_run_keeps_only_the_lock(tmp_path):
    with locked(tmp_path):
        write(tmp_path, prediction("a"))
        (tmp_path / "figures").mkdir()
        clear(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_block_usage_of_two_sessions_stands_under_one_header(tmp_path):
    append_block_usage(tmp_path, 1, [BlockUsageSample(0.0, 3, 1)])
    append_block_usage(tmp_path, 2, [BlockUsageSample(0.5, 4, 2)])
    assert (
        tmp_path / "block_usage.csv"
    ).read_text() == "session,t_s,blocks,running,prefilling\n1,0.0,3,1,0\n2,0.5,4,2,0\n"
