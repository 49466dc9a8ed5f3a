"""Figures of what was kept: a map of the prompt by layer, and how many tokens of it in every layer and head."""

import base64
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from harness.report.figures.figure import Figure, Skipped
from harness.report.figures.marks import IMAGE_SIZE, grid, image
from harness.report.reading.retention import NUM_BINS, PHASE_TITLES, Maps, RetentionMap, mean_shares, read_maps
from harness.report.reading.runs import Group, Run
from harness.report.tables.conditions import setting
from harness.retention import Phase

NAME = "retention"
AVERAGED = (
    "Each cell is a mean over samples, over the KV heads of the layer and over the positions of that stretch of the "
    "prompt: a head keeps a position or does not, so 0.25 may be one head of four everywhere or all of them in a "
    "quarter of the samples. Prompts are stretched to one length; the answer is left out."
)
HEADS = (
    "Tokens of a prompt that each layer and KV head kept, mean over prompts, of the policies that keep unequally many."
)
# Cividis in nine steps, for the pictures; the key is Vega's own scheme of that name.
CIVIDIS = ("00224e", "123570", "3b496c", "575d6d", "707173", "8a8678", "a59c74", "c3b369", "fee838")
SCALE = 2

Recorded = Sequence[tuple[Run, Maps]]


def retention_figures(group: Group) -> list[Figure | Skipped]:
    """A map a phase, panels side by side."""
    recorded = [(run, maps) for run in group.runs if (maps := read_maps(run))]
    if not recorded:
        return [Skipped(f"{NAME}-{group.name}", "no run recorded retained positions")]
    return [figure for phase in PHASE_TITLES if (figure := _map_figure(group, recorded, phase)) is not None]


def png(shares: np.ndarray) -> str:
    """A picture of [rows, columns] from 0 to 1 as a data address, row 0 at the bottom, every cell sharp."""
    stops = np.array([list(bytes.fromhex(colour)) for colour in CIVIDIS], dtype=float)
    places = np.linspace(0, 1, len(stops))
    pixels = np.stack([np.interp(shares[::-1], places, stops[:, channel]) for channel in range(3)], axis=-1)
    size = [
        max(1, round(SCALE * wanted / cells)) * cells
        for wanted, cells in zip(IMAGE_SIZE, shares.shape[::-1], strict=True)
    ]
    content = io.BytesIO()
    Image.fromarray(pixels.round().astype(np.uint8)).resize(size, Image.Resampling.NEAREST).save(content, "PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def _map_figure(group: Group, recorded: Recorded, phase: Phase) -> Figure | None:
    rows = []
    for run, found in _of_phase(recorded, phase):
        shares = mean_shares(found, NUM_BINS)
        title = f"{run.label}, {len(found)} samples"
        tip = f"{title}: {100 * float(shares.mean()):.0f} % of the prompt kept, mean over layers"
        rows.append({"panel": title, "url": png(shares), "x_end": 100, "y_end": len(shares), "share": 0, "tip": tip})
    if not rows:
        return None
    return Figure(
        name=f"{NAME}-{phase}-{group.name}",
        title=f"What each layer kept {PHASE_TITLES[phase]}, {group.title}",
        caption=f"{setting(group)} {AVERAGED}",
        unit=image("Position in the prompt (% of it)", "Layer", "Share kept"),
        rows=rows,
        panels=[row["panel"] for row in rows],
        shared=("x", "y"),
        group=group.name,
    )


def heads_figure(group: Group) -> Figure | Skipped:
    """Of runs whose layers and heads keep unequally many tokens."""
    name = f"kept-by-head-{group.name}"
    rows = [
        {"panel": run.label, "x": head, "y": layer, "value": mean}
        | {"tip": f"{run.label}, layer {layer}, head {head}: {mean:.0f} tokens, {least:.0f} to {most:.0f}"}
        for run in group.runs
        if (kept := run.metrics["kept_by_head"])
        for layer, heads in enumerate(zip(kept["mean"], kept["least"], kept["most"], strict=True))
        for head, (mean, least, most) in enumerate(zip(*heads, strict=True))
    ]
    if not rows:
        return Skipped(name, "in no run layers and heads keep unequally many tokens")
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    title, caption = f"Tokens kept by layer and head, {group.title}", f"{setting(group)} {HEADS}"
    unit = grid("KV head", "Layer", "Tokens")
    return Figure(name, title, caption, unit, rows, panels, ("x", "y"), group=group.name)


def _of_phase(recorded: Recorded, phase: Phase) -> list[tuple[Run, list[RetentionMap]]]:
    found = [(run, [one for (_, recorded_at), one in maps.items() if recorded_at == phase]) for run, maps in recorded]
    return [(run, maps) for run, maps in found if maps]
