"""Rankings of retrieval runs, repeats over seeds, and scores by length, from predictions made by hand."""

from dataclasses import fields, replace

import pytest

from harness.by_length import scores_by_length
from harness.run.ranking import has_repeats, is_retrieval, rank, ranking_text, verdict
from harness.statistics.stats import wilson
from harness.store.manifest import new_manifest, write_manifest
from harness.store.predictions import Prediction, append_prediction, open_for_append


def prediction(sample_id, score, length=700, task="needle"):
    given = {"sample_id": sample_id, "task": task, "length": length, "score": score, "context_sha256": sample_id}
    return Prediction(**{field.name: given.get(field.name) for field in fields(Prediction)})


def manifest(policy="full", budget=None, source="needle", longbench_e=False, data="d", **options):
    config = {
        "policy": {"name": policy, "budget": budget, "options": options},
        "engine": {"name": "vllm"},
        "benchmark": {"source": source, "name": source, "lengths": [700], "longbench_e": longbench_e},
    }
    return new_manifest("id", config, "command", {"content_sha256": data}, {})


@pytest.fixture
def make(tmp_path):
    """Write a run folder of so many needles found of 10, half of them at each of two lengths."""

    def make_run(policy, found, **settings):
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        write_manifest(folder, manifest(policy, None if policy == "full" else 192, **settings))
        with open_for_append(folder) as file:
            for number in range(10):
                append_prediction(file, prediction(f"s{number}", float(number < found), 500 + 500 * (number % 2)))
        return folder

    return make_run


def test_the_best_comes_first_and_the_test_is_judged(make):
    folders = [make("random", 1), make("keydiff", 6), make("full", 10)]
    ranked = rank(folders)
    assert [(line.label, line.score, line.n) for line in ranked] == [
        ("full", 100.0, 10), ("keydiff @ 192", 60.0, 10), ("random @ 192", 10.0, 10),
    ]  # fmt: skip
    assert ranked[1].by_length == {500: 60.0, 1000: 60.0}
    assert is_retrieval(folders)
    assert "tells policies apart" in verdict(ranked)
    text = ranking_text(ranked)
    assert "at 500" in text
    assert text.splitlines()[-2].split()[:4] == ["2", "keydiff", "@", "192"]


@pytest.mark.parametrize(
    ("full", "chance", "says"),
    [
        (8, 1, "proves nothing: the full cache reaches 80.0 at 500"),
        (10, 5, "proves nothing: random eviction reaches 50.0"),
    ],
)
def test_a_test_that_proves_nothing_says_so(make, full, chance, says):
    assert says in verdict(rank([make("full", full), make("random", chance)]))


def test_without_full_or_random_nobody_can_say(make):
    assert verdict(rank([make("keydiff", 3)])).startswith("Without policy=full and random")


def test_runs_that_differ_in_a_seed_are_repeats(make):
    folders = [make("random", found, seed=seed) for seed, found in enumerate((2, 4, 6))]
    assert has_repeats(folders)
    (line,) = rank(folders)
    assert (line.num_runs, line.score, line.sd, line.n) == (3, pytest.approx(40.0), pytest.approx(20.0), 10)
    others = [make("h2o", 2, heavy_ratio=0.1), make("h2o", 4, heavy_ratio=0.9)]
    assert not has_repeats(others)
    assert [line.label for line in rank(others)] == ["h2o @ 192 heavy_ratio=0.9", "h2o @ 192 heavy_ratio=0.1"]


def test_other_rows_of_another_seed_count_as_more_samples(make):
    (line,) = rank([make("random", 2, data="a"), make("random", 4, data="b")])
    assert (line.n, line.num_runs, line.score) == (20, 2, pytest.approx(30.0))


def test_wilson_intervals_are_those_of_the_textbook():
    assert wilson(0.5, 10) == (pytest.approx(0.2366, abs=1e-4), pytest.approx(0.7634, abs=1e-4))
    assert wilson(1.0, 24) == (pytest.approx(0.8620, abs=1e-4), pytest.approx(1.0))
    assert wilson(0.0, 24)[0] == pytest.approx(0.0)


def test_scores_by_length_have_a_mean_of_their_tasks():
    rows = [prediction("a", 1.0, 512), prediction("b", 0.0, 512), prediction("c", 1.0, 1024)]
    rows.append(prediction("d", 1.0, 512, "ruler_vt"))
    found = {
        (r["length"], r["task"]): (r["score"], r["num_samples"])
        for r in scores_by_length(manifest(source="ruler"), rows)
    }
    assert found == {
        (512, "ruler_vt"): (100.0, 1), (512, "needle"): (50.0, 2), (512, "all tasks"): (75.0, 3),
        (1024, "needle"): (100.0, 1), (1024, "all tasks"): (100.0, 1),
    }  # fmt: skip


def test_longbench_e_has_its_buckets_and_longbench_powers_of_two_of_tokens():
    rows = [
        prediction("a", 1.0, 100, "qasper"),
        prediction("b", 0.5, 5000, "qasper"),
        prediction("c", None, 9000, "qasper"),
    ]
    found = scores_by_length(manifest(source="local", longbench_e=True), rows)
    assert [(r["length"], r["task"], r["score"]) for r in found] == [
        ("0-4k", "qasper", 100.0), ("0-4k", "all tasks", 100.0), ("4-8k", "qasper", 50.0), ("4-8k", "all tasks", 50.0),
    ]  # fmt: skip
    rows = [replace(one, num_prompt_tokens=tokens) for one, tokens in zip(rows, (512, 513, 9000), strict=True)]
    assert [(r["length"], r["score"]) for r in scores_by_length(manifest(source="mini"), rows)] == [
        ("up to 512", 100.0), ("up to 512", 100.0), ("up to 1024", 50.0), ("up to 1024", 50.0),
    ]  # fmt: skip
