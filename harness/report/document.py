"""The report on disk: tables, figures, one Markdown document, one page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UserError
from harness.report.figures.all import make_figures, write_figures
from harness.report.figures.figure import Figure, Skipped
from harness.report.page.render import render_page
from harness.report.reading.load_tests import BenchRow, read_bench
from harness.report.reading.runs import Group, Run, make_groups, read_runs
from harness.report.tables.answer import sentences
from harness.report.tables.conditions import runs_table
from harness.report.tables.grid import Table, folded
from harness.report.tables.group import GroupTables, group_tables
from harness.report.tables.load_tests import bench_table
from harness.report.tables.paper import Known, paper_tables, read_paper
from harness.report.tables.published import PublishedRow, published_tables, read_published
from harness.report.tables.writers import markdown, write_table
from harness.store.manifest import write_atomically

TABLES, FIGURES = "tables", "figures"
DOCUMENT, PAGE = "report.md", "report.html"
HINT = "Full precision, LaTeX and figures: `tables/*.csv`, `.parquet`, `.tex`; `figures/*.pdf`, `.svg`, `.png`."


@dataclass(frozen=True)
class Sources:
    """Everything a report is made from."""

    runs: Sequence[Run]
    groups: Sequence[Group]
    bench: Sequence[BenchRow]
    paper: Sequence[Known]
    published: Sequence[PublishedRow]


@dataclass(frozen=True)
class Report:
    """What the sources say: the tables of every group by its name, those of no single group, and all figures."""

    tables: dict[str, GroupTables]
    shared: Sequence[Table]
    figures: Sequence[Figure | Skipped]


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
    known, published = ([], []) if paper is None else (read_paper(paper), read_published(paper))
    return Sources(runs, make_groups(runs), bench, known, published)


def make_report(sources: Sources) -> Report:
    """All tables and figures, nothing written yet."""
    tables = {group.name: group_tables(group) for group in sources.groups}
    shared = [bench_table(sources.bench)] if sources.bench else []
    shared += published_tables(sources.published, sources.runs)
    shared += [*paper_tables(sources.paper, sources.runs, sources.bench), runs_table(sources.runs)]
    answers = {name: found.answers for name, found in tables.items()}
    shared = [folded(table) for table in shared]
    return Report(tables, shared, make_figures(sources.groups, sources.bench, answers))


def write_report(sources: Sources, report: Report, folder: Path, samples_per_task: int) -> None:
    """Write tables, figures, document and page into `folder`."""
    (folder / TABLES).mkdir(parents=True, exist_ok=True)
    for table in (*(table for tables in report.tables.values() for table in tables.all), *report.shared):
        write_table(table, folder / TABLES)
    write_figures(folder / FIGURES, report.figures)
    write_atomically(folder / DOCUMENT, _document(sources.groups, report))
    page = render_page(sources.runs, sources.groups, report.tables, report.shared, report.figures, samples_per_task)
    write_atomically(folder / PAGE, page)


def _document(groups: Sequence[Group], report: Report) -> str:
    drawn = [figure for figure in report.figures if isinstance(figure, Figure)]
    parts = ["# Report\n", HINT + "\n"]
    for group in groups:
        tables = report.tables[group.name]
        parts.append(f"## {group.title}\n")
        parts += [_image(figure) for figure in drawn if figure.name == f"answer-{group.name}"]
        parts.append("\n".join(f"* **{name}** {text}" for name, text in sentences(tables.answers)) + "\n")
        parts += [markdown(table) for table in tables.all]
    parts.append("## All runs\n")
    parts += [markdown(table) for table in report.shared]
    parts.append("## Figures\n")
    parts += [f"### {one.title}\n\n{_image(one)}\n{one.caption}\n" for one in drawn]
    return "\n".join(parts)


def _image(figure: Figure) -> str:
    return f"![{figure.title}]({FIGURES}/{figure.name}.svg)\n"
