"""Odd inputs on the scripted engine: the right result, or one message that says what to do."""

import json
import os
import stat
from pathlib import Path

import pandas as pd
import pytest

from harness.benchmarks.loading import load_benchmark
from harness.benchmarks.prompting import render
from harness.errors import UserError
from harness.run.experiment import run
from harness.store.manifest import read_manifest
from harness.store.predictions import read_predictions
from tests.scripted_run import COMMAND, by_id, only_folder, scripted_config

TWO_TASKS = "benchmark.tasks=[qasper,trec]"
UNWRITABLE = Path("/sys/kernel/runs")  # read-only for everyone, root too
NASTY = {
    "emoji": "👩‍👩‍👧‍👦 \U0001f9d1\U0001f3fd‍\U0001f680",
    "right to left": "שלום \u202eעולם\u202c مرحبا",
    "combining": "e\u0301 Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L",
    "separators": "one\u2028two\u2029three\x85four\x0bfive\x0csix\r\nseven\rlast",
    "controls": "\x00\x01\x1b[31mred\x1b[0m\x7f\ufeff",
    "noncharacters": "\ufffe\uffff\U0010ffff\ufffd",
    "markup": "[bold]x[/bold] <script>alert(1)</script> {braces} %s \\n \"quotes\" '| cells |'",
    "astral Chinese": "𠀀𠮷 中文，句号。　全角空格",
}


@pytest.fixture
def start(byte_model, tmp_path, monkeypatch):
    """Start a run with more overrides; returns its folder."""
    monkeypatch.setattr("harness.config_checks.inference_device", lambda: "cpu")

    def start_run(*overrides: str, results: Path = tmp_path / "runs") -> Path:
        run(scripted_config(byte_model, results, *overrides), COMMAND)
        return only_folder(results)

    return start_run


def row(number: int, **fields: object) -> dict:
    return {
        "input": "Who?",
        "context": f"Text {number}. " * 60,
        "answers": ["nobody"],
        "length": 120,
        "dataset": "hotpotqa",
        "language": "en",
        "all_classes": None,
        "_id": f"row-{number}",
    } | fields


def write_rows(folder: Path, *rows: dict | bytes, task: str = "hotpotqa") -> list[str]:
    """Write a rows file; returns the overrides of a run over it."""
    folder.mkdir(exist_ok=True)
    lines = [one if isinstance(one, bytes) else json.dumps(one, ensure_ascii=False).encode() for one in rows]
    (folder / f"{task}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return ["benchmark=longbench", f"benchmark.path={folder}", f"benchmark.tasks=[{task}]", "policy=full"]


def test_a_place_that_cannot_be_written_is_named_before_anything_is_done(start):
    with pytest.raises(UserError, match=r"^/sys/kernel/runs.*: (Operation not permitted|Permission denied|Read-only)"):
        start(results=UNWRITABLE)


def test_a_file_in_the_place_of_the_results_is_named(start, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/.*: Not a directory\. Finished samples are kept; mend that"):
        start(results=tmp_path / "file" / "runs")


def test_a_folder_in_the_place_of_the_rows_file_is_named(start, tmp_path):
    overrides = write_rows(tmp_path / "data", row(1))
    (tmp_path / "data" / "hotpotqa.jsonl").unlink()
    (tmp_path / "data" / "hotpotqa.jsonl").mkdir()
    with pytest.raises(UserError, match=r"hotpotqa\.jsonl"):
        start(*overrides)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_rows_file_without_permission_is_named(start, tmp_path):
    overrides = write_rows(tmp_path / "data", row(1))
    (tmp_path / "data" / "hotpotqa.jsonl").chmod(stat.S_IWUSR)
    with pytest.raises(UserError, match=r"hotpotqa\.jsonl: Permission denied"):
        start(*overrides)


UNREADABLE = [b'{"input": ', b"\xff\xfe not UTF-8", b"[1, 2]", b"null", b"{}", b"\x00" * 50]


@pytest.mark.parametrize("bad", UNREADABLE)
def test_an_unreadable_row_is_named_by_file_and_line_and_nothing_is_run(start, tmp_path, bad):
    overrides = write_rows(tmp_path / "data", row(1), bad, row(3))
    with pytest.raises(UserError, match=r"hotpotqa\.jsonl:2: .+ benchmark.on_bad_row=skip"):
        start(*overrides)
    assert not (tmp_path / "runs").exists()


def test_unreadable_rows_can_be_left_out_and_the_record_says_which(start, tmp_path):
    rows = [one for number, bad in enumerate(UNREADABLE) for one in (row(number), bad)]
    folder = start(*write_rows(tmp_path / "data", *rows), "benchmark.on_bad_row=skip")
    assert sorted(by_id(folder)) == [f"hotpotqa/row-{number}" for number in range(len(UNREADABLE))]
    skipped = read_manifest(folder).data["skipped"]["hotpotqa"]
    assert [note.split(":")[1] for note in skipped] == [str(2 * number + 2) for number in range(len(UNREADABLE))]


def test_a_prompt_of_100k_tokens_is_cut_in_the_middle_to_a_small_context(start, tmp_path):
    long = row(1, context="The start. " + "x" * 100_000 + " The end.")
    overrides = write_rows(tmp_path / "data", long, row(2, context="short"))
    folder = start(*overrides, "model.max_model_len=1024", "policy=streaming_llm", "policy.budget=256")
    cut, short = (by_id(folder)[f"hotpotqa/row-{number}"] for number in (1, 2))
    assert cut.truncated
    assert not short.truncated
    assert cut.num_prompt_tokens == 1024 - 32
    assert cut.num_evicted_tokens == 1024 - 32 - 256


def test_a_context_without_room_for_a_prompt_says_how_much_is_needed(start, tmp_path):
    with pytest.raises(UserError, match=r"model.max_model_len=32 leaves no room for a prompt of hotpotqa.*at least 34"):
        start(*write_rows(tmp_path / "data", row(1)), "model.max_model_len=32")


def test_a_budget_larger_than_the_context_runs_and_says_that_nothing_is_evicted(start, tmp_path, capsys):
    overrides = write_rows(tmp_path / "data", row(1))
    folder = start(*overrides, "policy=streaming_llm", "model.max_model_len=1024", "policy.budget=1024")
    assert read_manifest(folder).status == "finished"
    assert [p.num_evictions for p in read_predictions(folder)] == [0]
    assert (
        "warning: policy.budget=1024 holds all of model.max_model_len=1024 tokens: policy=streaming_llm never evicts."
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("limits", [("min", 10**6), ("max", 1)])
def test_filters_that_leave_no_row_are_named(start, limits):
    which, tokens = limits
    with pytest.raises(UserError, match=rf"no row is left: .*benchmark.{which}_prompt_tokens={tokens}.* Widen them"):
        start(TWO_TASKS, f"benchmark.{which}_prompt_tokens={tokens}")


def test_a_task_that_loses_all_its_rows_to_a_filter_keeps_its_place_without_a_score(start, tmp_path):
    lengths = {p.task: p.num_prompt_tokens for p in read_predictions(start(TWO_TASKS, "policy=full"))}
    shorter, longer = sorted(lengths, key=lengths.get)
    limit = f"benchmark.max_prompt_tokens={lengths[shorter]}"
    folder = start(TWO_TASKS, "policy=full", limit, results=tmp_path / "filtered")
    tasks = {task["task"]: task for task in json.loads((folder / "metrics.json").read_text())["tasks"]}
    assert (tasks[shorter]["num_samples"], tasks[longer]["num_samples"]) == (1, 0)
    assert tasks[longer]["score"] is None


def test_a_tokenizer_without_chat_template_gets_the_plain_prompts(start, byte_model):
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(byte_model).chat_template is None
    predictions = by_id(start(TWO_TASKS, "policy=full"))
    rows = load_benchmark("mini", None, None, ["qasper", "trec"], 1, "fail", False, 0).rows
    lengths = {f"{one.task}/{one.row_id}": len(render(one).encode()) for one in rows}
    assert {name: p.num_prompt_tokens for name, p in predictions.items()} == lengths


@pytest.mark.parametrize("kind", NASTY)
def test_unicode_of_all_sorts_comes_through_unchanged(start, tmp_path, kind):
    text = NASTY[kind]
    one = row(1, context=text * 9, input=text, answers=[text, "nobody"], _id=f"id {text}")
    folder = start(*write_rows(tmp_path / "data", one, row(2)))
    predictions = by_id(folder)
    prediction = predictions[f"hotpotqa/id {text}"]
    assert (prediction.row_id, prediction.answers[0]) == (f"id {text}", text)
    assert len(predictions) == 2
    table = pd.read_csv(folder / "summary.csv")
    assert (table["num_samples"].item(), table["status"].item()) == (2, "finished")
    run_again = start(*write_rows(tmp_path / "data", one, row(2)))
    assert run_again == folder
    assert read_manifest(folder).sessions[0].num_samples == 2


def test_an_answer_of_the_model_in_unicode_comes_through_unchanged(start, tmp_path, monkeypatch):
    text = "".join(NASTY.values())
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.decode", lambda *_, **__: text)
    (prediction,) = read_predictions(start(*write_rows(tmp_path / "data", row(1, answers=[text]))))
    assert prediction.prediction == text
    assert prediction.score == 1.0


def test_half_a_surrogate_pair_is_no_text(start, tmp_path):
    half = json.dumps(row(1, input="half \ud83d")).encode()
    with pytest.raises(UserError, match=r"hotpotqa\.jsonl:1: it holds half a surrogate pair"):
        start(*write_rows(tmp_path / "data", half))
