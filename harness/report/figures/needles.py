"""Figures of needles in a haystack: found by depth and length, and in which layers and heads their tokens stayed."""

import csv
from collections.abc import Sequence
from typing import Any

from harness.needles import FILE_NAME
from harness.report.figures.figure import Figure, Skipped
from harness.report.figures.marks import grid
from harness.report.reading.runs import Group, Run
from harness.report.tables.conditions import setting

FOUND = "needle-found"
KEPT = "needle-kept"
KINDS = {"kept_if_found": "found", "kept_if_missed": "missed"}


def needle_figures(group: Group) -> list[Figure | Skipped]:
    """None for runs without needles: a panel a run each."""
    rows = [row for run in group.finished for row in _found_rows(run)]
    if not rows:
        return []
    about = setting(group)
    found = Figure(
        name=f"{FOUND}-{group.name}",
        title=f"Needles found by depth and length, {group.title}",
        caption=f"{about} Mean score of the samples of one length and depth, 0 to 1; depth 0 is the start of the text.",
        unit=grid("Length (tokens)", "Depth (% of the text)", "Score", (0, 1), "ascending"),
        rows=rows,
        panels=list(dict.fromkeys(row["panel"] for row in rows)),
        shared=("x", "y"),
        group=group.name,
    )
    kept = [row for run in group.finished for row in _kept_rows(run)]
    if not kept:
        return [found, Skipped(f"{KEPT}-{group.name}", "no run recorded in which heads the needles stayed")]
    survival = Figure(
        name=f"{KEPT}-{group.name}",
        title=f"Needle tokens still held when the answer began, {group.title}",
        caption=f"{about} Share of the needles' tokens that each layer and KV head held, mean over the samples whose "
        "answer was right (found) or not (missed).",
        unit=grid("KV head", "Layer", "Share kept", (0, 1)),
        rows=kept,
        panels=list(dict.fromkeys(row["panel"] for row in kept)),
        shared=("x", "y"),
        group=group.name,
    )
    return [found, survival]


def _found_rows(run: Run) -> list[dict[str, Any]]:
    cells: dict[tuple[int, int], list[float]] = {}
    for sample in run.predictions:
        if sample.depth is not None:
            cells.setdefault((sample.length, round(100 * sample.depth)), []).append(sample.score or 0.0)
    return [
        {"panel": run.label, "x": length, "y": depth, "value": round(_mean(scores), 3)}
        | {"tip": f"{run.label}, {length} tokens, depth {depth} %: {_mean(scores):.2f}, n = {len(scores)}"}
        for (length, depth), scores in sorted(cells.items())
    ]


def _kept_rows(run: Run) -> list[dict[str, Any]]:
    path = run.folder / FILE_NAME
    if not path.exists():
        return []
    lines = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    return [
        {"panel": f"{run.label}, {kind}", "x": int(line["head"]), "y": int(line["layer"]), "value": float(line[column])}
        | {"tip": f"{run.label}, {kind}, layer {line['layer']}, head {line['head']}: {float(line[column]):.2f}"}
        for column, kind in KINDS.items()
        for line in lines
        if line[column]
    ]


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores)
