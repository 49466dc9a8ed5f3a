"""Load tests are pooled and paired within themselves only, and named where a report holds several."""

import pytest

from harness.errors import UserError
from harness.report.figures.all import report_looks
from harness.report.figures.speed import block_size_figure, latency_figure, throughput_figures
from harness.report.reading.load_tests import read_bench, settings
from harness.report.tables.grid import folded
from harness.report.tables.load_tests import bench_table
from harness.report.tables.paper import paper_table, read_paper
from tests.report.synthetic import bench_rows, write_bench
from tests.report.test_report_paper import LOAD, PAPER


def faster(rows: list[dict], factor: float, policy: str) -> list[dict]:
    return [row | {"output_tok_s": factor * row["output_tok_s"]} if row["policy"] == policy else row for row in rows]


@pytest.fixture
def two(tmp_path):
    """Two load tests of one load, model and block size; in the second one the full cache is twice as fast."""
    write_bench(tmp_path, bench_rows(), "throughput-tiny", load_format="dummy")
    write_bench(tmp_path, faster(bench_rows(), 2, "full"), "latency-tiny", load={"request_rate": None})
    return tmp_path


def test_ratios_are_to_the_full_cache_of_the_same_load_test(two):
    found = {
        (one.rows[0].load_test, one.rows[0].budget): (len(one.rows), one.ratios("output_tok_s"))
        for one in settings(read_bench([two]))
        if one.rows[0].policy == "window"
    }
    assert found == {
        ("throughput-tiny", 128): (3, pytest.approx([2.0] * 3)),
        ("throughput-tiny", 256): (3, pytest.approx([1.5] * 3)),
        ("latency-tiny", 128): (3, pytest.approx([1.0] * 3)),
        ("latency-tiny", 256): (3, pytest.approx([0.75] * 3)),
    }


def test_a_load_test_without_a_full_cache_borrows_none(tmp_path):
    write_bench(tmp_path, bench_rows(), "whole")
    write_bench(tmp_path, [row for row in bench_rows() if row["policy"] != "full"], "alone")
    ratios = {
        (one.rows[0].load_test, one.rows[0].budget): one.ratios("output_tok_s")
        for one in settings(read_bench([tmp_path]))
    }
    assert ratios["alone", 128] == []
    assert len(ratios["whole", 128]) == 3


def test_the_table_names_load_tests_where_there_are_several_and_what_they_ran_on(two):
    table = bench_table(read_bench([two]))
    assert table.columns[2].title == "Load test"
    assert [row[2].text for row in table.rows] == ["latency-tiny"] * 3 + ["throughput-tiny"] * 3
    assert len(table.columns) == len(table.rows[0])
    code = f"code {'c' * 10}, finished."
    assert table.notes == [
        f"latency-tiny: float16, the model's weights, engine=vllm, max_num_seqs=64, reserve=True, {code}",
        f"throughput-tiny: float16, random weights, engine=vllm, max_num_seqs=64, reserve=True, {code}",
    ]
    alone = bench_table(read_bench([two / "latency-tiny"]))
    assert "Load test" not in [column.title for column in folded(alone).columns]
    assert "Load test latency-tiny; Model tiny; Block 32 tokens" in folded(alone).caption
    assert alone.notes == table.notes[:1]


def test_copies_of_a_load_test_are_not_pooled(tmp_path):
    for parent in ("here", "there"):
        write_bench(tmp_path / parent, bench_rows(), "same", load_format="auto")
    assert [(one.rows[0].load_test, len(one.rows)) for one in settings(read_bench([tmp_path]))] == [
        *[("same", 3)] * 3,
        *[("same (2)", 3)] * 3,
    ]


def test_a_request_rate_is_part_of_the_load_and_keeps_the_papers_load_apart(tmp_path):
    known = [one for one in read_paper(PAPER) if (one.metric, one.method) == ("throughput", "full")]
    rows = [row | LOAD for row in bench_rows("llama3.2-1b", block_size=16)]
    write_bench(tmp_path, rows, "at_once", load={"request_rate": None})
    write_bench(tmp_path, rows, "poisson", load={"request_rate": 2.0})
    bench = read_bench([tmp_path])
    loads = {one.load_test: one.load for one in bench}
    assert loads["poisson"] == f"{loads['at_once']}, 2 a second"
    (row,) = paper_table(known, [], bench).rows
    assert row[9].text.startswith("load test at_once: full")


def test_a_gain_is_taken_within_a_load_test(tmp_path):
    known = [one for one in read_paper(PAPER) if (one.metric, one.baseline) == ("throughput gain", "full")]
    rows = [row | LOAD for row in bench_rows("llama3.2-1b", block_size=16) if row["budget"] != 256]
    rows = [row | {"policy": "paged_eviction", "budget": 1024} if row["budget"] else row for row in rows]
    write_bench(tmp_path, rows, "a")
    write_bench(tmp_path, [row | {"total_tok_s": row["total_tok_s"] * (1 + (not row["budget"]))} for row in rows], "b")
    table = paper_table(known, [], read_bench([tmp_path]))
    assert [(row[8].text, row[9].text[:12]) for row in table.rows] == [
        ("+100.0", "load test a:"),
        ("0.0", "load test b:"),
    ]


def test_panels_of_several_load_tests_are_apart_and_named(two):
    bench = read_bench([two])
    looks = report_looks([], bench)
    (throughput,), latency = throughput_figures([], bench, looks), latency_figure(bench, looks)
    assert list(throughput.panels) == [
        f"{test}: {unit}"
        for test in ("latency-tiny", "throughput-tiny")
        for unit in ("output tokens/s", "prompt and output tokens/s")
    ]
    assert "All: tiny, 12 × 384 in, 256 out, block 32." in throughput.caption
    assert len(latency.panels) == 6
    more = bench_rows(block_size=64)
    write_bench(two, [*bench_rows(), *more], "page_size-tiny")
    bench = read_bench([two])
    (panel,) = block_size_figure([], bench, report_looks([], bench)).panels
    assert panel == "page_size-tiny: prompt and output tokens/s"


def test_compaction_and_mean_memory_are_said_to_be_what_they_are(two):
    caption = bench_table(read_bench([two])).caption
    assert "Mean KV: of the whole pool over time, so it depends on how many requests ran at once." in caption
    assert "(attention, queries) is not in it: a policy's whole cost shows in throughput and latency only" in caption
    assert "Compaction" in [column.title for column in bench_table(read_bench([two])).columns]


def test_a_manifest_that_cannot_be_read_is_named(two):
    (two / "latency-tiny" / "bench_manifest.json").write_text("{}")
    with pytest.raises(UserError, match=r"bench_manifest\.json is no manifest of a load test"):
        read_bench([two])
