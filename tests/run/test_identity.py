"""Which run is this? What a run is named by, and what is refused because it is of another run."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from harness.engines.contract import EvictionRecord
from harness.errors import UserError
from harness.model_identity import folder_digests
from harness.run import experiment
from harness.run.experiment import run
from harness.store.manifest import read_manifest, write_manifest
from harness.store.predictions import FILE_NAME, read_predictions
from tests.scripted_engine import ScriptedEngine
from tests.scripted_run import COMMAND, scripted_config

NOTHING = EvictionRecord()


@pytest.fixture
def model(byte_model, tmp_path):
    """A model folder of one's own."""
    return Path(shutil.copytree(byte_model, tmp_path / "model"))


@pytest.fixture
def start(model, tmp_path, monkeypatch):
    """Start a run of two samples; returns its folder, the newest one."""
    monkeypatch.setattr("harness.config_checks.inference_device", lambda: "cpu")

    def start_run(*overrides: str) -> Path:
        tasks = ["benchmark.tasks=[qasper,trec]", "benchmark.limit=1"]
        run(scripted_config(model, tmp_path / "runs", *tasks, *overrides), COMMAND)
        return max((tmp_path / "runs").iterdir(), key=lambda folder: (folder / FILE_NAME).stat().st_mtime_ns)

    return start_run


def test_new_weights_in_the_same_folder_are_another_run(start, model, tmp_path, capsys):
    (model / "model.safetensors").write_bytes(bytes(2**21))
    first = start()
    assert start() == first
    weights = bytearray(2**21)
    weights[12345] = 1
    (model / "model.safetensors").write_bytes(weights)
    assert start() != first
    said = f"the same settings ran before with other files (model.safetensors): {first}"
    assert said in capsys.readouterr().out


def test_another_tokenizer_is_another_run(start, model):
    first = start()
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(tokenizer | {"truncation": None}, indent=1))
    assert start() != first


def test_a_copy_of_the_model_elsewhere_is_the_same_run_and_so_is_a_touched_one(start, model, tmp_path, capsys):
    first = start()
    os.utime(model / "config.json", (1, 1))
    (model / "README.md").write_text("notes")
    (model / "optimizer.pt").write_bytes(b"x")
    assert start() == first
    copied = Path(shutil.copytree(model, tmp_path / "copied"))
    assert start(f"model.path={copied}") == first
    assert capsys.readouterr().out.count("this run is finished already") == 2


def test_a_file_of_the_policy_counts_by_its_content(start, tmp_path):
    def start_with(scores: list, name: str) -> Path:
        (tmp_path / name).write_text(json.dumps({"scores": scores}))
        return start("policy=head_classes", f"policy.options.file={tmp_path / name}")

    heads = [[float(layer * 3 + head) for head in range(3)] for layer in range(30)]
    first = start_with(heads, "heads.json")
    assert start_with(heads, "heads.json") == first
    assert start_with(heads[::-1], "heads.json") != first


def test_large_files_are_read_once_and_again_after_a_change(model, tmp_path, monkeypatch):
    weights = model / "model.safetensors"
    weights.write_bytes(bytes(2**21))
    first = folder_digests(model, tmp_path)
    monkeypatch.setattr("hashlib.file_digest", lambda file, kind: pytest.fail(f"reads {file.name} again"))
    monkeypatch.setattr("harness.model_identity.LARGE", 0)
    known = json.loads((tmp_path / "file-digests.json").read_text())
    assert list(known) == [str(weights.resolve())]
    monkeypatch.undo()
    assert folder_digests(model, tmp_path) == first
    os.utime(weights, (1, 1))
    assert folder_digests(model, tmp_path) == first
    weights.write_bytes(bytes(2**21 - 1) + b"x")
    assert folder_digests(model, tmp_path) != first
    assert folder_digests(model, Path("/dev/null/unwritable")) == folder_digests(model, tmp_path)


def test_a_moved_branch_of_the_hub_is_another_run(monkeypatch):
    from harness.models import identify_model
    from tests.test_models import LLAMA

    monkeypatch.setattr("harness.models.weight_problems", lambda model: [])
    for commit in ("a" * 40, "b" * 40):
        monkeypatch.setattr("harness.model_identity.commit_of", lambda repo, revision, commit=commit: commit)
        assert identify_model(LLAMA) == {"repository": LLAMA.path, "commit": commit}


def unfinished(folder: Path) -> None:
    write_manifest(folder, replace(read_manifest(folder), status="interrupted", predictions_sha256=None))


def edit_line(folder: Path, **fields: object) -> None:
    first, *others = (folder / FILE_NAME).read_text().splitlines()
    (folder / FILE_NAME).write_text("\n".join([json.dumps(json.loads(first) | fields), *others]) + "\n")


def test_a_foreign_line_is_refused_by_name(start):
    folder = start()
    unfinished(folder)
    edit_line(folder, sample_id="qasper/foreign")
    with pytest.raises(UserError, match=r"no samples of this run: qasper/foreign\. Delete these 1 lines, or use over"):
        start()


def test_an_answer_to_another_prompt_is_refused_by_name(start):
    folder = start()
    unfinished(folder)
    edit_line(folder, prompt_sha256="0" * 64)
    name = json.loads((folder / FILE_NAME).read_text().splitlines()[0])["sample_id"]
    with pytest.raises(UserError, match=f"answers to other prompts than this run asks: {name}"):
        start()


@pytest.mark.parametrize("damage", ["", "{", "[]"])
@pytest.mark.parametrize("name", ["metrics.json", "summary.csv"])
def test_figures_that_are_gone_or_damaged_are_computed_again(start, name, damage):
    folder = start()
    whole = {each: (folder / each).read_text() for each in ("metrics.json", "summary.csv")}
    (folder / name).write_text("" if name == "summary.csv" else damage)
    start()
    assert {each: (folder / each).read_text() for each in whole} == whole
    (folder / name).unlink()
    start()
    assert {each: (folder / each).read_text() for each in whole} == whole


def test_a_finished_run_without_its_predictions_is_refused_by_name(start):
    folder = start()
    (folder / FILE_NAME).unlink()
    with pytest.raises(UserError, match=r"predictions\.jsonl of this finished run is gone\. Put it back, or use over"):
        start()


def test_a_finished_run_whose_predictions_were_changed_is_refused_by_name(start):
    folder = start()
    edit_line(folder, score=1.0)
    with pytest.raises(UserError, match=r"predictions\.jsonl is not what this run wrote when it finished"):
        start()
    assert all(p.score != 1.0 for p in read_predictions(start("overwrite=true")))


def other_version(folder: Path) -> None:
    manifest = read_manifest(folder)
    write_manifest(folder, replace(manifest, versions=manifest.versions | {"transformers": "4.0.0"}))


def test_a_run_is_not_gone_on_with_under_other_versions(start):
    folder = start()
    unfinished(folder)
    other_version(folder)
    with pytest.raises(UserError, match=r"was begun with transformers 4\.0\.0 \(here 5.*or use overwrite=true"):
        start()


def test_a_finished_run_of_other_versions_says_so(start, capsys):
    other_version(start())
    start()
    assert "was made with transformers 4.0.0 (here 5" in capsys.readouterr().err


def test_a_model_that_stops_at_once_is_no_fault_of_the_policy(start, monkeypatch, capsys):
    answer = ScriptedEngine._answer
    monkeypatch.setattr(
        ScriptedEngine, "_answer", lambda self, *given: replace(answer(self, *given), token_ids=[66], eviction=NOTHING)
    )
    folder = start("policy.budget=64", "benchmark.tasks=[qasper]")
    assert read_manifest(folder).status == "finished"
    assert "1 of 1 answers to prompts that policy=paged_eviction cuts have one token or none" in capsys.readouterr().err
    assert experiment.read_metrics(folder)["eviction"]["num_full_cache_answers"] == 1


def test_all_that_is_missing_is_said_at_once(start, model):
    shutil.rmtree(model)
    with pytest.raises(UserError) as error:
        start("benchmark=longbench", "benchmark.path=no/rows", "policy=snapkv", "+policy.options.windw=3")
    missing = ["benchmark.path=no/rows does not exist", "Did you mean window?", str(model)]
    for words in ("3 things are in the way: (1)", *missing):
        assert words in str(error.value)


def test_a_context_above_the_model_s_own_is_told_before_anything_is_loaded(start, model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    with pytest.raises(UserError, match=r"model\.max_model_len=8192 is above its own context of 2048 tokens"):
        start()
    start("model.max_model_len=2048")


def with_template(model, template: str) -> None:
    (model / "chat_template.jinja").write_text(template)


def test_the_record_says_which_template_was_used_and_without_one_the_run_says_so(start, model, capsys):
    first = read_manifest(start()).prompting
    assert first == {"chat_template": None, "tasks_without": ["qasper", "trec"]}
    assert "no chat template; prompts go to the model as they are" in capsys.readouterr().out
    with_template(model, "Q: {{ messages[0]['content'] }} A:")
    second = read_manifest(start()).prompting
    assert (second["chat_template"]["name"], second["tasks_without"]) == ("default", ["trec"])
    assert "no chat template" not in capsys.readouterr().out


def test_other_arguments_of_the_template_are_another_run(start, model):
    with_template(model, "{{ messages[0]['content'] }}{% if enable_thinking %}<think>{% endif %}")
    assert start("+model.template_arguments.enable_thinking=true") != start()


def test_answers_cut_inside_their_reasoning_are_told_loudly(start, model, capsys):
    with_template(model, "{{ messages[0]['content'] }}<think>")
    folder = start()
    assert "1 of 2 answers were cut inside a reasoning block (<think>)" in capsys.readouterr().err
    tasks = experiment.read_metrics(folder)["tasks"]
    assert {task["task"]: task["num_cut_in_reasoning"] for task in tasks} == {"qasper": 1, "trec": 0}
