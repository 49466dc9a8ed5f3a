import ast
import json

import pytest

from harness.benchmarks.longbench.data import parse_row
from harness.benchmarks.longbench.tasks import PUBLISHED
from harness.benchmarks.mini.generate import generate
from harness.benchmarks.mini.text import insert_at_depth
from harness.benchmarks.rows import content_hash
from harness.benchmarks.task import CODE
from harness.errors import UserError

NUM_ROWS = 12
EVIDENCE_IN_INPUT = {"triviaqa", "samsum"}
ANSWER_IN_CONTEXT = {
    "narrativeqa",
    "qasper",
    "multifieldqa_en",
    "multifieldqa_zh",
    "hotpotqa",
    "2wikimqa",
    "musique",
    "dureader",
    "gov_report",
    "multi_news",
    "vcsum",
}


@pytest.mark.parametrize("task", PUBLISHED)
def test_rows_pass_the_checks_of_published_rows(task):
    for row in generate(task, NUM_ROWS, 0):
        published = {
            "_id": row.row_id,
            "dataset": task,
            "context": row.context,
            "input": row.input,
            "answers": list(row.answers),
            "all_classes": row.all_classes and list(row.all_classes),
            "length": row.length,
            "language": row.language,
        }
        loaded = parse_row(json.dumps(published).encode(), PUBLISHED[task], "mini:1")
        assert content_hash([loaded]) == content_hash([row])


@pytest.mark.parametrize("task", PUBLISHED)
def test_a_row_depends_on_task_seed_and_number_only(task):
    rows = generate(task, NUM_ROWS, 0)
    assert generate(task, 3, 0) == rows[:3]
    assert generate(task, 3, 1)[0].context != rows[0].context
    assert len({row.context for row in rows}) == NUM_ROWS
    assert len({row.row_id for row in (*rows, *generate(task, NUM_ROWS, 1))}) == 2 * NUM_ROWS


def test_the_rows_of_seed_0_never_change():
    rows = [row for task in PUBLISHED for row in generate(task, 3, 0)]
    assert content_hash(rows) == "b688948091bf31b85111c2baf44bafb7e2ff11967f299d44cca6e389a775b889"


@pytest.mark.parametrize("task", PUBLISHED)
def test_the_evidence_lies_at_many_depths(task):
    depths = [row.depth for row in generate(task, NUM_ROWS, 0)]
    if task in EVIDENCE_IN_INPUT:
        assert set(depths) == {1.0}
    else:
        assert all(0 <= depth < 1 for depth in depths)
        assert min(depths) < 0.4 < 0.6 < max(depths)


@pytest.mark.parametrize("task", sorted(ANSWER_IN_CONTEXT))
def test_the_answer_lies_at_the_recorded_depth(task):
    for row in generate(task, NUM_ROWS, 0):
        answer = min(row.answers, key=len).removeprefix("A ").rstrip(".。")
        after = row.context[round((row.depth - 0.002) * len(row.context)) :]
        assert answer in after[:900]


@pytest.mark.parametrize("task", ["hotpotqa", "musique"])
def test_the_answer_of_a_chain_of_passages_is_stated_in_one_passage_only(task):
    wanted = "was born in {}" if task == "hotpotqa" else "the river {} flows through it"
    for row in generate(task, NUM_ROWS, 0):
        assert row.context.count(wanted.format(row.answers[0])) == 1


@pytest.mark.parametrize("task", ["trec", "lsht"])
def test_one_example_shows_the_class_that_is_asked_for(task):
    for row in generate(task, NUM_ROWS, 0):
        label = row.input.rsplit("\n", 1)[1]
        assert row.answers[0] in row.all_classes
        assert f"{row.context}\n".count(f"{label}{' ' * (task == 'trec')}{row.answers[0]}\n") == 1


def test_the_count_of_unique_paragraphs_is_right():
    for row in generate("passage_count", NUM_ROWS, 0):
        texts = [text.split(": ", 1)[1] for text in row.context.split("\n\n")]
        assert row.answers == (str(len(set(texts))),)
        assert len(set(texts)) < len(texts)


@pytest.mark.parametrize(("task", "colon"), [("passage_retrieval_en", ": "), ("passage_retrieval_zh", "：")])
def test_the_abstract_belongs_to_the_named_paragraph(task, colon):
    for row in generate(task, NUM_ROWS, 0):
        texts = dict(text.split(colon, 1) for text in row.context.split("\n\n"))
        subject = row.input.split("life of ")[1].split(",")[0] if colon == ": " else row.input[7:10]
        first = [name for name, text in texts.items() if text.startswith(subject)]
        assert first == [row.answers[0]]


def test_english_retrieval_has_the_thirty_paragraphs_its_prompt_speaks_of():
    assert all(row.context.count("Paragraph ") == 30 for row in generate("passage_retrieval_en", NUM_ROWS, 0))


@pytest.mark.parametrize("task", [task.name for task in PUBLISHED.values() if task.category == CODE])
def test_code_with_its_answer_is_valid_python(task):
    for row in generate(task, NUM_ROWS, 0):
        code = "".join(line for line in row.context.splitlines(keepends=True) if not line.startswith("yard/"))
        ast.parse(code + row.input + row.answers[0] + "\n")


@pytest.mark.parametrize("task", PUBLISHED)
def test_rows_are_written_in_the_language_of_their_task(task):
    row = generate(task, 1, 0)[0]
    num_chinese = sum("\u4e00" <= letter <= "\u9fff" for letter in row.context)
    assert (num_chinese > len(row.context) / 2) == (PUBLISHED[task].language == "zh")
    assert (num_chinese == 0) == (PUBLISHED[task].language != "zh")


@pytest.mark.parametrize("task", PUBLISHED)
def test_texts_are_not_one_sentence_over_and_over(task):
    row = generate(task, 1, 0)[0]
    lines = [line for line in row.context.replace("。", ".\n").replace(". ", ".\n").splitlines() if len(line) > 12]
    assert len(set(lines)) > len(lines) / 2


@pytest.mark.parametrize("task", PUBLISHED)
def test_prompts_have_about_500_to_3000_tokens(task):
    chars_per_token = {"en": 4.6, "zh": 0.57, "code": 3.4}[PUBLISHED[task].language]
    for row in generate(task, NUM_ROWS, 0):
        assert 400 < len(row.context + row.input) / chars_per_token < 3000


def test_evidence_is_put_where_it_was_wanted():
    texts = ["x" * 10] * 10
    assert [insert_at_depth(texts, "E", depth).index("E") for depth in (0, 0.26, 0.5, 1)] == [0, 3, 5, 10]


def test_an_unknown_task_is_refused():
    with pytest.raises(UserError, match="Did you mean qasper"):
        generate("qaspar", 1, 0)
