"""Tables, figures and a page from run folders: `python -m harness.report RUNS... [--out DIR]`.

Exit code 0: done; 2: a mistake the message explains.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.errors import UserError
from harness.report.charts import Skipped
from harness.report.document import DOCUMENT, FIGURES, PAGE, TABLES, read_sources, write_all_figures, write_report
from harness.report.figures import SavedFigure

DEFAULT_OUT = Path("results/report")
DEFAULT_PAPER = Path("results/paper")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.report",
        description="Tables, figures and a page from run folders and load tests. Nothing is scored again.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders that hold them")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"write everything here (default: {DEFAULT_OUT} without --figures)"
    )
    parser.add_argument("--figures", type=Path, metavar="DIR", help="write only the figures, here")
    parser.add_argument(
        "--paper", type=Path, metavar="DIR", help=f"the paper's numbers (default: {DEFAULT_PAPER}, if it is there)"
    )
    parser.add_argument(
        "--samples-per-task", type=int, default=10, metavar="N", help="samples on the page (default: %(default)s)"
    )
    return parser


def _run(options: argparse.Namespace) -> None:
    if options.samples_per_task < 0:
        raise UserError(f"--samples-per-task={options.samples_per_task} is negative. Use 0 or more.")
    paper = options.paper or (DEFAULT_PAPER if DEFAULT_PAPER.is_dir() else None)  # not there outside the repository
    sources = read_sources(options.runs, paper)
    print(
        f"{len(sources.runs)} runs in {len(sources.groups)} groups, {len(sources.bench)} rows of load tests", flush=True
    )
    if options.figures is not None:
        drawn, skipped = write_all_figures(sources, options.figures)
        _print_figures(options.figures, drawn, skipped)
    if options.out is not None or options.figures is None:
        out = options.out or DEFAULT_OUT
        drawn, skipped = write_report(sources, out, options.samples_per_task)
        _print_figures(out / FIGURES, drawn, skipped)
        print(f"Tables    {out / TABLES}\nDocument  {out / DOCUMENT}\nPage      {out / PAGE}")


def _print_figures(folder: Path, drawn: Sequence[SavedFigure], skipped: Sequence[Skipped]) -> None:
    for one in skipped:
        print(f"skipped   {one.name}: {one.reason}")
    print(f"Figures   {folder} ({len(drawn)}, each as PDF, SVG and PNG)")


if __name__ == "__main__":
    sys.exit(main())
