import hashlib
import itertools
from types import SimpleNamespace

import pytest

from harness.benchmarks.longbench.tasks import PUBLISHED
from harness.benchmarks.mini.generate import generate
from harness.benchmarks.prompting import build_sample, iter_samples, middle_cut, render, stop_token_ids
from harness.errors import UserError
from tests.benchmarks.longbench.rows import CHATML, LLAMA3, make_row, make_tokenizer, needs_real_rows, real_rows

BOS = 0
EOS = (1,)
ODD_TEXTS = {
    "chinese": "渡船什么时候出发？九点。",
    "emoji": "🦔👩‍👩‍👧‍👦🏳️‍🌈 at nine",
    "combining": "e\u0301 o\u0308\u0323 क्षि",
    "right to left": "متى تغادر العبارة؟ \u202eabc",
    "separators": "a\u2028b\u2029c\x0bd\r\ne\ttab\u00a0f\u3000g\ufeff",
    "control": "null \x00 bell \x07",
    "braces": "{context} {{input}} {0}",
    "mathematics": "𝔘𝔫𝔦 ∑∞ ﬁ",
}


def long_row(task="hotpotqa", text="The ferry leaves at nine. ", repeat=400):
    return make_row(task, context=text * repeat)


def published_cut(prompt, tokenizer, max_length):
    """The cut of pred.py, which goes through text: the ids a model would have been given."""
    ids = tokenizer(prompt).input_ids
    if len(ids) > max_length:
        half = int(max_length / 2)
        head = tokenizer.decode(ids[:half], skip_special_tokens=True)
        prompt = head + tokenizer.decode(ids[-half:], skip_special_tokens=True)
    return tokenizer(prompt).input_ids


@pytest.mark.parametrize("task", PUBLISHED)
def test_the_chat_template_surrounds_every_task_but_few_shot_and_code(task):
    tokenizer = make_tokenizer(CHATML)
    sample = build_sample(make_row(task), tokenizer, 4096, EOS)
    text = tokenizer.decode(sample.prompt_token_ids)
    plain = render(make_row(task))
    assert sample.chat_template == PUBLISHED[task].chat_template
    if sample.chat_template:
        assert text == f"<|im_start|>user\n{plain}<|im_end|>\n<|im_start|>assistant\n"
    else:
        assert text == plain


@pytest.mark.parametrize("task", PUBLISHED)
def test_a_base_model_never_gets_a_chat_template(task):
    without = build_sample(make_row(task), make_tokenizer(), 4096, EOS)
    switched_off = build_sample(make_row(task), make_tokenizer(CHATML), 4096, EOS, template=None)
    assert without == switched_off
    assert not without.chat_template
    assert make_tokenizer().decode(without.prompt_token_ids) == render(make_row(task))


@pytest.mark.parametrize("task", ["hotpotqa", "trec"])
@pytest.mark.parametrize("template", [None, CHATML, LLAMA3], ids=["no template", "no BOS", "BOS as text"])
@pytest.mark.parametrize("max_model_len", [4096, 400], ids=["whole", "cut"])
def test_a_tokenizer_with_bos_gives_exactly_one_at_the_start(task, template, max_model_len):
    sample = build_sample(long_row(task, repeat=60), make_tokenizer(template, adds_bos=True), max_model_len, EOS)
    assert sample.truncated == (max_model_len == 400)
    assert sample.prompt_token_ids.count(BOS) == 1
    assert sample.prompt_token_ids[0] == BOS


@pytest.mark.parametrize("task", ["hotpotqa", "trec"])
def test_a_tokenizer_without_bos_gives_none(task):
    sample = build_sample(make_row(task), make_tokenizer(CHATML), 4096, EOS)
    assert BOS not in sample.prompt_token_ids


@pytest.mark.parametrize("template", [CHATML, LLAMA3])
def test_an_uncut_chat_prompt_has_the_ids_of_a_chat_server(template):
    tokenizer = make_tokenizer(template)
    row = make_row("passage_count")
    messages = [{"role": "user", "content": render(row)}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert build_sample(row, tokenizer, 4096, EOS).prompt_token_ids == expected


def test_a_template_that_asks_for_the_date_gets_the_same_one_every_day():
    dated = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    tokenizer = make_tokenizer(dated + "{{ date_string }}: {{ messages[0]['content'] }}")
    sample = build_sample(make_row("qasper"), tokenizer, 4096, EOS)
    assert tokenizer.decode(sample.prompt_token_ids).startswith(tokenizer.decode(tokenizer.encode("26 Jul 2024: ")))


def test_template_and_prompt_tokenised_apart_give_the_same_ids():
    tokenizer = make_tokenizer(CHATML)
    row = make_row("multifieldqa_zh", context=ODD_TEXTS["chinese"])
    pieces = ("<|im_start|>user\n", render(row), "<|im_end|>\n<|im_start|>assistant\n")
    apart = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    assert build_sample(row, tokenizer, 4096, EOS).prompt_token_ids == apart


@pytest.mark.parametrize("template", [None, CHATML, LLAMA3], ids=["no template", "no BOS", "BOS as text"])
@pytest.mark.parametrize("task", PUBLISHED)
def test_a_cut_keeps_the_template_and_equal_halves_of_the_prompt(task, template):
    tokenizer = make_tokenizer(template)
    row = long_row(task)
    whole = build_sample(row, tokenizer, 100_000, EOS)
    cut = build_sample(row, tokenizer, 1200, EOS)
    inside = tokenizer.encode(render(row).strip() if cut.chat_template else render(row), add_special_tokens=False)
    num_template_tokens = len(whole.prompt_token_ids) - len(inside)
    half = (1200 - cut.max_new_tokens - num_template_tokens) // 2
    assert cut.truncated
    assert not whole.truncated
    start = _find(whole.prompt_token_ids, inside)
    after = whole.prompt_token_ids[start + len(inside) :]
    assert cut.prompt_token_ids == whole.prompt_token_ids[:start] + inside[:half] + inside[-half:] + after
    assert cut.num_prompt_tokens_before_cut == len(whole.prompt_token_ids)


def _find(ids, part):
    return next(start for start in range(len(ids)) if ids[start : start + len(part)] == part)


@pytest.mark.parametrize("task", ["hotpotqa", "gov_report", "lcc"])
@pytest.mark.parametrize("difference", [-2, -1, 0, 1])
def test_prompt_and_answer_always_fit_into_the_model(task, difference):
    tokenizer = make_tokenizer(CHATML)
    row = long_row(task, repeat=40)
    num_tokens = build_sample(row, tokenizer, 100_000, EOS).num_prompt_tokens_before_cut
    max_model_len = num_tokens + PUBLISHED[task].max_new_tokens + difference
    sample = build_sample(row, tokenizer, max_model_len, EOS)
    assert sample.truncated == (difference < 0)
    assert 0 <= max_model_len - len(sample.prompt_token_ids) - sample.max_new_tokens <= max(1, difference)


def test_a_model_too_short_for_any_prompt_is_refused_with_the_length_it_needs():
    tokenizer = make_tokenizer(CHATML)
    with pytest.raises(UserError, match=r"model\.max_model_len=512 leaves no room .*512 tokens are for the answer"):
        build_sample(long_row("gov_report"), tokenizer, 512, EOS)
    with pytest.raises(UserError) as refusal:
        build_sample(long_row("gov_report"), tokenizer, 10, EOS)
    needed = int(str(refusal.value).split("at least ")[1].rstrip("."))
    assert build_sample(long_row("gov_report"), tokenizer, needed, EOS).truncated
    with pytest.raises(UserError):
        build_sample(long_row("gov_report"), tokenizer, needed - 1, EOS)


@pytest.mark.parametrize("template", [None, CHATML])
def test_an_odd_limit_loses_one_token_and_never_exceeds(template):
    tokenizer = make_tokenizer(template)
    row = long_row(repeat=800)
    template_tokens = (
        build_sample(row, tokenizer, 100_000, EOS).num_prompt_tokens_before_cut
        - build_sample(row, make_tokenizer(), 100_000, EOS).num_prompt_tokens_before_cut
    )
    sample = build_sample(row, tokenizer, 3499 + template_tokens + 32, EOS)
    assert len(sample.prompt_token_ids) == 3498 + template_tokens


@pytest.mark.parametrize("limit", [2, 3, 10, 11, 99, 100, 101])
def test_the_middle_cut_keeps_the_first_and_last_half(limit):
    ids = list(range(100))
    half = int(limit / 2)
    assert middle_cut(ids, limit) == (ids if limit >= 100 else ids[:half] + ids[100 - half :])


@needs_real_rows
@pytest.mark.parametrize("task", ["narrativeqa", "trec", "lcc"])
def test_the_cut_of_a_real_english_row_reads_like_the_published_one(task):
    tokenizer = make_tokenizer(adds_bos=True)
    row = real_rows(task, limit=1)[0]
    max_length = 3500
    sample = build_sample(row, tokenizer, max_length + PUBLISHED[task].max_new_tokens, EOS)
    published = published_cut(render(row), tokenizer, max_length)
    assert sample.truncated
    assert tokenizer.decode(sample.prompt_token_ids) == tokenizer.decode(published)


def test_where_the_published_cut_breaks_a_character_ours_keeps_the_limit():
    tokenizer = make_tokenizer()
    row = make_row("dureader", context="🦔晚安" * 300)
    limits = range(301, 321)
    ours = [build_sample(row, tokenizer, limit + 128, EOS).prompt_token_ids for limit in limits]
    published = [published_cut(render(row), tokenizer, limit) for limit in limits]
    assert all(len(ids) == limit // 2 * 2 for ids, limit in zip(ours, limits, strict=True))
    assert any(len(ids) > limit for ids, limit in zip(published, limits, strict=True))


@pytest.mark.parametrize("text", ODD_TEXTS.values(), ids=ODD_TEXTS)
@pytest.mark.parametrize("template", [None, CHATML, LLAMA3], ids=["no template", "no BOS", "BOS as text"])
def test_any_text_survives_and_any_cut_of_it_fits(text, template):
    tokenizer = make_tokenizer(template)
    row = make_row(context=text * 30)
    whole = build_sample(row, tokenizer, 100_000, EOS)
    assert render(row) in tokenizer.decode(whole.prompt_token_ids)
    num_tokens = len(whole.prompt_token_ids)
    for max_model_len in range(num_tokens - 60, num_tokens + 32, 7):
        sample = build_sample(row, tokenizer, max_model_len, EOS)
        assert sample.truncated
        assert max_model_len - 32 - 1 <= len(sample.prompt_token_ids) <= max_model_len - 32


def test_a_template_that_changes_the_text_is_refused():
    tokenizer = make_tokenizer("{{ messages[0]['content'] | upper }}")
    with pytest.raises(UserError, match="changes the user's text, so its prompts cannot be cut"):
        build_sample(make_row(), tokenizer, 4096, EOS)


def test_stop_tokens_are_the_union_of_all_three_places():
    tokenizer = SimpleNamespace(eos_token_id=128009)
    assert stop_token_ids(tokenizer, SimpleNamespace(eos_token_id=128001), None) == (128001, 128009)
    both = SimpleNamespace(eos_token_id=[128001, 128008, 128009])
    assert stop_token_ids(tokenizer, SimpleNamespace(eos_token_id=None), both) == (128001, 128008, 128009)
    assert stop_token_ids(SimpleNamespace(eos_token_id=None), SimpleNamespace(), None) == ()


@pytest.mark.parametrize("task", PUBLISHED)
def test_only_samsum_stops_at_a_newline_and_only_after_one_token(task):
    tokenizer = make_tokenizer(CHATML)
    sample = build_sample(make_row(task), tokenizer, 4096, EOS)
    newline = tokenizer.encode("\n", add_special_tokens=False)[-1]
    expected = ((*EOS, newline), 1) if task == "samsum" else (EOS, 0)
    assert (sample.stop_token_ids, sample.min_new_tokens) == expected
    assert sample.max_new_tokens == PUBLISHED[task].max_new_tokens


def test_a_sample_is_named_and_hashed_by_task_row_and_prompt():
    row = make_row("qasper", row_id="x7")
    sample = build_sample(row, make_tokenizer(CHATML), 4096, EOS)
    assert (sample.sample_id, sample.task, sample.row) == ("qasper/x7", "qasper", row)
    asked = f"<|im_start|>user\n{render(row)}<|im_end|>\n<|im_start|>assistant\n"
    assert sample.prompt_sha256 == hashlib.sha256(asked.encode()).hexdigest()
    assert sample.task_prompt_sha256 == hashlib.sha256(render(row).encode()).hexdigest()


def test_samples_are_made_one_by_one():
    endless = (make_row(row_id=str(number)) for number in itertools.count())
    samples = iter_samples(endless, make_tokenizer(CHATML), 4096, EOS)
    assert [sample.sample_id for sample in itertools.islice(samples, 3)] == ["hotpotqa/0", "hotpotqa/1", "hotpotqa/2"]


def test_rows_outside_the_token_limits_are_left_out():
    tokenizer = make_tokenizer(CHATML)
    rows = generate("qasper", 12, 0)
    sizes = {row.row_id: build_sample(row, tokenizer, 100_000, EOS).num_prompt_tokens_before_cut for row in rows}
    low, high = sorted(sizes.values())[3], sorted(sizes.values())[8]
    kept = iter_samples(rows, tokenizer, 2048, EOS, min_prompt_tokens=low, max_prompt_tokens=high)
    assert [sample.row.row_id for sample in kept] == [name for name, size in sizes.items() if low <= size <= high]
    with pytest.raises(UserError, match=r"no row is left: benchmark\.min_prompt_tokens=1000000"):
        list(iter_samples(rows, tokenizer, 2048, EOS, min_prompt_tokens=1_000_000))


def test_no_rows_make_no_samples():
    assert list(iter_samples([], make_tokenizer(CHATML), 2048, EOS, min_prompt_tokens=1)) == []
