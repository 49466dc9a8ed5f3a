"""A figure is one declaration in Vega-Lite: the same for SVG, PNG and PDF, for the page and for W&B.

A declaration draws one panel; a figure of several panels repeats it side by side on paper. On the page the panels are
arranged by the width of the screen, and one of them can be chosen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FULL_CACHE = "full"
# Okabe and Ito's colours, told apart with any colour vision, without yellow; beside each its twin for a dark page.
COLOURS = {
    "#0072b2": "#58aee6",
    "#d55e00": "#f58b4c",
    "#009e73": "#3fcf9f",
    "#b3558c": "#e2a3c6",
    "#56b4e9": "#a6dcff",
    "#b87a00": "#efbd4f",
    "#882255": "#d67fae",
    "#666666": "#b5b5b5",
}
FULL_COLOURS = {"#111111": "#f4f4f4"}
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right", "triangle-left")
DASHES = ((1, 0), (6, 3), (2, 2), (8, 3, 2, 3), (12, 4))
PANEL_SIZE, LONE_SIZE = (190, 150), (420, 260)
PANELS_A_ROW = 4
PNG_SCALE = 2.0
WIDE_NAME, WIDEST_NAME = 20, 45
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
FORMATS = ("svg", "png", "pdf")
CONFIG: dict[str, Any] = {
    "background": "white",
    "font": "sans-serif",
    "view": {"stroke": None},
    "axis": {"gridColor": "#dddddd", "titleFontWeight": "normal", "labelLimit": 400},
    "legend": {"orient": "bottom", "title": None, "labelLimit": 0},
    "title": {"fontSize": 11, "fontWeight": "normal"},
    "header": {"title": None, "labelFontSize": 11, "labelLimit": 0},
}


@dataclass(frozen=True)
class Look:
    """Of one series: colour and shape together, and colour and dash together, belong to it alone."""

    colour: str
    shape: str
    dash: tuple[int, ...]


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: fit for a file name, unique in the report.
        caption: conditions, and what the bars mean.
        unit: the declaration of one panel, without data.
        rows: its data; `series` and `panel` are the names of what a row belongs to, `tip` says all of it.
        panels: titles, in order.
        shared: axes that all panels have in common.
        group: name of the group it belongs to, "" for all.
    """

    name: str
    title: str
    caption: str
    unit: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]] = field(repr=False)
    panels: Sequence[str] = ("",)
    shared: Sequence[str] = ()
    group: str = ""
    size: tuple[int, int] | None = None

    @property
    def common(self) -> tuple[str, ...]:
        """The shared axes; bars of several panels stand in the same rows."""
        return (*self.shared, "y") if "height" in self.unit and "width" not in self.unit else tuple(self.shared)


@dataclass(frozen=True)
class Skipped:
    """A figure that cannot be made, and why."""

    name: str
    reason: str


def make_looks(names: Sequence[str]) -> dict[str, Look]:
    """A look a name: neighbours differ in colour and shape; up to 40 share neither pair; the full cache is black."""
    looks: dict[str, Look] = {}
    colours = list(COLOURS)
    number = 0
    for name in dict.fromkeys(names):
        if name.split(" ")[0] == FULL_CACHE:
            looks[name] = Look(*FULL_COLOURS, "stroke", (4, 2))
            continue
        turn = number // len(colours)
        shape = SHAPES[(number + turn) % len(SHAPES)]
        looks[name] = Look(colours[number % len(colours)], shape, DASHES[turn % len(DASHES)])
        number += 1
    return looks


def declaration(figure: Figure) -> dict[str, Any]:
    """The whole figure as Vega-Lite, its data inside, panels side by side."""
    several = len(figure.panels) > 1
    width, height = figure.size or (PANEL_SIZE if several else LONE_SIZE)
    unit = {"width": width, "height": height, **figure.unit}
    whole: dict[str, Any] = {"$schema": SCHEMA, "config": CONFIG | {"legend": _legend(figure)}}
    whole |= {"data": {"values": list(figure.rows)}, "params": [{"name": "at", "value": -1}]}
    if not several:
        return whole | unit | ({"title": figure.panels[0]} if figure.panels[0] else {})
    facet = {"field": "panel", "type": "nominal", "sort": list(figure.panels), "title": None}
    scale = {axis: "shared" if axis in figure.common else "independent" for axis in ("x", "y", "xOffset")}
    columns = min(len(figure.panels), PANELS_A_ROW)
    return whole | {"facet": facet, "columns": columns, "spec": unit, "resolve": {"scale": scale}}


def _legend(figure: Figure) -> dict[str, Any]:
    """As many names beside each other as fit on paper."""
    longest = max((len(str(row.get("series", ""))) for row in figure.rows), default=0)
    return CONFIG["legend"] | {"columns": 4 if longest < WIDE_NAME else 2 if longest < WIDEST_NAME else 1}


def save(figure: Figure, folder: Path) -> None:
    """Write `<name>.svg`, `.png` and `.pdf`, laid out once, and the declaration itself as `<name>.vl.json`."""
    import json

    import vl_convert

    whole = declaration(figure)
    svg = vl_convert.vegalite_to_svg(whole)
    (folder / f"{figure.name}.svg").write_text(svg, encoding="utf-8")
    (folder / f"{figure.name}.png").write_bytes(vl_convert.svg_to_png(svg, scale=PNG_SCALE))
    (folder / f"{figure.name}.pdf").write_bytes(vl_convert.svg_to_pdf(svg))
    (folder / f"{figure.name}.vl.json").write_text(json.dumps(whole, ensure_ascii=False), encoding="utf-8")
