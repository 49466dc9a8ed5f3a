"""The report on disk: tables, figures, one Markdown document, one page."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import UserError
from harness.report.accuracy import accuracy_table, by_category
from harness.report.bench_runs import BenchRow, bench_table, read_bench
from harness.report.charts import Skipped
from harness.report.conditions import runs_table
from harness.report.costs import memory_table, speed_table
from harness.report.differences import difference_tables
from harness.report.figures import SavedFigure, make_charts, write_figures
from harness.report.grid import Table
from harness.report.page import GroupTables, render_page
from harness.report.paper import Known, paper_table, read_paper
from harness.report.runs import Group, Run, make_groups, read_runs
from harness.report.writers import markdown, write_table
from harness.store.manifest import write_atomically

TABLES, FIGURES = "tables", "figures"
DOCUMENT, PAGE = "report.md", "report.html"
MARKDOWN_HINT = "Full precision and LaTeX: `tables/*.csv`, `tables/*.tex`. Figures: `figures/*.pdf`, `.svg`, `.png`."


@dataclass(frozen=True)
class Sources:
    """Everything a report is made from."""

    runs: Sequence[Run]
    groups: Sequence[Group]
    bench: Sequence[BenchRow]
    paper: Sequence[Known]


def read_sources(paths: Sequence[Path], paper: Path | None) -> Sources:
    """Read run folders, load tests and the paper's numbers.

    Raises:
        UserError: there is nothing to report, or something cannot be read.
    """
    runs, bench = read_runs(paths), read_bench(paths)
    if not runs and not bench:
        raise UserError(
            f"no run was found in {', '.join(str(path) for path in paths)}: no folder there holds a manifest.json. "
            "Make one with: python -m harness"
        )
    return Sources(runs, make_groups(runs), bench, [] if paper is None else read_paper(paper))


def write_all_figures(sources: Sources, folder: Path) -> tuple[list[SavedFigure], list[Skipped]]:
    """Draw every figure into `folder`; return what was drawn and what was not."""
    return write_figures(folder, sources.groups, make_charts(sources.groups, sources.bench))


def write_report(sources: Sources, folder: Path, samples_per_task: int) -> tuple[list[SavedFigure], list[Skipped]]:
    """Write tables, figures, document and page into `folder`; return what was drawn and what was not."""
    (folder / TABLES).mkdir(parents=True, exist_ok=True)
    groups = {group.name: _group_tables(group) for group in sources.groups}
    shared = _shared_tables(sources)
    for table in (*(table for tables in groups.values() for table in _for_paper(tables)), *shared):
        write_table(table, folder / TABLES)
    drawn, skipped = write_all_figures(sources, folder / FIGURES)
    write_atomically(folder / DOCUMENT, _document(sources.groups, groups, shared, drawn))
    charts = make_charts(sources.groups, sources.bench)
    page = render_page(sources.runs, sources.groups, groups, shared, charts, samples_per_task)
    write_atomically(folder / PAGE, page)
    return drawn, skipped


def _group_tables(group: Group) -> GroupTables:
    return GroupTables(accuracy_table(group), difference_tables(group), memory_table(group), speed_table(group))


def _shared_tables(sources: Sources) -> list[Table]:
    tables = [bench_table(sources.bench)] if sources.bench else []
    return [*tables, paper_table(sources.paper, sources.runs, sources.bench), runs_table(sources.runs)]


def _for_paper(tables: GroupTables) -> list[Table]:
    return [*by_category(tables.accuracy), *tables.differences, tables.memory, tables.speed]


def _document(
    groups: Sequence[Group], tables: dict[str, GroupTables], shared: Sequence[Table], drawn: Sequence[SavedFigure]
) -> str:
    parts = ["# Report\n", MARKDOWN_HINT + "\n"]
    for group in groups:
        parts.append(f"## {group.title}\n")
        *narrow, last = by_category(tables[group.name].accuracy)
        parts += [markdown(replace(table, caption="", notes=())) for table in narrow]
        parts += [markdown(table) for table in (last, *_for_paper(tables[group.name])[len(narrow) + 1 :])]
    parts.append("## All runs\n")
    parts += [markdown(table) for table in shared]
    parts.append("## Figures\n")
    parts += [f"### {one.title}\n\n![{one.title}]({FIGURES}/{one.name}.png)\n\n{one.caption}\n" for one in drawn]
    return "\n".join(parts)
