"""Needles found against needles kept, from records that are known by hand."""

import csv
from dataclasses import fields

import numpy as np

from harness.needles import needle_samples, survival, write_needles
from harness.retention import RetentionRecord, append_retention
from harness.store.predictions import Prediction, append_prediction, open_for_append


def prediction(sample_id, score, spans=((10, 14),)):
    given = {"sample_id": sample_id, "task": "needle", "length": 100, "depth": 0.5, "score": score}
    given["value_spans"] = spans and [list(span) for span in spans]
    return Prediction(**{field.name: given.get(field.name, "") for field in fields(Prediction)})


def record(sample_id, *layers, phase="prefill_end"):
    return RetentionRecord(sample_id, 90, phase, layers)


# two layers; the second one has one list that both heads share
FOUND = record("a", [[1, 10, 11, 12, 13], [10, 11]], [[9, 13, 14]])
MISSED = record("b", [[], [10]], [[0, 99]])


def test_shares_are_counted_a_layer_and_head_and_split_by_the_answer():
    samples = needle_samples([prediction("a", 1.0), prediction("b", 0.0)], [FOUND, MISSED])
    mean = survival(samples)
    assert [sample.found for sample in samples] == [True, False]
    assert (mean.num_found, mean.num_missed) == (1, 1)
    np.testing.assert_allclose(mean.kept_if_found, [[1, 0.5], [0.25, 0.25]])
    np.testing.assert_allclose(mean.kept_if_missed, [[0, 0.25], [0, 0]])
    np.testing.assert_allclose(mean.kept, [[0.5, 0.375], [0.125, 0.125]])


def test_only_samples_with_needle_score_and_record_of_the_prompt_count():
    predictions = [prediction("a", 1.0), prediction("b", None), prediction("c", 1.0, None), prediction("d", 1.0)]
    records = [FOUND, record("b", [[1]]), record("c", [[1]]), record("d", [[1]], phase="end")]
    assert [sample.sample_id for sample in needle_samples(predictions, records)] == ["a"]
    assert survival([]) is None
    assert survival(needle_samples([prediction("a", 1.0)], [FOUND])).kept_if_missed is None


def test_the_file_has_a_row_a_layer_and_head(tmp_path):
    write_needles(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with open_for_append(tmp_path) as file:
        append_prediction(file, prediction("a", 1.0))
    append_retention(tmp_path, [FOUND])
    write_needles(tmp_path)
    rows = list(csv.DictReader((tmp_path / "needles.csv").open()))
    assert [(row["layer"], row["head"], row["kept"]) for row in rows] == [
        ("0", "0", "1.0"), ("0", "1", "0.5"), ("1", "0", "0.25"), ("1", "1", "0.25"),
    ]  # fmt: skip
    assert {(row["num_found"], row["num_missed"], row["kept_if_missed"]) for row in rows} == {("1", "0", "")}
