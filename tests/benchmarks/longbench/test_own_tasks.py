"""Tasks beside LongBench's: rows of the table, and those that another package registers."""

import json
from dataclasses import replace

import pytest

from harness.benchmarks import loading, tasks
from harness.benchmarks.loading import load_benchmark
from harness.benchmarks.longbench import metrics, prompts
from harness.benchmarks.longbench.aggregates import OVERALL, averages, overall_average
from harness.benchmarks.longbench.tasks import PUBLISHED
from harness.benchmarks.prompting import build_sample, render
from harness.benchmarks.rows import content_hash
from harness.benchmarks.sample_score import SampleScore, score_sample
from harness.benchmarks.scoring import task_score
from harness.benchmarks.task import CODE, OWN, Task
from harness.benchmarks.tasks import TASKS, get_task
from harness.errors import UserError
from harness.score import main as score
from tests.benchmarks.longbench.own_task import register, row
from tests.benchmarks.longbench.rows import jsonl, make_row, make_tokenizer, record, write

OWN_TASK = Task(name="own", num_rows=3, max_new_tokens=8, metric="qa_f1", prompt="{context} {input}")


@pytest.fixture(autouse=True)
def _fresh_templates():
    prompts.official_template.cache_clear()
    yield
    prompts.official_template.cache_clear()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The task of the README, installed, and a folder with its rows and one of qasper."""
    package, rows = tmp_path / "package", tmp_path / "rows"
    package.mkdir()
    rows.mkdir()
    register(package, monkeypatch)
    write(rows, jsonl(row(), row(_id="2")), "riddles")
    write(rows, jsonl(record(dataset="qasper")), "qasper")
    return rows


@pytest.fixture
def in_table(monkeypatch):
    """Put a task into the table of this process."""
    return lambda task: monkeypatch.setitem(tasks._ROWS, task.name, task)


def load(path, *names, **changes):
    settings = {"source": "hub", "revision": None, "limit": None, "on_bad_row": "fail", "longbench_e": False, "seed": 0}
    return load_benchmark(**settings | {"path": path, "tasks": list(names) or None} | changes)


def one_score(task):
    return task_score(task, [SampleScore(0.5, empty=False)])


def test_it_comes_after_longbench_and_is_none_of_it(folder):
    names = list(TASKS)
    assert (names[: len(PUBLISHED)], names[-1], len(names)) == (list(PUBLISHED), "riddles", len(TASKS))
    assert get_task("riddles").category == OWN
    assert tuple(load(None, source="mini", limit=1).reports) == tuple(PUBLISHED)
    with pytest.raises(UserError, match=r"task 'ridles' is unknown\. Did you mean riddles"):
        get_task("ridles")


def test_its_rows_stand_beside_those_of_longbench(folder):
    loaded = load(folder, "riddles", "qasper")
    assert [row.task for row in loaded.rows] == ["qasper", "riddles", "riddles"]
    assert [report.num_expected for report in loaded.reports.values()] == [200, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "mini", "limit": 1}, r"riddles has no generated rows.*benchmark=longbench benchmark\.path=DIR"),
        (
            {},
            r"riddles is not in LongBench's archive on the hub\. Set benchmark\.path to the folder that holds riddles",
        ),
        ({"longbench_e": True, "path": "."}, "riddles is not in LongBench-E"),
    ],
    ids=["generated", "hub", "LongBench-E"],
)
def test_where_it_has_no_rows_it_is_refused_and_nothing_is_fetched(folder, monkeypatch, settings, message):
    monkeypatch.setattr(loading, "download_archive", lambda revision: pytest.fail("network"))
    with pytest.raises(UserError, match=message):
        load(**{"path": None} | settings, tasks=["riddles"])


def test_the_data_is_other_data_once_a_prompt_is_edited(folder, in_table):
    write(folder, jsonl(record(dataset="own")), "own")
    loaded = []
    for prompt in ("{context} {input}", "{context}\n{input}"):
        in_table(replace(OWN_TASK, prompt=prompt))
        loaded.append((load(folder, "own"), load(folder, "qasper")))
    (before, qasper), (after, same_qasper) = loaded
    assert before.rows == after.rows
    assert before.content_hash != after.content_hash
    assert qasper.content_hash == same_qasper.content_hash == content_hash(qasper.rows)


def test_its_prompt_is_its_own_and_needs_no_package(folder, monkeypatch):
    monkeypatch.setattr(prompts.importlib.util, "find_spec", lambda name: pytest.fail("looked for lm-eval"))
    text = "{input} {{x}}"
    made = make_row("riddles", context=text, input="Who?")
    assert render(made) == f"Solve the riddle with one word of the text.\n\nText: {text}\n\nRiddle: Who?\n\nWord:"


def test_braces_of_the_prompt_are_written_twice(in_table):
    in_table(replace(OWN_TASK, prompt='{{"text": "{context}", "question": "{input}"}}'))
    assert render(make_row("own", context="C", input="I")) == '{"text": "C", "question": "I"}'


@pytest.mark.parametrize("stops", [True, False])
def test_the_row_says_whether_an_answer_ends_at_a_newline(in_table, stops):
    in_table(replace(OWN_TASK, stop_at_newline=stops))
    tokenizer = make_tokenizer()
    sample = build_sample(make_row("own"), tokenizer, 4096, (1,))
    newline = tokenizer.encode("\n", add_special_tokens=False)[-1]
    assert (sample.stop_token_ids, sample.min_new_tokens) == (((1, newline), 1) if stops else ((1,), 0))


def test_a_new_metric_is_one_function_and_one_row(in_table, monkeypatch):
    in_table(replace(OWN_TASK, metric="same"))
    with pytest.raises(UserError, match=r"metric 'same' of task own is unknown\. Use one of qa_f1, .*code_sim"):
        load(".", "own")
    with pytest.raises(UserError, match="metric 'same' of task own is unknown"):
        score_sample("own", "a", ["a"], None)
    monkeypatch.setitem(metrics.METRICS, "same", lambda prediction, answer: float(prediction == answer))
    assert [score_sample("own", text, ["a", "b"], None).score for text in ("b", "c")] == [1.0, 0.0]


def test_averages_of_longbench_leave_it_out(folder):
    scores = {task: one_score(task) for task in ("qasper", "riddles")}
    overall = next(line for line in averages(scores) if line.name == OVERALL)
    assert (overall.num_tasks, overall.expected_tasks, overall.n, overall.expected) == (1, 21, 1, 4750)
    mixed = overall_average(scores, {"qasper": 200, "riddles": 1})
    assert (mixed.name, mixed.num_tasks, mixed.expected) == (OVERALL, 1, 200)
    alone = overall_average(scores, {"riddles": 1})
    assert (alone.name, alone.score, alone.n, alone.expected, alone.partial) == (OWN, 50.0, 1, 1, False)


def test_predictions_made_elsewhere_are_scored(folder, tmp_path, capsys):
    line = {"pred": "The river.", "answers": ["river"], "all_classes": None, "length": 19}
    (tmp_path / "predictions").mkdir()
    (tmp_path / "predictions" / "riddles.jsonl").write_text(json.dumps(line))
    assert score([str(tmp_path / "predictions")]) == 0
    assert json.loads((tmp_path / "predictions" / "result.json").read_text()) == {"riddles": 100.0}
    printed = capsys.readouterr().out
    assert "100.00 (1/1)" in printed
    assert "- (0/4750)" in printed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": None}, "task own must have a prompt or, if it is LongBench's, prompt_sha256"),
        ({"prompt_sha256": "0" * 16}, "task own must have a prompt or, if it is LongBench's, prompt_sha256"),
        ({"name": "a/b"}, "task 'a/b' cannot be called so.*Rename it"),
        ({"name": "code"}, "task 'code' cannot be called so.*Rename it"),
        ({"category": CODE}, "category and num_rows_e are LongBench's. Remove them"),
        ({"num_rows_e": 3}, "category and num_rows_e are LongBench's. Remove them"),
        ({"prompt": "{context}"}, r"has the fields \{context\}\. It needs \{context\}, \{input\}.*needs_input=False"),
        ({"prompt": "{input}", "needs_input": False}, r"has the fields \{input\}\. It needs \{context\}"),
        ({"prompt": "{context} {input} {answer}"}, r"has the fields \{answer\}, \{context\}, \{input\}"),
        ({"prompt": "{context} {input} {}"}, r"has the fields \{\}, .*Write \{\{ and \}\}"),
        ({"prompt": "{context} {input} }"}, r"the prompt of task own: Single '}'.*Write \{\{ and \}\}"),
    ],
    ids=str,
)
def test_a_task_that_cannot_work_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        replace(OWN_TASK, **changes)


def test_a_prompt_without_input_takes_rows_without_input(tmp_path, in_table):
    in_table(replace(OWN_TASK, prompt="{context}", needs_input=False))
    write(tmp_path, jsonl(record(dataset="own", input="")), "own")
    assert [render(one) for one in load(tmp_path, "own").rows] == [record()["context"]]


SOURCE = "from harness.benchmarks.longbench.tasks import PUBLISHED, Task\nQASPER = PUBLISHED['qasper']\nLIST = []\n"


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ("odd = absent:ODD", "task odd cannot be had from entry point absent:ODD: No module named 'absent'"),
        ("odd = odd_tasks:ODD", "task odd cannot be had from entry point odd_tasks:ODD: .*no attribute 'ODD'"),
        ("odd = odd_tasks:LIST", r"entry point odd_tasks:LIST is \[\], must be a Task called odd with a prompt"),
        ("odd = odd_tasks:QASPER", "odd_tasks:QASPER is Task.*must be a Task called odd with a prompt"),
    ],
)
def test_a_broken_registration_is_named_once_its_task_is_asked_for(tmp_path, monkeypatch, point, message):
    register(tmp_path, monkeypatch, source=SOURCE, point=point, name="odd_tasks")
    assert get_task("qasper") is PUBLISHED["qasper"]
    assert list(TASKS)[-1] == "odd"
    with pytest.raises(UserError, match=message):
        get_task("odd")


def test_a_name_is_taken_once(tmp_path, monkeypatch):
    register(tmp_path, monkeypatch, source=SOURCE, point="qasper = odd_tasks:QASPER", name="odd_tasks")
    with pytest.raises(UserError, match=r"odd_tasks:QASPER registers task qasper, which exists already\. Rename it"):
        list(TASKS)
