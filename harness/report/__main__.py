"""Tables, figures and a page from run folders: `python -m harness.report RUNS... [--out DIR]`.

Exit code 0: done; 2: a mistake the message explains.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.errors import UserError, exit_code

DEFAULT_OUT = Path("results/report")
DEFAULT_PAPER = Path("results/paper")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return exit_code(_run, _parser().parse_args(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.report",
        description="Tables, figures and a page from run folders and load tests. Nothing is scored again.",
        epilog="python -m harness.report.export copies run folders without the texts of the benchmark.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders that hold them")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"write everything here (default: {DEFAULT_OUT} without --figures)"
    )
    parser.add_argument("--figures", type=Path, metavar="DIR", help="write only the figures, here")
    parser.add_argument(
        "--paper", type=Path, metavar="DIR", help=f"published numbers (default: {DEFAULT_PAPER}, if it is there)"
    )
    parser.add_argument(
        "--samples-per-task", type=int, default=10, metavar="N", help="samples on the page (default: %(default)s)"
    )
    return parser


def _run(options: argparse.Namespace) -> None:
    if options.samples_per_task < 0:
        raise UserError(f"--samples-per-task={options.samples_per_task} is negative. Use 0 or more.")
    from harness.report.document import DOCUMENT, FIGURES, PAGE, TABLES, make_report, read_sources, write_report
    from harness.report.figures.all import write_figures
    from harness.report.figures.figure import FORMATS, Skipped

    paper = options.paper or (DEFAULT_PAPER if DEFAULT_PAPER.is_dir() else None)  # not there outside the repository
    sources = read_sources(options.runs, paper)
    print(
        f"{len(sources.runs)} runs in {len(sources.groups)} groups, {len(sources.bench)} rows of load tests", flush=True
    )
    report = make_report(sources)
    skipped = [figure for figure in report.figures if isinstance(figure, Skipped)]
    for one in skipped:
        print(f"skipped   {one.name}: {one.reason}")
    count = f"{len(report.figures) - len(skipped)}, each as {', '.join(FORMATS).upper()}"
    if options.figures is not None:
        write_figures(options.figures, report.figures)
        print(f"Figures   {options.figures} ({count})")
    if options.figures is None or options.out is not None:
        out = options.out or DEFAULT_OUT
        write_report(sources, report, out, options.samples_per_task)
        for what, name in (
            ("Tables", TABLES),
            ("Figures", f"{FIGURES} ({count})"),
            ("Document", DOCUMENT),
            ("Page", PAGE),
        ):
            print(f"{what:<9} {out / name}")


if __name__ == "__main__":
    sys.exit(main())
