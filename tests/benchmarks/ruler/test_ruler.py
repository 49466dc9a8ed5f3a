"""RULER: lm-eval's generators, their lengths, their rows and the scores of known answers."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest

from harness.benchmarks import lm_eval_files
from harness.benchmarks.generated import Making, make_rows
from harness.benchmarks.lm_eval_files import tasks_folder
from harness.benchmarks.prompting import render
from harness.benchmarks.ruler.draws import _niah_settings
from harness.benchmarks.ruler.generate import generate
from harness.benchmarks.ruler.local_files import OWN_FILLER
from harness.benchmarks.ruler.source import SHA256, take
from harness.benchmarks.ruler.tasks import QA_TASKS, RULER_TASKS, TABLE
from harness.benchmarks.sample_score import score_sample
from harness.benchmarks.sizing import largest_fitting
from harness.errors import UserError

GENERATED = [name for name in RULER_TASKS if name not in QA_TASKS]
LENGTH = 1024
ANSWER_TOKENS = {task.name: task.max_new_tokens for task in TABLE}
NUM_ANSWERS = {"niah_multiquery": 4, "niah_multivalue": 4, "ruler_vt": 5, "ruler_cwe": 10, "ruler_fwe": 3}


def count(row) -> int:
    """Words and numbers, digits apart: about what a tokenizer makes of it."""
    return len(re.findall(r"\d|[^\W\d]+|[^\w\s]", f"{row.context} {row.answer_prefix}"))


def rows_of(task, num_rows=2, length=LENGTH, seed=0, folder=None):
    return generate(task, length, num_rows, seed, count, folder)[0]


@pytest.mark.parametrize("task", GENERATED)
def test_rows_fill_the_length_and_hold_their_answers(task):
    rows = rows_of(task)
    room = LENGTH - ANSWER_TOKENS[task]
    assert all(0.85 * room < count(row) <= room for row in rows)
    assert rows[0].context != rows[1].context
    for row in rows:
        assert len(row.answers) == NUM_ANSWERS.get(task, 1)
        assert all(re.search(rf"\b{re.escape(answer)}\b", row.context) for answer in row.answers)
        assert render(row) == row.context
        assert row.answer_prefix
        assert row.answer_prefix not in row.context
        assert all(needle in row.context for needle in row.needles)


@pytest.mark.parametrize("task", GENERATED)
def test_a_row_depends_on_seed_and_number_alone(task):
    two, three = rows_of(task, num_rows=2), rows_of(task, num_rows=3)
    assert two == three[:2]
    assert rows_of(task, seed=1)[0].answers != two[0].answers


@pytest.mark.parametrize("task", [name for name in GENERATED if name.startswith("niah")])
def test_the_needle_of_each_answer_is_a_sentence_of_the_context(task):
    (row,) = rows_of(task, num_rows=1)
    assert len(row.needles) == len(row.answers)
    for needle, answer in zip(row.needles, row.answers, strict=True):
        assert re.fullmatch(rf"One of the special magic (numbers|uuids) for .+ is: {answer}\.", needle)
    assert (row.depth is None) == (len(row.needles) > 1)


def test_the_settings_are_those_of_lm_eval():
    assert _niah_settings("niah_multikey_3")["type_needle_k"] == "uuids"
    assert _niah_settings("niah_multivalue")["num_needle_v"] == 4
    assert _niah_settings("niah_single_2")["type_haystack"] == "essay"
    assert "special magic {type_needle_v}" in _niah_settings("niah_single_1")["template"]


def test_variable_tracking_asks_for_the_last_chain():
    (row,) = rows_of("ruler_vt", num_rows=1)
    value = re.findall(r"assigned the value (\d+)", row.context)[-1]
    first, *links = (dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", row.context))[name] for name in row.answers)
    assert first == value
    assert tuple(links) == row.answers[:-1]


def test_the_most_common_words_are_the_most_common():
    (row,) = rows_of("ruler_cwe", num_rows=1)
    words = re.findall(r"\d+\. (.+?)(?= \d+\. |\nQuestion)", row.context)
    assert set(row.answers) == {word for word in set(words) if words.count(word) == max(map(words.count, words))}


def test_a_changed_package_is_noticed_and_named(monkeypatch, tmp_path):
    folder = tmp_path / "tasks" / "ruler"
    shutil.copytree(tasks_folder("ruler"), folder)
    (folder / "vt_utils.py").write_bytes((folder / "vt_utils.py").read_bytes() + b"\n")
    (folder / "cwe_utils.py").unlink()
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(lm_eval_files.importlib.util, "find_spec", lambda name: found)
    with pytest.raises(UserError, match=r"vt_utils.py of lm-eval 0\.4\.13 is not the one.*pip install lm-eval==0"):
        take("vt_utils.py", ["TEMPLATE"])
    with pytest.raises(UserError, match=r"generators cannot be read.*cwe_utils"):
        take("cwe_utils.py", ["TEMPLATE"])


@pytest.mark.parametrize("file", SHA256)
def test_a_name_that_is_not_there_is_named(file):
    with pytest.raises(UserError, match=f"lm-eval's {file} has no NOWHERE"):
        take(file, ["NOWHERE"])


@pytest.mark.parametrize(
    ("task", "prediction", "answers", "score"),
    [
        ("niah_single_1", " 1234567.", ["1234567"], 1.0),
        ("niah_single_1", "1234568", ["1234567"], 0.0),
        ("niah_multivalue", "1111111, 2222222 and 5", ["1111111", "2222222", "3333333", "4444444"], 0.5),
        ("ruler_cwe", "1. Harbour 2. tide", ["harbour", "tide", "moss", "gull"], 0.5),
        ("ruler_qa_squad", "It was in the year\x07 1066", ["1067", "year\n 1066"], 1.0),
        ("ruler_qa_hotpot", "no", ["yes"], 0.0),
    ],
)
def test_known_answers_have_rulers_scores(task, prediction, answers, score):
    assert score_sample(task, prediction, answers, None).score == score


def making(**changes):
    return Making(
        **{"lengths": [512], "limit": 1, "depths": None, "haystack": None, "folder": None, "seed": 0} | changes
    )


def test_what_cannot_be_made_is_left_out_by_name_and_own_filler_is_labelled():
    _, reports, notes = make_rows("ruler", None, making(), count)
    assert [name for name in RULER_TASKS if name not in reports] == list(QA_TASKS)
    assert "left out: ruler_qa_squad needs dev-v2.0.json" in notes[0]
    assert (
        f"niah_single_2, niah_single_3, niah_multikey_1, niah_multiquery, niah_multivalue: the haystack is {OWN_FILLER}"
        in notes[-1]
    )
    assert {report.num_expected for report in reports.values()} == {500}
    with pytest.raises(UserError, match=r"ruler_qa_squad needs dev-v2\.0\.json"):
        make_rows("ruler", ["ruler_qa_squad"], making(), count)


def test_too_short_a_length_is_left_out_or_refused():
    notes = make_rows("ruler", None, making(lengths=[260, 1024]), count)[2]
    assert any(note.startswith("left out: ruler_cwe at 260: ruler_cwe needs") for note in notes)
    with pytest.raises(UserError, match=r"ruler_cwe at 260: .*needs \d+ prompt tokens at least.*leaves 140"):
        make_rows("ruler", ["ruler_cwe"], making(lengths=[260]), count)


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        ("ruler", {"lengths": []}, "benchmark.lengths="),
        ("ruler", {"lengths": [512, 512]}, "each once"),
        ("ruler", {"limit": 0}, "benchmark.limit=0"),
        ("ruler", {"depths": 3}, "benchmark.depths=3"),
        ("needle", {"haystack": "hay", "depths": 3}, "benchmark.haystack=hay"),
        ("needle", {"haystack": "repeat"}, "benchmark.depths=None"),
    ],
)
def test_settings_that_do_not_fit_are_named(source, changes, message):
    with pytest.raises(UserError, match=message):
        make_rows(source, None, making(**changes), count)


def test_essays_and_questions_come_from_local_files(tmp_path):
    (tmp_path / "essays.txt").write_text("Hedgehogs walk at night. They like slugs. " * 30)
    paragraphs = [
        {"context": f"Document about town {n}.", "qas": [{"question": f"Which town is {n}?", "is_impossible": False,
         "answers": [{"text": f"town {n}"}]}]}
        for n in range(40)
    ]  # fmt: skip
    (tmp_path / "dev-v2.0.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    (row,) = rows_of("niah_single_2", num_rows=1, folder=tmp_path)
    assert "Hedgehogs walk at night." in row.context
    (row,) = rows_of("ruler_qa_squad", num_rows=1, length=300, folder=tmp_path)
    assert row.answers == ("town 0",)
    assert "Document about town 0." in row.context
    assert row.context.endswith("Which town is 0?")
    (tmp_path / "hotpot_dev_distractor_v1.json").write_text("[{}]")
    with pytest.raises(UserError, match=r"hotpot_dev_distractor_v1.json is not the published file"):
        rows_of("ruler_qa_hotpot", folder=tmp_path)


@pytest.mark.parametrize("limit", [7, 8, 100, 101, 5000])
@pytest.mark.parametrize("guess", [1, 40, 9000])
def test_the_largest_size_that_fits_is_found(limit, guess):
    size = largest_fitting(lambda size: 5 + size * 3 // 2, limit, 1, guess, "x")
    assert 5 + size * 3 // 2 <= limit < 5 + (size + 1) * 3 // 2 + 1


def test_no_size_beyond_the_largest_is_tried():
    assert largest_fitting(lambda size: size, 1000, 1, 3, "x", largest=17) == 17
    assert largest_fitting(lambda size: size, 1000, 1, 50, "x", largest=1) == 1
