"""What a load test prints at its end."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from harness.bench.summary import Spread, Summary

PLAIN_WIDTH = 120
MIB = 1024**2
NO_VALUE = "-"
MOST_ALONE = 0.2  # of the steps


def print_summaries(title: str, summaries: Sequence[Summary]) -> None:
    """Print tables of throughput, latency and memory, medians over repeats."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    for name, cells in ((title, _throughput), ("Latency", _latency), ("KV memory and evictions", _memory)):
        console.print(_table(name, [(one.first["label"], cells(one)) for one in summaries]))
    console.print("Medians over repeats (least to largest). Ratios of output tokens/s are taken repeat by repeat.")
    for warning in _warnings(summaries):
        console.print(warning)


def _warnings(summaries: Sequence[Summary]) -> list[str]:
    """A load that ends with one request at a time says little about throughput."""
    shares = [(one.first, one.spread("alone_share")) for one in summaries]
    return [
        f"warning: {first['label']} ran a single request in {_percent(share)} of its steps, so its figure is more of "
        "latency than of throughput. Use more requests (load.num_requests) or a larger pool (engine.num_kv_blocks)."
        for first, share in shares
        if share is not None and first["num_requests"] > 1 and share.median > MOST_ALONE
    ]


def _table(title: str, rows: Sequence[tuple[str, dict[str, str]]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("variant", no_wrap=True)
    for column in rows[0][1]:
        table.add_column(column, justify="right", no_wrap=True)
    for label, cells in rows:
        table.add_row(label, *cells.values())
    return table


def _throughput(summary: Summary) -> dict[str, str]:
    return {
        "output tok/s": _ranged(summary.spread("output_tok_s"), 1),
        "total tok/s": _middle(summary.spread("total_tok_s"), 1),
        "to full": _ranged(summary.to_full, 3),
        "to stock": _ranged(summary.to_stock, 3),
        "n": str(len(summary.rows)),
    }


def _latency(summary: Summary) -> dict[str, str]:
    return {
        "TTFT s p50": _middle(summary.spread("ttft_p50"), 2),
        "p99": _middle(summary.spread("ttft_p99"), 2),
        "TPOT ms p50": _middle(summary.spread("tpot_p50"), 1, 1000),
        "p99 ": _middle(summary.spread("tpot_p99"), 1, 1000),
        "ITL ms p50": _middle(summary.spread("itl_p50"), 1, 1000),
        "p90": _middle(summary.spread("itl_p90"), 1, 1000),
        " p99": _middle(summary.spread("itl_p99"), 1, 1000),
        "e2e s p50": _middle(summary.spread("e2e_p50"), 1),
    }


def _memory(summary: Summary) -> dict[str, str]:
    return {
        "peak blocks": _middle(summary.spread("peak_blocks")),
        "in prefill": _middle(summary.spread("peak_prefill_blocks")),
        "mean": _middle(summary.spread("mean_blocks"), 1),
        "mean MiB": _middle(summary.spread("mean_kv_bytes"), 1, 1 / MIB),
        "preemptions": _middle(summary.spread("num_preemptions")),
        "evictions": _middle(summary.spread("num_evictions")),
        "evicting": _percent(summary.spread("eviction_share")),
        "of decode": _percent(summary.spread("eviction_share_of_decode")),
    }


def _middle(value: Spread | None, digits: int = 0, factor: float = 1) -> str:
    return NO_VALUE if value is None else f"{value.median * factor:.{digits}f}"


def _ranged(value: Spread | None, digits: int) -> str:
    return (
        NO_VALUE if value is None else f"{value.median:.{digits}f} ({value.low:.{digits}f} to {value.high:.{digits}f})"
    )


def _percent(value: Spread | None) -> str:
    return NO_VALUE if value is None else f"{100 * value.median:.2f} %"
