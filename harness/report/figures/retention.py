"""Figures of what was kept: a map of the prompt by layer, and the tokens of every layer and head."""

import base64
import zlib
from collections.abc import Sequence

import numpy as np

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
    "Tokens a layer and KV head still held, mean over samples. Policies that keep the same number in every head are "
    "left out, unless no policy differs."
)
# Cividis in nine steps, for the pictures; the key is Vega's own scheme of that name.
CIVIDIS = ("00224e", "123570", "3b496c", "575d6d", "707173", "8a8678", "a59c74", "c3b369", "fee838")
SCALE = 2

Recorded = Sequence[tuple[Run, Maps]]


def retention_figures(group: Group) -> list[Figure | Skipped]:
    """A map a phase, panels side by side, and the split over layers and heads."""
    recorded = [(run, maps) for run in group.runs if (maps := read_maps(run))]
    if not recorded:
        return [Skipped(f"{NAME}-{group.name}", "no run recorded retained positions")]
    figures = [figure for phase in PHASE_TITLES if (figure := _map_figure(group, recorded, phase)) is not None]
    return [*figures, _heads_figure(group, recorded)]


def png(shares: np.ndarray) -> str:
    """A picture of [rows, columns] from 0 to 1 as a data address, row 0 at the bottom, every cell sharp."""
    stops = np.array([[int(colour[at : at + 2], 16) for at in (0, 2, 4)] for colour in CIVIDIS], dtype=float)
    places = np.linspace(0, 1, len(stops))
    pixels = np.stack([np.interp(shares[::-1], places, stops[:, channel]) for channel in range(3)], axis=-1)
    down, across = (
        max(1, round(SCALE * size / cells)) for size, cells in zip(IMAGE_SIZE[::-1], shares.shape, strict=True)
    )
    pixels = pixels.round().astype(np.uint8).repeat(down, axis=0).repeat(across, axis=1)
    height, width, _ = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, 3 * width)], axis=1)
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes((8, 2, 0, 0, 0))
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    content = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def _chunk(kind: bytes, content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")


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


def _heads_figure(group: Group, recorded: Recorded) -> Figure | Skipped:
    means = {
        run.label: np.mean([one.counts for one in found], axis=0)
        for run, found in _of_phase(recorded, "prefill_end") or _of_phase(recorded, "end")
        if len({one.counts.shape for one in found}) == 1
    }
    uneven = {label: counts for label, counts in means.items() if counts.min() < counts.max()}
    rows = [
        {"panel": label, "x": head, "y": layer, "value": round(float(counts[layer, head]), 1)}
        | {"tip": f"{label}, layer {layer}, head {head}: {counts[layer, head]:.0f} tokens"}
        for label, counts in (uneven or means).items()
        for layer, head in np.ndindex(*counts.shape)
    ]
    name = f"{NAME}-heads-{group.name}"
    if not rows:
        return Skipped(name, "no run recorded retained positions of all heads")
    return Figure(
        name=name,
        title=f"Tokens kept by layer and head, {group.title}",
        caption=f"{setting(group)} {HEADS}",
        unit=grid("KV head", "Layer", "Tokens"),
        rows=rows,
        panels=list(uneven or means),
        group=group.name,
    )


def _of_phase(recorded: Recorded, phase: Phase) -> list[tuple[Run, list[RetentionMap]]]:
    found = [(run, [one for (_, recorded_at), one in maps.items() if recorded_at == phase]) for run, maps in recorded]
    return [(run, maps) for run, maps in found if maps]
