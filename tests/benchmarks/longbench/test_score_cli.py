"""`python -m harness.score`."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.benchmarks.longbench.aggregates import averages
from harness.benchmarks.longbench.result_file import differences, meta_path, official_result, result_meta, write_result
from harness.benchmarks.scoring import task_score
from harness.score import main
from tests.benchmarks.longbench.published import published_set

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = {"edit_similarity": "difflib"}
LINE, GOLD = "self.assertEqual(value, 1); " * 12, "self.assertTrue(values[1]); " * 12


def _row(pred="Paris", answers=("Paris",), all_classes=None, length=100) -> dict:
    return {"pred": pred, "answers": list(answers), "all_classes": all_classes, "length": length}


def _write(folder, task, rows) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _result(folder, name="result.json") -> dict:
    return json.loads((folder / name).read_text(encoding="utf-8"))


class TestWriting:
    def test_the_result_has_the_official_shape_and_its_meta_file_says_what_it_is_of(self, tmp_path, capsys):
        _write(tmp_path, "qasper", [_row(), _row("Rome")])
        _write(tmp_path, "lcc", [_row(LINE, [GOLD])])
        assert main([str(tmp_path), "--edit-similarity", "levenshtein"]) == 0
        assert _result(tmp_path) == {"qasper": 50.0, "lcc": 79.0}
        meta = _result(tmp_path, "result.meta.json")
        digest = hashlib.sha256((tmp_path / "lcc.jsonl").read_bytes()).hexdigest()
        assert meta["files_sha256"]["lcc.jsonl"] == digest
        assert meta["scorer"]["edit_similarity"] == "levenshtein"
        assert meta["scorer"]["packages"]["jieba"] == "0.42.1"
        assert (meta["tasks"]["qasper"]["n"], meta["tasks"]["qasper"]["expected"]) == (2, 200)
        printed = capsys.readouterr().out
        assert "code_sim (levenshtein)" in printed
        assert "50.00 (2/200)" in printed

    def test_reasoning_blocks_in_predictions_are_told(self, tmp_path, capsys):
        _write(tmp_path, "qasper", [_row(), _row("<think>x</think>Paris"), _row("<think>Let me")])
        assert main([str(tmp_path)]) == 0
        said = (
            "2 of 3 predictions of qasper hold a reasoning block (<think>), which is scored as if it were the answer; 1"
        )
        assert said in capsys.readouterr().out

    def test_a_byte_order_mark_is_read_over(self, tmp_path):
        (tmp_path / "qasper.jsonl").write_text(json.dumps(_row()) + "\n", encoding="utf-8-sig")
        assert main([str(tmp_path)]) == 0

    def test_an_existing_result_stays_but_the_table_is_printed(self, tmp_path, capsys):
        _write(tmp_path, "qasper", [_row()])
        (tmp_path / "result.json").write_text('{"qasper": 1.0}')
        assert main([str(tmp_path)]) == 2
        printed = capsys.readouterr()
        assert "100.00 (1/200)" in printed.out
        assert "result.json exists" in printed.err
        assert printed.err.count("\n") == 1
        assert _result(tmp_path) == {"qasper": 1.0}
        assert main([str(tmp_path), "--overwrite"]) == 0
        assert _result(tmp_path) == {"qasper": 100.0}
        assert not list(tmp_path.glob("*.tmp"))

    def test_longbench_e_is_scored_by_length(self, tmp_path, capsys):
        _write(tmp_path, "qasper", [_row(), _row("Rome", length=3999), _row(length=4000), _row(length=8000)])
        assert main([str(tmp_path), "--longbench-e", "--out", str(tmp_path / "e.json")]) == 0
        assert _result(tmp_path, "e.json") == {"qasper": {"0-4k": 50.0, "4-8k": 100.0, "8k+": 100.0}}
        assert _result(tmp_path, "e.meta.json")["tasks"]["qasper"]["8k+"]["expected"] == 24
        assert "qasper 8k+" in capsys.readouterr().out

    def test_a15_too_many_and_too_few_rows_are_said_and_averages_are_partial(self, tmp_path, capsys):
        _write(tmp_path, "multifieldqa_en", [_row()] * 153)
        _write(tmp_path, "qasper", [_row()] * 9)
        assert main([str(tmp_path)]) == 0
        printed = capsys.readouterr().out
        assert "warning: multifieldqa_en has 153 rows, 150 expected" in printed
        assert "warning: qasper has 9 of 200 rows" in printed
        assert "warning: qasper has fewer than 10 rows: no interval" in printed
        (overall,) = (line for line in printed.splitlines() if line.startswith("all tasks"))
        assert overall.split() == ["all", "tasks", "2/21", "100.00", "(162/4750)", "-", "partial"]


class TestCheck:
    def test_a16_a_result_of_another_run_fails_and_the_tasks_are_named(self, tmp_path, capsys):
        _write(tmp_path, "qasper", [_row(), _row("Rome")])
        _write(tmp_path, "hotpotqa", [_row()])
        (tmp_path / "result.json").write_text('{"qasper": 50.25, "hotpotqa": 100.01, "trec": 3.0}')
        assert main([str(tmp_path), "--check"]) == 1
        assert capsys.readouterr().out.splitlines()[-2:] == [
            "qasper: 50.00 here, 50.25 in result.json",
            "trec: 3.0 in result.json, no predictions here",
        ]
        assert not (tmp_path / "result.meta.json").exists()

    def test_a16_predictions_changed_since_are_named_even_where_the_score_stays(self, tmp_path):
        scores = {"qasper": task_score("qasper", [])}
        result = {**official_result(scores), "qasper": 50.0}
        meta = result_meta(scores, averages(scores), {"qasper.jsonl": "aa", "lcc.jsonl": "bb"}, SETTINGS)
        path = tmp_path / "result.json"
        write_result(path, result, meta, overwrite=False)
        assert meta_path(path).exists()
        assert differences(path, result, {"qasper.jsonl": "aa", "lcc.jsonl": "bb"}, SETTINGS) == []
        assert differences(path, result, {"qasper.jsonl": "cc"}, {"edit_similarity": "levenshtein"}) == [
            "lcc.jsonl: not the file that result.meta.json records",
            "qasper.jsonl: not the file that result.meta.json records",
            "edit_similarity: levenshtein here, difflib in result.meta.json",
        ]

    def test_a_published_score_passes_with_its_own_back_end_only(self, tmp_path, capsys):
        (tmp_path / "lcc.jsonl").symlink_to(published_set("rwkv-6-7b") / "lcc.jsonl")
        (tmp_path / "result.json").write_text('{"lcc": 73.84}')
        assert main([str(tmp_path), "--check", "--edit-similarity", "levenshtein"]) == 0
        assert main([str(tmp_path), "--check"]) == 1
        assert capsys.readouterr().out.splitlines()[-1] == "lcc: 72.51 here, 73.84 in result.json"

    def test_no_result_to_check_is_a_users_mistake(self, tmp_path, capsys):
        _write(tmp_path, "qasper", [_row()])
        assert main([str(tmp_path), "--check"]) == 2
        assert "result.json cannot be read" in capsys.readouterr().err


class TestMistakes:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("not json\n", "qasper.jsonl:1 is not JSON"),
            ("\n[1]\n", "qasper.jsonl:2 holds list, not a JSON object"),
            ('{"pred": "x"}\n', "qasper.jsonl:1 lacks answers, all_classes"),
            ("\n", "qasper.jsonl holds no row"),
            (json.dumps(_row()) + "\n" + json.dumps(_row(all_classes=["A"])), "mixes rows with different all_classes"),
            (
                json.dumps(_row()) + "\n" + json.dumps({**_row(), "pred": None}),
                "qasper.jsonl:2: qasper: prediction=None",
            ),
            (json.dumps({**_row(), "answers": "Paris"}), "qasper.jsonl:1: qasper: answers='Paris'"),
        ],
    )
    def test_a_bad_file_is_named_with_its_line(self, tmp_path, capsys, content, message):
        (tmp_path / "qasper.jsonl").write_text(content, encoding="utf-8")
        assert main([str(tmp_path)]) == 2
        printed = capsys.readouterr().err
        assert message in printed
        assert printed.count("\n") == 1

    def test_a_file_that_is_not_utf_8_is_named(self, tmp_path, capsys):
        (tmp_path / "qasper.jsonl").write_bytes(b"\xff\xfe")
        assert main([str(tmp_path)]) == 2
        assert "qasper.jsonl cannot be read" in capsys.readouterr().err

    def test_unknown_files_and_empty_folders_are_refused(self, tmp_path, capsys):
        assert main([str(tmp_path)]) == 2
        assert main([str(tmp_path / "absent")]) == 2
        _write(tmp_path, "squad", [_row()])
        assert main([str(tmp_path)]) == 2
        errors = capsys.readouterr().err.splitlines()
        assert "holds no <task>.jsonl file" in errors[0]
        assert "absent is not a folder" in errors[1]
        assert "squad.jsonl is named after no task" in errors[2]

    def test_longbench_e_needs_lengths_and_its_own_tasks(self, tmp_path, capsys):
        _write(tmp_path, "qasper", [_row(length=None)])
        assert main([str(tmp_path), "--longbench-e"]) == 2
        _write(tmp_path, "vcsum", [_row()])
        assert main([str(tmp_path), "--longbench-e"]) == 2
        errors = capsys.readouterr().err.splitlines()
        assert "qasper.jsonl:1: length=None is not a whole number" in errors[0]
        assert "vcsum.jsonl: not in LongBench-E" in errors[1]


def test_no_process_of_the_command_imports_torch_or_vllm(tmp_path):
    _write(tmp_path, "vcsum", [_row("预算通过", ["预算"])])
    done = subprocess.run(
        [sys.executable, "-m", "harness.score", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
    )
    imported = [line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if "import time:" in line]
    assert imported.count("harness.benchmarks.scoring_worker") > 1
    assert not {"torch", "vllm", "transformers", "nltk"} & set(imported)
