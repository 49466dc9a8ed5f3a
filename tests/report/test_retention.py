"""Positions survive storage exactly; maps show the share that was kept."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UserError
from harness.report.reading.retention import mean_shares, to_map
from harness.retention import (
    FILE_NAME,
    RetentionRecord,
    append_retention,
    decode_layer,
    encode_layer,
    read_retention,
)

POSITIONS = st.sets(st.integers(0, 200_000), max_size=50).map(sorted)


def record(sample_id: str = "qasper/1", phase: str = "end", layers=(((0, 1, 5),),), num_prompt_tokens: int = 8):
    return RetentionRecord(sample_id, num_prompt_tokens, phase, [[list(one) for one in layer] for layer in layers])


@given(layer=st.lists(POSITIONS, max_size=4))
def test_a_layer_decodes_to_what_was_encoded(layer):
    assert decode_layer(encode_layer(layer)) == layer


@given(layers=st.lists(st.lists(POSITIONS, min_size=1, max_size=3), min_size=1, max_size=4), split=st.booleans())
def test_a_file_holds_what_was_appended(tmp_path_factory, layers, split):
    folder = tmp_path_factory.mktemp("run")
    records = [record("a/1", "prefill_end", layers), record("a/1", "end", layers), record("b/ü\u2028", "end", layers)]
    for part in (records[:1], records[1:]) if split else (records,):
        append_retention(folder, part)
    assert read_retention(folder) == records


@pytest.mark.parametrize("positions", [[-1], [3, 3], [4, 2]])
def test_positions_that_do_not_ascend_are_refused(positions):
    with pytest.raises(ValueError, match="not ascending"):
        encode_layer([positions])


@pytest.mark.parametrize("text", ["", "!", "AAAA", encode_layer([[1, 2]])[:-8]])
def test_text_that_is_no_layer_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011 - base64 and this module word it differently
        decode_layer(text)


def test_sinks_and_a_window_of_thousands_take_less_than_a_hundred_characters():
    assert len(encode_layer([[*range(4), *range(60_000, 64_092)]])) < 100


def test_the_last_record_of_a_sample_and_phase_counts(tmp_path):
    append_retention(tmp_path, [record(layers=[[[0]]]), record(layers=[[[7]]])])
    assert read_retention(tmp_path) == [record(layers=[[[7]]])]


def test_a_line_that_a_crash_left_unfinished_is_cut_off(tmp_path):
    append_retention(tmp_path, [record("a/1"), record("a/2")])
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-20])
    assert read_retention(tmp_path) == [record("a/1")]
    append_retention(tmp_path, [record("a/3")])
    assert read_retention(tmp_path) == [record("a/1"), record("a/3")]


def test_a_broken_line_is_named(tmp_path):
    append_retention(tmp_path, [record()])
    (tmp_path / FILE_NAME).write_text('{"sample_id": "a"}\n')
    with pytest.raises(UserError, match=r"retention\.jsonl:1 is no retention record"):
        read_retention(tmp_path)


def test_a_run_without_the_file_has_no_records(tmp_path):
    assert read_retention(tmp_path) == []


def test_a_map_holds_the_share_of_heads_and_positions_kept():
    one = to_map(record(layers=[[[0, 1, 2, 3], [0, 1]], [[4, 5, 6, 7], [6]]]), num_bins=2)
    assert one.num_tokens == 8
    assert one.shares.tolist() == [[6 / 8, 0.0], [0.0, 5 / 8]]


def test_a_map_reaches_to_the_last_answer_token_kept():
    one = to_map(record(layers=[[[0, 9]]]), num_bins=100)
    assert (one.num_tokens, one.num_prompt_tokens) == (10, 8)
    assert one.shares.tolist() == [[1.0, *[0.0] * 8, 1.0]]


def test_a_layer_that_kept_nothing_is_dark():
    assert to_map(record(layers=[[[]]]), num_bins=4).shares.tolist() == [[0.0] * 4]


@given(kept=POSITIONS, num_prompt_tokens=st.integers(1, 200_000), num_bins=st.integers(1, 64))
def test_no_position_is_lost_between_bins(kept, num_prompt_tokens, num_bins):
    one = to_map(record(layers=[[kept]], num_prompt_tokens=num_prompt_tokens), num_bins)
    widths = np.diff(np.linspace(0, one.num_tokens, one.shares.shape[1] + 1).round())
    assert np.isclose((one.shares[0] * widths).sum(), len(kept))


def test_the_mean_stretches_prompts_and_leaves_answers_out():
    short = to_map(record(layers=[[[0, 1, 2, 3, 8, 9]]]), num_bins=100)
    long = to_map(record(layers=[[[*range(8, 16)]]], num_prompt_tokens=16), num_bins=100)
    assert mean_shares([short, long], 2).tolist() == [[0.5, 0.5]]
