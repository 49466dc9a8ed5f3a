"""Tables to Markdown, LaTeX and CSV files."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from harness.report.grid import Cell, Table
from harness.store.manifest import write_atomically

NEAR_SIGN = "≈"
MAX_NARROW_COLUMNS = 7
LATEX_SIGNS = {
    "±": r"$\pm$",
    "≈": r"$\approx$",
    "−": r"$-$",
    "×": r"$\times$",
    "†": r"$\dagger$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "<": r"$<$",
    ">": r"$>$",
    "Δ": r"$\Delta$",
    "–": "--",
}
LATEX_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **LATEX_SIGNS,
}


def write_table(table: Table, folder: Path) -> None:
    """Write `<name>.csv` (full precision), `<name>.md` and `<name>.tex` into an existing folder."""
    write_atomically(folder / f"{table.name}.csv", pd.DataFrame(list(table.records)).to_csv(index=False))
    write_atomically(folder / f"{table.name}.md", markdown(table))
    write_atomically(folder / f"{table.name}.tex", latex(table))


def markdown(table: Table) -> str:
    """Title, table, caption and notes; the best of a block is bold, what it is not told apart from has a "≈"."""
    header = [f"{column.title} ({column.note})" if column.note else column.title for column in table.columns]
    rows = [[_markdown_cell(cell) for cell in row] for row in table.rows]
    frame = pd.DataFrame(rows, columns=[title.replace("|", r"\|") for title in header], dtype=str)
    alignment = ["left" if column.is_text else "right" for column in table.columns]
    grid = frame.to_markdown(index=False, colalign=alignment, disable_numparse=True)
    notes = "".join(f"\n\n> {note}" for note in table.notes)
    return f"### {table.title}\n\n{grid}\n\n{table.caption}{notes}\n"


def latex(table: Table) -> str:
    """A booktabs table (`\\usepackage{booktabs}`); caption and notes go into `\\caption`."""
    lead = [index for index, column in enumerate(table.columns) if column.is_text]
    header = [_latex_header(column.title, column.note) for column in table.columns]
    rows = [[_latex_cell(cell) for cell in row] for row in table.rows]
    style = pd.DataFrame(rows, columns=pd.Index(header), dtype=str).style.hide(axis="index")
    return style.to_latex(
        hrules=True,
        column_format="".join("l" if index in lead else "r" for index in range(len(header))),
        caption=escape_latex(" ".join([f"{table.title}.", table.caption, *table.notes])),
        label=f"tab:{table.name}",
        position="t",
        environment="table" if len(header) <= MAX_NARROW_COLUMNS else "table*",
        position_float="centering",
    )


def escape_latex(text: str) -> str:
    """The text so that LaTeX prints it as it is."""
    return "".join(LATEX_SPECIAL.get(sign, sign) for sign in text)


def select_columns(table: Table, name: str, title: str, wanted: Sequence[str]) -> Table:
    """A narrower table: the key columns and the wanted ones, in the table's own order."""
    chosen = [index for index, column in enumerate(table.columns) if index < table.num_keys or column.title in wanted]
    return replace(
        table,
        name=name,
        title=title,
        columns=[table.columns[index] for index in chosen],
        rows=[[row[index] for index in chosen] for row in table.rows],
    )


def _markdown_cell(cell: Cell) -> str:
    text = cell.text.replace("|", r"\|").replace("\n", " ")
    return {"best": f"**{text}**", "near": f"{text} {NEAR_SIGN}"}.get(cell.mark, text)


def _latex_cell(cell: Cell) -> str:
    text = escape_latex(cell.text)
    return {"best": rf"\textbf{{{text}}}", "near": rf"{text} {LATEX_SIGNS[NEAR_SIGN]}"}.get(cell.mark, text)


def _latex_header(title: str, note: str) -> str:
    if not note:
        return escape_latex(title)
    return (
        rf"\begin{{tabular}}{{@{{}}c@{{}}}}{escape_latex(title)}\\{{\scriptsize {escape_latex(note)}}}\end{{tabular}}"
    )
