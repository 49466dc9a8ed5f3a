"""A table before it becomes Markdown, LaTeX, CSV or HTML."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

NO_VALUE = "-"
MINUS = "\N{MINUS SIGN}"

Mark = Literal["", "best", "near"]


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        title: unique in the table.
        note: smaller print beneath it: metric, unit, number of samples.
        is_text: left-aligned.
        in_print: whether LaTeX has it too; long texts have no place on a page.
    """

    title: str
    note: str = ""
    is_text: bool = False
    in_print: bool = True


@dataclass(frozen=True)
class Cell:
    """A cell.

    Attributes:
        text: what is shown.
        value: what it is sorted by; None sorts last.
        detail: smaller print after it: interval, count of samples, variant.
        low, high: interval of the value.
        mark: "best" of its block of rows, "near": not told apart from the best by the best's interval.
    """

    text: str
    value: float | str | None = None
    detail: str = ""
    low: float | None = None
    high: float | None = None
    mark: Mark = ""

    @property
    def whole(self) -> str:
        """Text and detail in one line."""
        return f"{self.text} {self.detail}".strip()


@dataclass(frozen=True)
class Table:
    """A table and what a reader must know about it.

    Attributes:
        name: fit for a file name, unique in the report.
        caption: what the numbers are and under which conditions they hold.
        num_keys: leading columns that say what a row is about.
        notes: warnings, one sentence each.
        records: the rows as plain data with full precision, for CSV.
    """

    name: str
    title: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    num_keys: int = 1
    notes: Sequence[str] = ()
    records: Sequence[Mapping[str, Any]] = field(default=(), repr=False)


def folded(table: Table) -> Table:
    """The table less the columns that say the same in every row, which become one line of its caption."""
    same = [
        index
        for index in range(table.num_keys, len(table.columns))
        if len(table.rows) > 1 and len({row[index].whole for row in table.rows}) == 1
    ]
    if not same:
        return table
    kept = [index for index in range(len(table.columns)) if index not in same]
    first = table.rows[0]
    missing = [table.columns[index].title for index in same if first[index].text == NO_VALUE]
    said = [
        " ".join(filter(None, [table.columns[index].title, first[index].whole, table.columns[index].note]))
        for index in same
        if first[index].text != NO_VALUE
    ]
    lines = [f"The same in all rows: {'; '.join(said)}."] if said else []
    lines += [f"In no row: {', '.join(missing)}."] if missing else []
    return replace(
        table,
        columns=[table.columns[index] for index in kept],
        rows=[[row[index] for index in kept] for row in table.rows],
        caption=" ".join([table.caption, *lines]),
    )


def interval_text(low: float | None, high: float | None, digits: int = 1) -> str:
    """An interval as "[low, high]", "" without one."""
    return "" if low is None or high is None else f"[{format_number(low, digits)}, {format_number(high, digits)}]"


def range_text(value: float, low: float | None, high: float | None) -> str:
    """A score and its interval."""
    return f"{format_number(value, 2)} {interval_text(low, high)}".strip()


def text_cell(text: str | None) -> Cell:
    """A cell of text, sorted by it."""
    return Cell(NO_VALUE) if text is None else Cell(text, text)


def number_cell(value: float | None, digits: int = 0, sign: bool = False) -> Cell:
    """A cell with a number of so many decimals, "-" for None; `sign` shows a plus too."""
    return Cell(NO_VALUE) if value is None else Cell(format_number(value, digits, sign), value)


def format_number(value: float, digits: int, sign: bool = False) -> str:
    """A number with a real minus sign; `sign` shows a plus too. Zero has no sign."""
    rounded = round(value, digits) + 0.0
    return f"{rounded:{'+' if sign and rounded else ''}.{digits}f}".replace("-", MINUS)


def mark_best(cells: Sequence[Cell], competes: Sequence[bool]) -> list[Cell]:
    """Mark the largest values of a column, and those its interval does not tell apart from it.

    Args:
        cells: a column, top to bottom.
        competes: which of them are compared; fewer than two values are not marked.
    """
    rivals = [
        cell for cell, is_rival in zip(cells, competes, strict=True) if is_rival and isinstance(cell.value, float | int)
    ]
    if len(rivals) < 2:
        return list(cells)
    best = max(rivals, key=lambda cell: cell.value)
    return [replace(cell, mark=_mark(cell, best)) if any(cell is rival for rival in rivals) else cell for cell in cells]


def _mark(cell: Cell, best: Cell) -> Mark:
    if cell.value == best.value:
        return "best"
    return "near" if best.low is not None and cell.value >= best.low else ""
