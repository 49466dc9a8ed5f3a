"""The table of load tests."""

from collections.abc import Sequence
from statistics import median

from harness.report.reading.load_tests import BenchRow, BenchSetting, settings
from harness.report.reading.runs import FULL_CACHE_POLICY, budget_text
from harness.report.tables.conditions import BUDGET_MEANING, COMPACTION_MEANING
from harness.report.tables.grid import (
    NO_VALUE,
    Cell,
    Column,
    Table,
    format_number,
    number_cell,
    text_cell,
)

MIB = 1024**2


def bench_table(rows: Sequence[BenchRow]) -> Table:
    """Medians over repeats, and the ratio to the full cache of the same load test repeat by repeat."""
    found = settings(rows)
    caption = (
        "Medians over repeats. Ratios repeat by repeat within a load test, so that a noisy machine cancels out. Mean "
        f"KV: of the whole pool over time, so it depends on how many requests ran at once. {COMPACTION_MEANING}. "
        f"{BUDGET_MEANING}."
    )
    devices = ", ".join(sorted({row.device for row in rows if row.device}))
    conditions = {row.load_test: row.conditions for row in rows if row.conditions}
    return Table(
        name="bench",
        title="Load tests",
        caption=f"{devices}. {caption}" if devices else caption,
        columns=_COLUMNS,
        rows=[_cells(one) for one in found],
        num_keys=2,
        notes=[f"{name}: {text}." for name, text in sorted(conditions.items())],
        records=[vars(row) for one in found for row in one.rows],
    )


_COLUMNS = (
    *(Column("Policy", is_text=True), Column("Budget", "tokens"), Column("Load test", is_text=True)),
    *(Column("Model", is_text=True), Column("Block", "tokens"), Column("Load", is_text=True), Column("Repeats")),
    *(Column("Output", "tokens/s"), Column("Total", "tokens/s"), Column("Ratio to full", "output, min to max")),
    *(Column("TTFT p50", "s"), Column("TTFT p99", "s"), Column("TPOT p50", "ms"), Column("TPOT p99", "ms")),
    *(Column("Peak blocks"), Column("Peak in prefill", "blocks"), Column("Mean KV", "MiB")),
    *(Column("Compaction", "% of time"), Column("Preemptions")),
)


def _cells(one: BenchSetting) -> list[Cell]:
    row = one.rows[0]
    ratios = [] if row.policy == FULL_CACHE_POLICY else one.ratios("output_tok_s")
    mib_per_block = (row.bytes_per_block or 0) / MIB or None

    def median_cell(field: str, digits: int = 0, factor: float | None = 1) -> Cell:
        value = one.median(field)
        return number_cell(None if value is None or factor is None else factor * value, digits)

    return [
        Cell(row.policy, row.series, row.variant),
        Cell(budget_text(row.budget) or NO_VALUE, row.budget),
        *(text_cell(row.load_test or None), text_cell(row.model), number_cell(row.block_size)),
        *(text_cell(row.load or None), number_cell(len(one.rows))),
        *(median_cell("output_tok_s", 1), median_cell("total_tok_s", 1), _ratio_cell(ratios)),
        *(median_cell("ttft_p50", 3), median_cell("ttft_p99", 3)),
        *(median_cell("tpot_p50", 1, 1000), median_cell("tpot_p99", 1, 1000)),
        *(median_cell("peak_blocks"), median_cell("peak_prefill_blocks")),
        median_cell("mean_blocks", 1, mib_per_block),
        *(number_cell(_share(one), 2), median_cell("num_preemptions")),
    ]


def _ratio_cell(ratios: Sequence[float]) -> Cell:
    if not ratios:
        return Cell(NO_VALUE)
    low, middle, high = (format_number(value, 2) for value in (min(ratios), median(ratios), max(ratios)))
    return Cell(middle, median(ratios), f"({low} to {high})")


def _share(one: BenchSetting) -> float | None:
    evicting, whole = one.median("eviction_time_s"), one.median("duration_s")
    return None if evicting is None or not whole else 100 * evicting / whole
