import json

import pytest

from harness.benchmarks.longbench.sources import find_rows_file, iter_records
from harness.benchmarks.longbench.tasks import PUBLISHED
from harness.benchmarks.rows import content_hash
from harness.errors import UserError
from tests.benchmarks.longbench.rows import REAL_ROWS, jsonl, load, needs_real_rows, real_rows, record, write


@needs_real_rows
@pytest.mark.parametrize("task", PUBLISHED)
def test_every_real_row_loads_unchanged(task):
    published = [json.loads(line) for line in (REAL_ROWS / f"{task}.jsonl").open(newline="\n", encoding="utf-8")]
    rows = real_rows(task)
    for row, values in zip(rows, published, strict=True):
        assert (row.row_id, row.context, row.input) == (values["_id"], values["context"], values["input"])
        assert list(row.answers) == values["answers"]
        assert (row.length, row.language) == (values["length"], values["language"])


@needs_real_rows
def test_contradicting_answers_are_kept_as_published():
    assert any({"Yes", "Unanswerable"} <= set(row.answers) for row in real_rows("qasper"))


def test_lf_and_crlf_files_load_to_equal_rows(tmp_path):
    rows = [record(), record(_id="a2", context="line one\r\nline two")]
    lf, crlf = tmp_path / "lf", tmp_path / "crlf"
    lf.mkdir()
    crlf.mkdir()
    write(lf, jsonl(*rows))
    write(crlf, jsonl(*rows, end="\r\n"))
    (rows_lf, report_lf), (rows_crlf, report_crlf) = load(lf), load(crlf)
    assert rows_lf == rows_crlf
    assert rows_lf[1].context == "line one\r\nline two"
    assert content_hash(rows_lf) == content_hash(rows_crlf)
    assert report_lf.sha256 != report_crlf.sha256


def test_a_byte_order_mark_and_blank_lines_change_nothing(tmp_path):
    rows = [record(), record(_id="a2")]
    (tmp_path / "marked").mkdir()
    write(tmp_path, jsonl(*rows))
    write(tmp_path / "marked", b"\xef\xbb\xbf" + jsonl(rows[0]) + b"\n \r\n" + jsonl(rows[1]) + b"\n")
    assert load(tmp_path)[0] == load(tmp_path / "marked")[0]


BAD_ROWS = {
    "answers as one string": (record(answers="nine"), "field 'answers' is a string, must be a list of strings"),
    "answers of numbers": (record(answers=[9]), r"field 'answers' is a list \(other things\)"),
    "no answers": (record(answers=[]), r"field 'answers' is a list \(empty\)"),
    "missing context": (record(context=...), "field 'context' is missing"),
    "missing id": (record(_id=...), "field '_id' is missing"),
    "null context": (record(context=None), "field 'context' is null, must be a string"),
    "context of white space": (record(context=" \n"), "field 'context' is empty"),
    "question missing": (record(input=""), "field 'input' is empty, and the prompt of hotpotqa needs it"),
    "length as text": (record(length="9"), "field 'length' is a string, must be a whole number"),
    "length as boolean": (record(length=True), "field 'length' is a boolean"),
    "row of another task": (record(dataset="qasper"), "it is a row of 'qasper', not of 'hotpotqa'"),
    "classes in a QA task": (
        record(all_classes=["a"]),
        r"'all_classes' is a list \(strings\), must be null in hotpotqa",
    ),
    "not an object": ([1], r"the line holds a list \(other things\), must hold an object"),
    "half a surrogate pair": (record(context="\ud83d"), "half a surrogate pair"),
}


def bad_lines():
    lines = {name: (json.dumps(bad).encode(), problem) for name, (bad, problem) in BAD_ROWS.items()}
    good = json.dumps(record(), ensure_ascii=False).encode()
    lines["cut off line"] = (good[:40], r"not JSON \(.* at character \d+ of the line\)")
    lines["not UTF-8"] = (b'{"input": "\xff"}', "byte 11 of the line is not UTF-8")
    lines["nested too deep"] = (b"[" * 200_000, "nested too deep")
    return lines


@pytest.mark.parametrize(("line", "problem"), bad_lines().values(), ids=bad_lines())
def test_a_bad_row_stops_the_run_with_file_line_and_remedy(tmp_path, line, problem):
    file = write(tmp_path, jsonl(record(_id="good")) + line + b"\n")
    with pytest.raises(UserError, match=rf"{file}:2: .*{problem}.*benchmark.on_bad_row=skip"):
        load(tmp_path)


@pytest.mark.parametrize(("line", "problem"), bad_lines().values(), ids=bad_lines())
def test_a_skipped_bad_row_is_counted_and_listed(tmp_path, line, problem):
    file = write(tmp_path, line + b"\n" + jsonl(record(_id="good")))
    rows, report = load(tmp_path, on_bad_row="skip")
    assert [row.row_id for row in rows] == ["good"]
    assert (report.num_rows, report.num_skipped, report.is_full) == (1, 1, False)
    assert report.skipped[0].startswith(f"{file}:1: ")


def test_an_id_seen_before_is_a_bad_row(tmp_path):
    file = write(tmp_path, jsonl(record(), record(_id="a2"), record()))
    with pytest.raises(UserError, match=rf"{file}:3: _id 'a1' was seen before, at {file}:1"):
        load(tmp_path)
    rows, report = load(tmp_path, on_bad_row="skip")
    assert [row.row_id for row in rows] == ["a1", "a2"]
    assert report.num_skipped == 1


@pytest.mark.parametrize("task", ["trec", "lsht"])
def test_a_classification_row_needs_its_own_classes(tmp_path, task):
    good = record(dataset=task, all_classes=["Food", "Date"])
    write(tmp_path, jsonl(good, record(dataset=task, _id="a2")), task)
    with pytest.raises(UserError, match=f":2: field 'all_classes' is null, must be a list of strings in {task}"):
        load(tmp_path, task=task)
    write(tmp_path, jsonl(good, record(dataset=task, _id="a2", all_classes=["River"])), task)
    assert [row.all_classes for row in load(tmp_path, task=task)[0]] == [("Food", "Date"), ("River",)]


@pytest.mark.parametrize("task", ["lcc", "repobench-p", "gov_report", "vcsum", "passage_count"])
def test_an_empty_input_is_right_where_the_prompt_can_do_without(tmp_path, task):
    write(tmp_path, jsonl(record(dataset=task, input="")), task)
    assert load(tmp_path, task=task)[0][0].input == ""


def test_a_context_of_five_megabytes_loads(tmp_path):
    context = "晚安 good night 🦔 " * 220_000
    write(tmp_path, jsonl(record(context=context)))
    assert len(context.encode()) > 5_000_000
    assert load(tmp_path)[0][0].context == context


def test_a_file_without_a_good_row_is_refused(tmp_path):
    write(tmp_path, b"")
    with pytest.raises(UserError, match=r"hotpotqa.jsonl holds no good row of hotpotqa \(0 bad\)"):
        load(tmp_path)
    write(tmp_path, jsonl([], []))
    with pytest.raises(UserError, match=r"no good row of hotpotqa \(2 bad\)"):
        load(tmp_path, on_bad_row="skip")


def test_a_limit_reads_no_line_more_than_it_needs(tmp_path):
    write(tmp_path, jsonl(*(record(_id=str(number)) for number in range(5))) + b"broken\n")
    rows, report = load(tmp_path, limit=3)
    assert [row.row_id for row in rows] == ["0", "1", "2"]
    assert (report.num_rows, report.num_expected, report.is_full) == (3, 200, False)


def test_only_all_published_rows_make_a_full_task(tmp_path):
    write(tmp_path, jsonl(*(record(_id=str(number)) for number in range(200))))
    assert load(tmp_path)[1].is_full
    assert not load(tmp_path, limit=199)[1].is_full


def test_rows_are_read_lazily(tmp_path):
    write(tmp_path, jsonl(record()) * 3)
    numbers = iter_records(find_rows_file(tmp_path, "hotpotqa"))
    assert next(numbers)[0] == 1


def test_the_content_hash_changes_with_content_and_order(tmp_path):
    write(tmp_path, jsonl(record(), record(_id="a2")))
    first, second = load(tmp_path)[0]
    write(tmp_path, jsonl(record(context="other"), record(_id="a2")))
    changed = load(tmp_path)[0]
    assert len({content_hash(rows) for rows in ([first, second], [second, first], changed)}) == 3
