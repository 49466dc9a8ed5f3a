"""The needle grid: its cells, and where a needle lies among the tokens of a prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.benchmarks.needle.generate import depths, generate
from harness.benchmarks.prompting import build_sample, encode_row
from harness.benchmarks.tokens import Encoded, cut_spans
from harness.errors import UserError
from tests.benchmarks.longbench.rows import CHATML, LLAMA3, make_tokenizer

LENGTHS = (900, 1800)


@pytest.fixture(scope="module", params=[None, CHATML, LLAMA3], ids=["plain", "chatml", "llama3"])
def tokenizer(request):
    return make_tokenizer(chat_template=request.param, adds_bos=request.param != CHATML)


def grid(tokenizer, num_depths=3, num_rows=2, haystack="prose", lengths=LENGTHS):
    return generate(lengths, num_depths, num_rows, 0, haystack, lambda row: len(encode_row(row, tokenizer).ids))


@pytest.mark.parametrize("haystack", ["repeat", "prose"])
def test_every_cell_has_its_rows_and_depths_are_where_they_say(tokenizer, haystack):
    rows = grid(tokenizer, haystack=haystack)
    assert [(row.length, row.depth) for row in rows] == [
        (length, depth) for length in LENGTHS for depth in (0.0, 0.5, 1.0) for _ in range(2)
    ]
    assert len({row.answers for row in rows}) == len(rows)
    for row in rows:
        found = row.context.index(row.needles[0]) / (len(row.context) - len(row.needles[0]))
        assert found == pytest.approx(row.depth, abs=0.2)


def test_prompts_fill_their_length_and_the_spans_are_the_needles(tokenizer):
    for row in grid(tokenizer):
        sample = build_sample(row, tokenizer, 4096, ())
        total = len(sample.prompt_token_ids) + sample.max_new_tokens
        assert row.length - 120 < total <= row.length
        assert tokenizer.decode(sample.prompt_token_ids).endswith(row.answer_prefix)
        ((start, end),), ((first, last),) = sample.needle_spans, sample.value_spans
        assert tokenizer.decode(sample.prompt_token_ids[start:end]).strip() == row.needles[0]
        assert tokenizer.decode(sample.prompt_token_ids[first:last]).strip() == row.answers[0]


def test_a_cut_moves_spans_or_takes_them(tokenizer):
    first, *_, last = grid(tokenizer, num_depths=5, num_rows=1, lengths=[1200])
    middle = grid(tokenizer, num_depths=1, num_rows=1, lengths=[1200])[0]
    for row in (first, last):
        sample = build_sample(row, tokenizer, 800, ())
        assert sample.truncated
        ((start, end),) = sample.needle_spans
        assert tokenizer.decode(sample.prompt_token_ids[start:end]).strip() == row.needles[0]
    assert build_sample(middle, tokenizer, 800, ()).needle_spans == ()


def test_depths_are_evenly_spread():
    assert depths(1) == [0.5]
    assert depths(5) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_too_short_a_length_is_refused(tokenizer):
    with pytest.raises(UserError, match=r"needle needs \d+ prompt tokens at least"):
        grid(tokenizer, lengths=[40])


@given(
    st.integers(0, 5), st.integers(2, 60), st.integers(0, 5), st.integers(1, 28),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 6)), max_size=3),
)  # fmt: skip
def test_spans_after_a_cut_hold_the_same_tokens(before, length, after, half, marked):
    ids = list(range(before + length + after))
    spans = [(before + start, min(before + start + size, before + length)) for start, size in marked if start < length]
    removed = max(0, length - 2 * half)
    kept = ids[: before + length - removed - half] + ids[before + length - half :] if removed else ids
    moved = cut_spans(Encoded(ids, before, before + length, "", tuple(spans)), removed)
    assert moved == () or [kept[start:end] for start, end in moved] == [ids[start:end] for start, end in spans]
    if all(set(ids[start:end]) <= set(kept) for start, end in spans):
        assert len(moved) == len(spans)
