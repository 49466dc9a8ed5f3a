"""Run folders fit to be committed: `python -m harness.report.export RUNS... --out DIR`.

A copy of each finished run without the texts of the benchmark: answers, references, classes and hashes that could be
looked up stay behind; scores, lengths, evictions and times go with it, so that every table and figure can be made from
the copy. Exit code 0: done; 2: a mistake the message explains.
"""

import argparse
import csv
import io
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.errors import UserError, exit_code

ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~-])/(?:[\w.@+-]+/)*([\w.@+-]+)/?")
NEEDLES = "needles.csv"
TEXTS = {"prediction": "", "answers": [], "all_classes": None}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.report.export", description="Copy finished runs without the texts of the benchmark."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders that hold them")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the copies go, a folder a run")
    return exit_code(_run, parser.parse_args(arguments))


def _run(options: argparse.Namespace) -> None:
    copies = export(options.runs, options.out)
    size = sum(file.stat().st_size for copy in copies for file in copy.iterdir())
    print(f"{len(copies)} runs, {size / 1024:.0f} KiB in {options.out}")


def export(paths: Sequence[Path], out: Path) -> list[Path]:
    """Copy every finished run at or below `paths`; returns the folders of the copies.

    Raises:
        UserError: there is no finished run, one cannot be read, or the copy of another run has its name already.
    """
    from harness.report.reading.runs import read_runs

    runs = [run for run in read_runs(paths) if run.is_finished]
    if not runs:
        raise UserError(f"no finished run was found in {', '.join(map(str, paths))}. Finish one: python -m harness")
    return [_export(run.folder, out / run.manifest.run_id) for run in runs]


def _export(folder: Path, copy: Path) -> Path:
    from harness.store.manifest import read_manifest, write_manifest
    from harness.store.predictions import predictions_sha256, read_predictions, replace_predictions

    copy.mkdir(parents=True, exist_ok=True)
    manifest = read_manifest(folder)
    replace_predictions(copy, [replace(one, **TEXTS) for one in read_predictions(folder)])
    sessions = [replace(session, engine=_without_curve(session.engine)) for session in manifest.sessions]
    named = {key: _without_places(getattr(manifest, key)) for key in ("config", "command", "data")}
    copied = replace(manifest, sessions=sessions, **named)
    if manifest.predictions_sha256 is not None:
        copied = replace(copied, predictions_sha256=predictions_sha256(copy))
    write_manifest(copy, copied)
    _shorten_usage(folder, copy)
    if (folder / NEEDLES).exists():
        shutil.copyfile(folder / NEEDLES, copy / NEEDLES)
    return copy


def _without_places(content: Any) -> Any:  # noqa: ANN401
    """Plain data with the absolute paths of this machine cut to their last part."""
    if isinstance(content, dict):
        return {key: _without_places(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_without_places(value) for value in content]
    return ABSOLUTE_PATH.sub(r"\1", content) if isinstance(content, str) else content


def _without_curve(engine: dict | None) -> dict | None:
    return engine and {key: value for key, value in engine.items() if key != "block_usage"}


def _shorten_usage(folder: Path, copy: Path) -> None:
    """Copy the curve of KV blocks without the steps that change nothing: peaks and means over time stay."""
    from harness.store.block_usage import FILE_NAME

    if not (folder / FILE_NAME).exists():
        return
    rows = list(csv.reader((folder / FILE_NAME).read_text(encoding="utf-8").splitlines()))
    time = rows[0].index("t_s")
    states = [row[:time] + row[time + 1 :] for row in rows]
    kept = [
        row
        for index, row in enumerate(rows)
        if index == 0 or states[index] != states[index - 1] or states[index] != [*states, None][index + 1]
    ]
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(kept)
    (copy / FILE_NAME).write_text(text.getvalue(), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
