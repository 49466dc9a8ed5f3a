"""Variants work in turn, ratios are taken repeat by repeat, and what is written is what the report reads."""

import contextlib
import json
from dataclasses import fields
from itertools import count, islice
from itertools import repeat as repeat_forever

import pytest

from harness.bench.config import STOCK
from harness.bench.interleaving import run_interleaved
from harness.bench.load import make_load
from harness.bench.resume import rows_that_stay
from harness.bench.run import carry_out
from harness.bench.summary import paired_ratios, summarise
from harness.errors import UserError
from harness.report.reading.load_tests import BenchRow, read_bench
from tests.bench.scripted_server import SMALL, VOCABULARY, ScriptedServer, composed_plan

CLOCKS = ("began_s", "engine_start_s", "warmup_s")
STEP_S = {"full": 0.02, STOCK: 0.019, "paged_eviction": 0.01}


def scripted_builder(log, days=None, evicts=True):
    speeds = days if days is not None else (1.0 for _ in count())
    return lambda variant: ScriptedServer(variant, STEP_S[variant.policy], speeds, log, evicts)


def carry(tmp_path, *overrides, **script):
    tmp_path.mkdir(exist_ok=True)
    plan = composed_plan(*SMALL, *overrides)
    carry_out(plan, make_load(plan, VOCABULARY), scripted_builder([], **script), tmp_path)
    return json.loads((tmp_path / "bench.json").read_text())


def test_side_by_side_every_engine_starts_once_and_the_order_turns_round():
    plan, log = composed_plan(*SMALL), []
    repeats = list(run_interleaved(plan, make_load(plan, VOCABULARY), scripted_builder(log)))
    full, paged = (variant.label for variant in plan.variants)
    assert log[:4] == [f"start {full}", f"2 requests {full}", f"start {paged}", f"2 requests {paged}"]
    assert log[4:10] == [f"4 requests {label}" for label in (full, paged, paged, full, full, paged)]
    assert sorted(log[10:]) == [f"close {full}", f"close {paged}"]
    assert [(repeat.number, repeat.variant.label) for repeat in repeats[:3]] == [(0, full), (0, paged), (1, paged)]


def test_one_after_the_other_never_two_engines_at_once():
    plan, log = composed_plan(*SMALL, "side_by_side=false"), []
    list(run_interleaved(plan, make_load(plan, VOCABULARY), scripted_builder(log)))
    alive = 0
    for line in log:
        alive += line.startswith("start") - line.startswith("close")
        assert alive <= 1
    assert sum(line.startswith("start") for line in log) == 6
    assert alive == 0


@pytest.mark.parametrize("num_measured", range(7))
@pytest.mark.parametrize("side_by_side", [True, False])
def test_what_was_measured_stays_and_only_the_rest_is_measured(tmp_path, side_by_side, num_measured):
    """Killed in each of the six runs, and after the last; two of them make a round."""
    plan, log = composed_plan(*SMALL, f"side_by_side={side_by_side}"), []
    load, cut = make_load(plan, VOCABULARY), tmp_path / "cut"
    cut.mkdir()
    whole = carry(tmp_path / "whole", f"side_by_side={side_by_side}")
    with pytest.raises(RuntimeError) if num_measured < 6 else contextlib.nullcontext():
        carry_out(plan, load, scripted_builder([], days=islice(repeat_forever(1.0), num_measured)), cut)
    stay = rows_that_stay(cut, plan)
    assert len(stay) == (num_measured // 2 * 2 if side_by_side else num_measured)
    carry_out(plan, load, scripted_builder(log), cut, stay)
    left = 6 - len(stay)
    assert sum(line.startswith("4 requests") for line in log) == left
    assert sum(line.startswith("start") for line in log) == (2 * (left > 0) if side_by_side else left)
    assert without_clocks(json.loads((cut / "bench.json").read_text())) == without_clocks(whole)
    assert (cut / "bench.csv").read_text().count("\n") == 7
    for label in ("full-b32", "paged_eviction-64-b32"):
        usage = [(place / label / "block_usage.csv").read_text() for place in (cut, tmp_path / "whole")]
        assert usage[0] == usage[1]


def without_clocks(rows):
    return [{name: value for name, value in row.items() if name not in CLOCKS} for row in rows]


def test_a_row_that_was_not_written_takes_its_steps_along(tmp_path):
    """As a kill between the two leaves it."""
    plan = composed_plan(*SMALL, "side_by_side=false")
    rows = carry(tmp_path, "side_by_side=false")
    (tmp_path / "bench.json").write_text(json.dumps(rows[:5]))
    assert rows_that_stay(tmp_path, plan) == rows[:5]
    usage = (tmp_path / rows[5]["label"] / "block_usage.csv").read_text().splitlines()
    assert {line.split(",")[0] for line in usage[1:]} == {"0", "1"}


def test_engines_are_closed_after_an_error():
    plan, log = composed_plan(*SMALL), []
    with pytest.raises(UserError, match="paged_eviction-64-b32 evicted nothing, although it has to from prompts of 96"):
        list(run_interleaved(plan, make_load(plan, VOCABULARY), scripted_builder(log, evicts=False)))
    assert sum(line.startswith("close") for line in log) == 2


def test_a_drifting_machine_does_not_move_paired_ratios(tmp_path):
    """Each round is slower than the one before, so unpaired values overlap."""
    days = iter([1.0, 1.0, 3.0, 3.0, 9.0, 9.0])
    full, paged = summarise(carry(tmp_path, days=days))
    assert paged.spread("output_tok_s").low < full.spread("output_tok_s").high
    assert (paged.to_full.low, paged.to_full.median, paged.to_full.high) == pytest.approx((2.0, 2.0, 2.0))
    assert (paged.to_full.count, full.to_full, full.to_stock) == (3, None, None)


def test_only_repeats_that_both_have_are_paired():
    rows = [{"repeat": 0, "x": 6.0}, {"repeat": 1, "x": 8.0}]
    assert paired_ratios(rows, [{"repeat": 1, "x": 2.0}], "x") == [4.0]


def test_a_row_has_the_rates_of_the_timed_part_and_the_counts_of_its_repeat(tmp_path):
    rows = carry(tmp_path)
    paged = [row for row in rows if row["policy"] == "paged_eviction"]
    for row in paged:
        assert row["output_tok_s"] == pytest.approx(4 * 8 / 0.08)
        assert row["total_tok_s"] == pytest.approx(4 * (96 + 8) / 0.08)
        assert (row["num_evictions"], row["peak_blocks"], row["peak_prefill_blocks"]) == (7, 17, 10)
        assert row["eviction_share"] == pytest.approx(0.5 / 0.08)
        assert row["eviction_share_of_decode"] == pytest.approx(0.25 / 0.07, rel=1e-3)
        assert row["peak_kv_bytes"] == 17 * 1000


def test_stock_vllm_has_times_but_no_counts(tmp_path):
    rows = carry(tmp_path, "variants.stock=true")
    stock = [row for row in rows if row["policy"] == STOCK]
    assert len(stock) == 3
    assert {row["peak_blocks"] for row in stock} == {None}
    assert {row["budget"] for row in stock} == {None}
    assert all(row.keys() == rows[0].keys() for row in rows)
    _, _, paged = summarise(rows)
    assert paged.to_stock.median == pytest.approx(1.9)


def test_the_report_reads_what_is_written(tmp_path):
    rows = carry(tmp_path, "variants.options={paged_eviction:{protect_first:32}}")
    read = read_bench([tmp_path])
    of_the_test = {"load_test", "request_rate", "conditions"}
    assert {field.name for field in fields(BenchRow)} - of_the_test <= rows[0].keys()
    assert all(row.load_test for row in read)
    assert [(row.policy, row.variant, row.repeat, row.output_tok_s) for row in read] == [
        (row["policy"], row["variant"], row["repeat"], row["output_tok_s"]) for row in rows
    ]
    assert {row.variant for row in read} == {"", "protect_first=32"}


def test_block_usage_is_kept_for_every_variant_and_repeat(tmp_path):
    carry(tmp_path)
    for label in ("full-b32", "paged_eviction-64-b32"):
        lines = (tmp_path / label / "block_usage.csv").read_text().splitlines()
        assert {line.split(",")[0] for line in lines[1:]} == {"0", "1", "2"}
        assert lines[1].split(",")[:3] == ["0", "0.0", "10"]


def test_tables_are_printed(tmp_path, capsys):
    carry(tmp_path)
    printed = capsys.readouterr().out
    assert "2.000 (2.000 to 2.000)" in printed
    assert "400.0 (400.0 to 400.0)" in printed
