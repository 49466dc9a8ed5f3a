"""Tables to HTML: complete without a script, which adds sorting, filtering and tints."""

from collections.abc import Sequence
from html import escape

from harness.report.tables.grid import Cell, Column, Table

MARK_TITLES = {"best": "best of its budget", "near": "inside the 95 % interval of the best"}


def html_table(table: Table, said: Sequence[str] = (), with_tints: bool = False) -> str:
    """A titled figure that holds the table, its caption and its notes.

    Args:
        said: sentences that the page says elsewhere for all tables, left out here.
        with_tints: shade the cells of a column by value.
    """
    head = "".join(_header(column, table.num_keys, index) for index, column in enumerate(table.columns))
    body = "".join(f"<tr>{_row(table, row)}</tr>" for row in table.rows)
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes if note not in said)
    tints = " data-tints" if with_tints else ""
    return (
        f'<figure class="table" id="{escape(table.name)}"><h3>{escape(table.title)}</h3>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">'
        f"<table{tints}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        f"<figcaption>{escape(without(table.caption, said))}{notes and f'<ul>{notes}</ul>'}</figcaption></figure>"
    )


def without(text: str, said: Sequence[str]) -> str:
    """The text less some sentences."""
    for sentence in said:
        text = text.replace(sentence, "")
    return " ".join(text.split())


def _header(column: Column, num_keys: int, index: int) -> str:
    note = f"<small>{escape(column.note)}</small>" if column.note else ""
    kind = "text" if column.is_text else "number"
    key = " key" if index < num_keys else ""
    return f'<th scope="col" class="{kind}{key}"><span>{escape(column.title)}</span>{note}</th>'


def _row(table: Table, row: list[Cell]) -> str:
    return "".join(
        _cell(cell, column, is_head=index == 0)
        for index, (cell, column) in enumerate(zip(row, table.columns, strict=True))
    )


def _cell(cell: Cell, column: Column, is_head: bool) -> str:
    value = "" if cell.value is None or isinstance(cell.value, str) else f' data-v="{cell.value:.6g}"'
    classes = " ".join(name for name in ("text" if column.is_text else "", cell.mark) if name)
    style = f' class="{classes}"' if classes else ""
    title = f' title="{MARK_TITLES[cell.mark]}"' if cell.mark else ""
    detail = f" <small>{escape(cell.detail)}</small>" if cell.detail else ""
    if is_head:
        return f'<th scope="row"{style}>{escape(cell.text)}{detail}</th>'
    return f"<td{style}{value}{title}>{escape(cell.text)}{detail}</td>"
