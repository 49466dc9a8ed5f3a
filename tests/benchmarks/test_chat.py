"""Which chat template is around a prompt, what it is given, and what the record says of it."""

import hashlib
import json

import pytest
from tokenizers import processors

from harness.benchmarks.chat import ChatTemplate, choose_template, is_cut_in_reasoning
from harness.benchmarks.prompting import build_sample, prompt_sha256, render
from harness.errors import UserError
from harness.run.answering import Prompting
from harness.tokenizer import load_tokenizer
from tests.benchmarks.longbench.rows import CHATML, make_row, make_tokenizer

EOS = (1,)
TODAY = "Today is {{ strftime_now('%d %b %Y') }}. {{ messages[0]['content'] }}"
HYBRID = CHATML + (
    "{% if enable_thinking is not defined or enable_thinking %}{{ '<think>\n' }}"
    "{% else %}{{ '<think>\n\n</think>\n' }}{% endif %}"
)

fresh_tokenizer = make_tokenizer.__wrapped__  # not one that other tests have


def text_of(sample, tokenizer):
    return tokenizer.decode(sample.prompt_token_ids)


def test_a_template_that_asks_the_clock_gets_the_same_day_every_day():
    tokenizer, row = make_tokenizer(TODAY), make_row("qasper")
    sample = build_sample(row, tokenizer, 4096, EOS)
    assert text_of(sample, tokenizer) == f"Today is 26 Jul 2024. {render(row)}"
    assert sample.prompt_sha256 == hashlib.sha256(f"Today is 26 Jul 2024. {render(row)}".encode()).hexdigest()


@pytest.mark.parametrize("task", ["qasper", "trec"])
@pytest.mark.parametrize("template", [None, CHATML, HYBRID])
def test_the_digest_of_a_prompt_needs_no_tokens(task, template):
    tokenizer, row = make_tokenizer(template), make_row(task)
    assert build_sample(row, tokenizer, 4096, EOS).prompt_sha256 == prompt_sha256(row, tokenizer)


@pytest.mark.parametrize(
    ("arguments", "end", "opens"), [({}, "<think>\n", True), ({"enable_thinking": False}, "</think>\n", False)]
)
def test_reasoning_is_switched_off_by_an_argument_of_the_template(arguments, end, opens):
    tokenizer = make_tokenizer(HYBRID)
    template = choose_template(tokenizer, None, arguments)
    sample = build_sample(make_row("qasper"), tokenizer, 4096, EOS, template)
    assert text_of(sample, tokenizer).endswith(end)
    assert sample.opens_reasoning == opens
    assert sample.prompt_sha256 != sample.task_prompt_sha256


def several(*names):
    return fresh_tokenizer({name: f"{name}: {{{{ messages[0]['content'] }}}}" for name in names})


def test_one_of_several_templates_is_chosen_by_name_or_by_default():
    tokenizer = several("default", "rag")
    assert choose_template(tokenizer, None, {}).name == "default"
    sample = build_sample(make_row("qasper"), tokenizer, 4096, EOS, choose_template(tokenizer, "rag", {}))
    assert text_of(sample, tokenizer).startswith("rag: ")


def test_several_templates_without_a_default_are_refused_by_name():
    with pytest.raises(UserError, match=r"chat templates rag, tool_use and no default\. Choose one with model\.chat_t"):
        choose_template(several("tool_use", "rag"), None, {})


def test_a_file_may_hold_the_template(tmp_path):
    (tmp_path / "mine.jinja").write_text("User: {{ messages[0]['content'] }}\nModel:")
    tokenizer = make_tokenizer()
    template = choose_template(tokenizer, str(tmp_path / "mine.jinja"), {})
    sample = build_sample(make_row("qasper"), tokenizer, 4096, EOS, template)
    assert text_of(sample, tokenizer).startswith("User: ")
    assert sample.chat_template


def test_none_is_no_template_and_an_unknown_name_is_refused():
    tokenizer = make_tokenizer(CHATML)
    assert choose_template(tokenizer, "none", {}) is None
    with pytest.raises(UserError, match=r"model\.chat_template=rag is neither a file nor a template of the tokenizer"):
        choose_template(tokenizer, "rag", {})
    with pytest.raises(UserError, match="has no effect without a chat template"):
        choose_template(make_tokenizer(), None, {"enable_thinking": False})


def test_the_record_says_which_template_and_for_which_tasks_none():
    tokenizer = make_tokenizer(CHATML)
    template = choose_template(tokenizer, None, {"enable_thinking": False})
    assert Prompting(tokenizer, EOS, 4096, template).record(["qasper", "trec"]) == {
        "chat_template": {
            "name": "default",
            "sha256": hashlib.sha256(CHATML.encode()).hexdigest(),
            "arguments": {"enable_thinking": False},
        },
        "tasks_without": ["trec"],
    }
    bare = Prompting(make_tokenizer(), EOS, 4096, None).record(["qasper"])
    assert bare == {"chat_template": None, "tasks_without": ["qasper"]}


@pytest.mark.parametrize("template", [None, CHATML])
@pytest.mark.parametrize("single", ["$A <|eos|>", "<|bos|> $A <|eos|>"])
def test_an_eos_that_the_tokenizer_appends_is_in_no_prompt(template, single):
    tokenizer = fresh_tokenizer(template)
    ids = build_sample(make_row("qasper"), tokenizer, 4096, EOS).prompt_token_ids
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)]
    )
    expected = [0, *ids] if "bos" in single else ids
    assert build_sample(make_row("qasper"), tokenizer, 4096, EOS).prompt_token_ids == expected


def test_a_tokenizer_of_another_format_is_refused_by_name(tmp_path):
    from importlib.resources import files

    pytest.importorskip("mistral_common", reason="it brings a tekken.json")
    tekken = files("mistral_common").joinpath("data", "tekken_240911.json").read_bytes()
    (tmp_path / "tekken.json").write_bytes(tekken)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    with pytest.raises(UserError, match=r"is of another format \(tekken\.json\)"):
        load_tokenizer(str(tmp_path), None)


@pytest.mark.parametrize(
    ("answer", "was_opened", "is_cut"),
    [
        ("<think>Let me see", False, True),
        ("<think>x</think>Paris", False, False),
        ("Let me see", True, True),
        ("so</think>Paris", True, False),
        ("Paris", False, False),
        ("<think>x</think>Paris<think>again", False, True),
        ("", True, True),
    ],
)
def test_an_answer_cut_inside_its_reasoning_is_known(answer, was_opened, is_cut):
    assert is_cut_in_reasoning(answer, was_opened) == is_cut


def test_a_template_that_changes_the_text_names_the_way_out():
    with pytest.raises(UserError, match=r"model\.chat_template=none"):
        build_sample(make_row(), make_tokenizer("{{ messages[0]['content'] | upper }}"), 4096, EOS, ChatTemplate())
