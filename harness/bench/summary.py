"""Repeats put together: medians, and ratios taken repeat by repeat before they are summed up."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from harness.bench.config import STOCK
from harness.budget import FULL_CACHE_POLICY

Row = dict[str, Any]


@dataclass(frozen=True)
class Spread:
    """Median, least and largest of `count` values."""

    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Summary:
    """All repeats of one variant.

    Attributes:
        rows: its rows of `bench.json`.
        to_full, to_stock: output tokens a second over those of the full cache and of stock vLLM with the same block
            size in the same repeat; None for the reference itself, and where there is none.
    """

    rows: Sequence[Row]
    to_full: Spread | None
    to_stock: Spread | None

    @property
    def first(self) -> Row:
        """The first repeat, for what is equal in all."""
        return self.rows[0]

    def spread(self, column: str) -> Spread | None:
        """Of a column, None if it was not recorded."""
        return spread([row[column] for row in self.rows if row[column] is not None])


def spread(values: Sequence[float]) -> Spread | None:
    """Median and range, None without values."""
    return Spread(median(values), min(values), max(values), len(values)) if values else None


def paired_ratios(rows: Sequence[Row], reference: Sequence[Row], column: str) -> list[float]:
    """Column over that of `reference`, for every repeat that both have."""
    others = {row["repeat"]: row[column] for row in reference}
    return [row[column] / others[row["repeat"]] for row in rows if row["repeat"] in others]


def summarise(rows: Sequence[Row]) -> list[Summary]:
    """One summary a variant, in the order in which they first ran."""
    by_label: dict[str, list[Row]] = {}
    for row in rows:
        by_label.setdefault(row["label"], []).append(row)
    return [
        Summary(members, _ratio(members, rows, FULL_CACHE_POLICY), _ratio(members, rows, STOCK))
        for members in by_label.values()
    ]


def _ratio(members: Sequence[Row], rows: Sequence[Row], policy: str) -> Spread | None:
    own = members[0]
    if own["policy"] == policy:
        return None
    reference = [row for row in rows if row["policy"] == policy and row["block_size"] == own["block_size"]]
    return spread(paired_ratios(members, reference, "output_tok_s"))
