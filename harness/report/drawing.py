"""Charts drawn by matplotlib: PDF and SVG for print, PNG to look at."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness.report.charts import Chart, Panel, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

# Okabe and Ito's colours, told apart with any colour vision; yellow is left out, it vanishes on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#882255", "#666666")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINE_STYLES = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (4, 1.2, 1, 1.2)))
FULL_STYLE = {"color": "black", "linestyle": (0, (6, 2)), "marker": "h"}
FULL_CACHE = "full"
MAX_PANEL_COLUMNS = 4
PANEL_INCHES = (2.9, 2.3)
LONE_PANEL_INCHES = (5.2, 3.4)
BAND_OPACITY = 0.15
CLEAR_BANDS = 6  # more of them are drawn fainter
CHARACTER_INCHES = 0.066  # mean width at the size of titles and legends
LEGEND_KEY_INCHES = 0.55
LEGEND_ROW_INCHES = 0.17
MAX_LEGEND_COLUMNS = 4
TITLE_SHARE = 0.85  # of a panel's width; the rest is beside its axes
PNG_DPI = 160
FORMATS = ("pdf", "svg", "png")
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.5,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "harness",
    "figure.constrained_layout.use": True,
}


def make_styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A look for every series: colour, marker and line style all differ between neighbours; the full cache is black."""
    styles = {}
    for index, name in enumerate(dict.fromkeys(names)):
        styles[name] = (
            FULL_STYLE
            if _is_full(name)
            else {
                "color": COLOURS[index % len(COLOURS)],
                "marker": MARKERS[index % len(MARKERS)],
                "linestyle": LINE_STYLES[(index + index // len(COLOURS)) % len(LINE_STYLES)],
            }
        )
    return styles


def draw(chart: Chart, styles: dict[str, dict[str, Any]]) -> Figure:
    """The chart as a figure: panels row by row, one legend for all."""
    with matplotlib.rc_context(STYLE):
        columns = _num_columns(len(chart.panels))
        rows = -(-len(chart.panels) // columns)
        width, height = LONE_PANEL_INCHES if len(chart.panels) == 1 else PANEL_INCHES
        names = list(dict.fromkeys(series.name for panel in chart.panels for series in panel.series))
        legend_columns = _num_legend_columns(names, width * columns)
        legend_height = (1 - -len(names) // legend_columns) * LEGEND_ROW_INCHES
        figure = Figure(figsize=(width * columns, height * rows + legend_height))
        FigureCanvasAgg(figure)
        handles: dict[str, Any] = {}
        for number, panel in enumerate(chart.panels):
            axes = figure.add_subplot(rows, columns, number + 1)
            axes.set_gid(f"panel-{number}")
            _draw_panel(axes, panel, number, styles, handles)
            axes.set_title(fill(panel.title, int(TITLE_SHARE * width / CHARACTER_INCHES)))
        _share_labels(figure)
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=legend_columns)
        return figure


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `<name>.pdf`, `.svg` and `.png`; the same figure gives the same bytes."""
    paths = [folder / f"{name}.{kind}" for kind in FORMATS]
    with matplotlib.rc_context(STYLE):
        for path, metadata in zip(paths, ({"CreationDate": None}, {"Date": None}, {}), strict=True):
            figure.savefig(path, dpi=PNG_DPI, metadata=metadata)
    return paths


def _num_columns(num_panels: int) -> int:
    """Panels a row: as many as fit, or one less where that leaves fewer places empty."""
    if num_panels <= MAX_PANEL_COLUMNS:
        return num_panels
    return min((MAX_PANEL_COLUMNS, MAX_PANEL_COLUMNS - 1), key=lambda columns: -num_panels % columns)


def _num_legend_columns(names: Sequence[str], inches: float) -> int:
    """As many as fit beside each other; names fill one column after the other, each as wide as its longest."""
    for columns in range(min(len(names), MAX_LEGEND_COLUMNS), 1, -1):
        rows = -(-len(names) // columns)
        longest = [max(map(len, names[first : first + rows])) for first in range(0, len(names), rows)]
        if sum(length * CHARACTER_INCHES + LEGEND_KEY_INCHES for length in longest) <= inches:
            return columns
    return 1


def _share_labels(figure: Figure) -> None:
    """Write a label that all panels have once, for the whole figure."""
    if len(figure.axes) < 2:
        return
    if len(labels := {axes.get_xlabel() for axes in figure.axes}) == 1:
        figure.supxlabel(labels.pop())
        for axes in figure.axes:
            axes.set_xlabel("")
    if len(labels := {axes.get_ylabel() for axes in figure.axes}) == 1:
        figure.supylabel(labels.pop())
        for axes in figure.axes:
            axes.set_ylabel("")


def _is_full(name: str) -> bool:
    return name.split(" ")[0] == FULL_CACHE


def _draw_panel(
    axes: "Axes", panel: Panel, number: int, styles: dict[str, dict[str, Any]], handles: dict[str, Any]
) -> None:
    for index, series in enumerate(panel.series):
        opacity = BAND_OPACITY * min(1, CLEAR_BANDS / len(panel.series))
        artist = _draw_series(axes, series, styles[series.name], opacity)
        artist.set_gid(f"series-{number}-{index}")
        handles.setdefault(series.name, artist)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    ticks = sorted({point.x for series in panel.series if series.kind != "reference" for point in series.points})
    if panel.log_x and ticks:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _draw_series(axes: "Axes", series: Series, style: dict[str, Any], opacity: float) -> "Line2D":
    points = series.points
    if series.kind == "reference":
        level = points[0]
        if level.low is not None and level.high is not None:
            axes.axhspan(level.low, level.high, color=style["color"], alpha=BAND_OPACITY / 2, linewidth=0)
        return axes.axhline(level.y, color=style["color"], linestyle=style["linestyle"])
    x, y = [point.x for point in points], [point.y for point in points]
    if series.kind == "steps":
        return axes.step(x, y, where="post", color=style["color"], linestyle=style["linestyle"], linewidth=1)[0]
    bounded = [point for point in points if point.low is not None and point.high is not None]
    if len(bounded) == 1:
        reach = [[bounded[0].y - bounded[0].low], [bounded[0].high - bounded[0].y]]
        axes.errorbar([bounded[0].x], [bounded[0].y], yerr=reach, fmt="none", ecolor=style["color"], capsize=2)
    elif bounded:
        edges = [point.x for point in bounded]
        low, high = [point.low for point in bounded], [point.high for point in bounded]
        axes.fill_between(edges, low, high, color=style["color"], alpha=opacity, linewidth=0)
    return axes.plot(x, y, **style, markerfacecolor="white", markeredgewidth=1.2)[0]
