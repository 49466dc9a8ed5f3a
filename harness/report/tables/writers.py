"""Tables to Markdown, LaTeX, CSV and Parquet files."""

from pathlib import Path

import pandas as pd

from harness.report.tables.grid import Cell, Column, Table
from harness.store.manifest import write_atomically

NEAR_SIGN = "≈"
MAX_NARROW_COLUMNS = 5
MAX_HEADER_SIGNS = 9
MAX_FLOAT_ROWS = 45
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
    """Write `<name>.csv` and `.parquet` (full precision), `<name>.md` and `<name>.tex` into an existing folder."""
    frame = pd.DataFrame(list(table.records))
    write_atomically(folder / f"{table.name}.csv", frame.to_csv(index=False))
    frame.to_parquet(folder / f"{table.name}.parquet", index=False)
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
    """A booktabs table as wide as the page at most (`\\usepackage{booktabs,graphicx}`), conditions in a note below it.

    Columns that are for the screen only are left out; one with many columns spans both columns of the page; one with
    many rows goes on in further floats.
    """
    starts = range(0, max(len(table.rows), 1), MAX_FLOAT_ROWS)
    return "\n".join(_float(table, start, is_last=start == starts[-1]) for start in starts)


def _float(table: Table, start: int, is_last: bool) -> str:
    chosen = [index for index, column in enumerate(table.columns) if column.in_print]
    columns = [table.columns[index] for index in chosen]
    lead = "".join("l" if column.is_text else "r" for column in columns)
    part = table.rows[start : start + MAX_FLOAT_ROWS]
    rows = [" & ".join(_latex_cell(row[index]) for index in chosen) + r" \\" for row in part]
    environment = "table*" if len(columns) > MAX_NARROW_COLUMNS else "table"
    notes = escape_latex(" ".join([table.caption, *table.notes]))
    return "\n".join(
        [
            rf"\begin{{{environment}}}[t]",
            r"\centering",
            rf"\caption{{{escape_latex(table.title)}{', continued' if start else ''}.}}",
            *([] if start else [rf"\label{{tab:{table.name}}}"]),
            r"\footnotesize",
            r"\setlength{\tabcolsep}{3pt}",
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{@{{}}{lead}@{{}}}}",
            r"\toprule",
            " & ".join(_latex_header(column) for column in columns) + r" \\",
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}}",
            *([rf"\par\smallskip\parbox{{\linewidth}}{{\tiny {notes}}}"] if is_last else []),
            rf"\end{{{environment}}}",
            "",
        ]
    )


def escape_latex(text: str) -> str:
    """The text so that LaTeX prints it as it is."""
    return "".join(LATEX_SPECIAL.get(sign, sign) for sign in text)


def _markdown_cell(cell: Cell) -> str:
    text, detail = (part.replace("|", r"\|").replace("\n", " ") for part in (cell.text, cell.detail))
    marked = {"best": f"**{text}**", "near": f"{text} {NEAR_SIGN}"}.get(cell.mark, text)
    return f"{marked} {detail}".strip()


def _latex_cell(cell: Cell) -> str:
    text = escape_latex(cell.text)
    marked = {"best": rf"\textbf{{{text}}}", "near": rf"{text}{LATEX_SIGNS[NEAR_SIGN]}"}.get(cell.mark, text)
    return marked + (rf" {{\tiny {escape_latex(cell.detail)}}}" if cell.detail else "")


def _latex_header(column: Column) -> str:
    """Title over note, each word of a long title in a line of its own."""
    title = escape_latex(column.title)
    lines = title.split(" ") if len(column.title) > MAX_HEADER_SIGNS else [title]
    lines += [rf"{{\tiny {part}}}" for part in escape_latex(column.note).split(", ") if part]
    if len(lines) == 1:
        return title
    side = "l" if column.is_text else "r"
    return rf"\begin{{tabular}}[b]{{@{{}}{side}@{{}}}}" + r"\\".join(lines) + r"\end{tabular}"
