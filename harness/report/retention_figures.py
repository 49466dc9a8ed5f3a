"""Retention maps drawn for print: which positions each layer kept, policies side by side."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from harness.benchmarks.tasks import TASKS
from harness.report.charts import Skipped
from harness.report.drawing import STYLE
from harness.report.retention import PHASE_TITLES, RetentionMap, mean_shares, read_maps
from harness.report.runs import Group, Run
from harness.retention import Phase

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "retention"
NUM_BINS = 256
MAX_SAMPLES = 3
MAX_COLUMNS = 4
PANEL_INCHES = (3.0, 2.2)
COLOUR_MAP = "cividis"
PHASES: tuple[Phase, ...] = ("prefill_end", "end")

Maps = Mapping[tuple[str, Phase], RetentionMap]


@dataclass(frozen=True)
class MapPanel:
    """One heat map: `shares` [layers, bins] over positions from 0 to `x_end`, the prompt ending at `prompt_end`."""

    title: str
    shares: np.ndarray
    x_label: str
    x_end: float
    prompt_end: float | None


def retention_figures(group: Group) -> list[tuple[str, Figure] | Skipped]:
    """The mean over samples, and a few samples: those most runs recorded, in LongBench's order."""
    recorded = [(run, maps) for run in group.runs if (maps := read_maps(run, NUM_BINS))]
    if not recorded:
        return [Skipped(f"{NAME}-{group.name}", "no run recorded retained positions")]
    figures: list[tuple[str, Figure] | Skipped] = []
    for phase in PHASES:
        panels = [_mean_panel(run, maps, phase) for run, maps in recorded]
        found = [panel for panel in panels if panel is not None]
        if found:
            title = f"Kept by each layer {PHASE_TITLES[phase]}, mean over samples: {group.title}"
            figures.append((f"{NAME}-mean-{phase}-{group.name}", draw_maps(title, found)))
    for sample_id in _chosen([maps for _, maps in recorded]):
        panels = [
            _sample_panel(run, maps[sample_id, phase], phase)
            for run, maps in recorded
            for phase in PHASES
            if (sample_id, phase) in maps
        ]
        name = f"{NAME}-{sample_id.replace('/', '-')}-{group.name}"
        figures.append((name, draw_maps(f"Kept by each layer: {sample_id}, {group.title}", panels)))
    return figures


def draw_maps(title: str, panels: Sequence[MapPanel]) -> Figure:
    """Heat maps row by row with one scale: dark nothing kept, bright everything."""
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        columns = min(len(panels), MAX_COLUMNS)
        rows = -(-len(panels) // columns)
        figure = Figure(figsize=(PANEL_INCHES[0] * columns + 0.6, PANEL_INCHES[1] * rows + 0.4))
        FigureCanvasAgg(figure)
        image = None
        for number, panel in enumerate(panels):
            axes = figure.add_subplot(rows, columns, number + 1)
            axes.set_gid(f"map-{number}")
            image = _draw_map(axes, panel)
        figure.colorbar(image, ax=figure.axes, label="Share of KV heads that kept it")
        figure.suptitle(title)
        return figure


def _draw_map(axes: "Axes", panel: MapPanel) -> object:
    image = axes.imshow(
        panel.shares,
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        cmap=COLOUR_MAP,
        vmin=0,
        vmax=1,
        extent=(0, panel.x_end, -0.5, len(panel.shares) - 0.5),
    )
    if panel.prompt_end is not None and panel.prompt_end < panel.x_end:
        axes.axvline(panel.prompt_end, color="white", linestyle=":", linewidth=1)
    axes.set_title(panel.title, wrap=True)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel("Layer")
    return image


def _mean_panel(run: Run, maps: Maps, phase: Phase) -> MapPanel | None:
    of_phase = [one for (_, recorded), one in maps.items() if recorded == phase]
    if not of_phase:
        return None
    shares = mean_shares(of_phase, NUM_BINS)
    return MapPanel(f"{run.label}, {len(of_phase)} samples", shares, "Position in the prompt (% of it)", 100, None)


def _sample_panel(run: Run, one: RetentionMap, phase: Phase) -> MapPanel:
    title = f"{run.label}, {PHASE_TITLES[phase]}"
    return MapPanel(title, one.shares, "Position (tokens)", one.num_tokens, one.num_prompt_tokens)


def _chosen(recorded: Sequence[Maps]) -> list[str]:
    """One sample a task, the first of those that most runs recorded, tasks in LongBench's order."""
    counts = Counter(sample_id for maps in recorded for sample_id in {sample_id for sample_id, _ in maps})
    best: dict[str, str] = {}
    for sample_id in sorted(counts, key=lambda name: (-counts[name], name)):
        best.setdefault(sample_id.split("/")[0], sample_id)
    return [best[task] for task in TASKS if task in best][:MAX_SAMPLES]
