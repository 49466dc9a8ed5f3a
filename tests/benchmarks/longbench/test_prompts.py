import hashlib
import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.benchmarks.longbench import prompts
from harness.benchmarks.longbench.tasks import PUBLISHED
from harness.benchmarks.prompting import prompt_template, render
from harness.errors import UserError
from tests.benchmarks.longbench.rows import make_row, needs_real_rows, real_rows


@pytest.fixture(autouse=True)
def _fresh_templates():
    prompts.official_template.cache_clear()
    yield
    prompts.official_template.cache_clear()


@pytest.mark.parametrize("task", PUBLISHED.values(), ids=PUBLISHED)
def test_every_template_is_the_official_one_to_the_byte(task):
    assert hashlib.sha256(prompt_template(task.name).encode()).hexdigest()[:16] == task.prompt_sha256


@needs_real_rows
@pytest.mark.parametrize("task", PUBLISHED)
def test_a_rendered_row_equals_the_official_format_call(task):
    row = real_rows(task, limit=1)[0]
    published = {"context": row.context, "input": row.input, "length": row.length, "answers": row.answers}
    assert render(row) == prompt_template(task).format(**published)
    assert row.context in render(row)


@pytest.mark.parametrize("task", PUBLISHED)
def test_no_prompt_holds_a_backslash_n_in_letters_or_a_field_left_open(task):
    prompt = render(make_row(task))
    assert "\\n" not in prompt
    assert "\n" in prompt
    assert "{" not in prompt


@pytest.mark.parametrize("task", PUBLISHED)
def test_the_input_is_in_the_prompt_of_every_task_that_needs_it(task):
    assert PUBLISHED[task].needs_input <= ("When does the ferry leave?" in render(make_row(task)))


def test_the_published_typo_of_narrativeqa_stays():
    assert prompt_template("narrativeqa").count("asconcisely") == 2


@pytest.mark.parametrize("task", ["passage_count", "passage_retrieval_en"])
def test_english_passage_prompts_end_with_a_space(task):
    assert render(make_row(task)).endswith("answer is: ")


@pytest.mark.parametrize("task", ["lcc", "repobench-p"])
def test_code_prompts_end_with_a_newline(task):
    assert render(make_row(task)).endswith("Next line of code:\n")


@pytest.mark.parametrize(
    "text", ["{context}", "{input}", "{0}", "{{}}", "} {", "\\n {x!r:>{y}}", "%s $x 🦔 “‘\u2028\r\n"]
)
def test_braces_and_signs_in_a_row_are_left_alone(text):
    prompt = render(make_row("repobench-p", context=text, input=text + "!"))
    assert prompt.count(text) == 2
    assert prompt.endswith(f"{text}{text}!Next line of code:\n")


def test_a_changed_package_is_noticed_and_named(monkeypatch, tmp_path):
    original = Path(importlib.util.find_spec("lm_eval").submodule_search_locations[0])
    folder = tmp_path / "tasks" / "longbench"
    shutil.copytree(original / "tasks" / "longbench", folder)
    file = folder / "qasper.yaml"
    file.write_text(file.read_text().replace("as concisely as", "as briefly as"))
    monkeypatch.setattr(
        prompts.importlib.util, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    )
    with pytest.raises(UserError, match=r"prompt of qasper in lm-eval 0\.4\.13 .*pip install lm-eval==0\.4\.13"):
        prompt_template("qasper")
    (folder / "trec.yaml").unlink()
    with pytest.raises(UserError, match=r"no prompt in .*trec.yaml of lm-eval 0\.4\.13"):
        prompt_template("trec")


def test_a_missing_package_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(prompts.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"lm-eval is not installed.*Run: pip install lm-eval==0\.4\.13"):
        prompt_template("qasper")
