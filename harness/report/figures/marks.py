"""Declarations of one panel: points over budgets, points in the plane, bars, steps over time, heat maps.

Rows have `series`, `x`, `y`, and where known `low` and `high`; `kind` is "level" for a value without a budget, which is
drawn as a line across; `tip` is what pointing at a mark says.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import altair as alt

from harness.budget import is_share
from harness.report.figures.figure import Look
from harness.report.reading.runs import Budget, budget_text

BAR_STEP = 15
IMAGE_SIZE = (180, 110)


@dataclass(frozen=True)
class Axes:
    """Titles, None for none, and whether the values begin at zero, as ratio quantities do."""

    x_title: str | None
    y_title: str | None
    zero: bool


def point(
    panel: str, series: str, x: float | str | None, ends: tuple[float, float | None, float | None], tip: str
) -> dict[str, Any]:
    """A row: value, low and high end of its range (None: has none), over `x` (None: a level across)."""
    y, low, high = (None if end is None else float(f"{end:.5g}") for end in ends)
    place = {"kind": "level"} if x is None else {"kind": "point", "x": x}
    return {"panel": panel, "series": series, **place, "y": y, "low": low, "high": high, "tip": tip}


def with_budget(name: str, budget: Budget) -> str:
    """A series with a budget as a series of its own."""
    return name if budget is None else f"{name} @ {budget_text(budget)}"


def budget_unit(
    rows: Sequence[Mapping[str, Any]], looks: Mapping[str, Look], budgets: Iterable[Budget], axes: Axes
) -> dict[str, Any]:
    """Bars where there is one budget at most, else lines over budgets."""
    names = [row["series"] for row in rows]
    known = sorted({budget for budget in budgets if budget is not None})
    if len(known) < 2:
        return bars(names, looks, axes.y_title)
    unit = "share of the prompt" if is_share(known[-1]) else "tokens per layer and KV head"
    return over_budgets(names, looks, [budget_text(one) for one in known], replace(axes, x_title=f"Budget ({unit})"))


def over_budgets(names: Sequence[str], looks: Mapping[str, Look], budgets: Sequence[str], axes: Axes) -> dict[str, Any]:
    """Lines with marks over budgets, evenly spaced; series stand apart so that ranges do not cover each other."""
    x = alt.X(
        "x:O",
        scale=alt.Scale(type="band", domain=list(budgets), padding=0.15),
        title=axes.x_title,
        axis=alt.Axis(labelAngle=0),
    )
    apart = alt.XOffset("series:N", sort=list(dict.fromkeys(names)))
    return _layered(names, looks, {"x": x, "xOffset": apart}, axes)


def in_plane(names: Sequence[str], looks: Mapping[str, Look], axes: Axes) -> dict[str, Any]:
    """Lines with marks over a quantity."""
    x = alt.X("x:Q", title=axes.x_title, scale=alt.Scale(zero=True, nice=True))
    return _layered(names, looks, {"x": x}, axes)


def bars(names: Sequence[str], looks: Mapping[str, Look], title: str | None) -> dict[str, Any]:
    """One bar a series from zero on, with its range."""
    order = list(dict.fromkeys(names))
    rows = alt.Y("series:N", sort=order, title=None, axis=alt.Axis(labelLimit=260))
    base = alt.Chart().encode(y=rows)
    value = alt.X("y:Q", title=title, scale=alt.Scale(zero=True), axis=alt.Axis(tickCount=5))
    colour = alt.Color(
        "series:N", legend=None, scale=alt.Scale(domain=order, range=[looks[name].colour for name in order])
    )
    chart = alt.layer(
        base.mark_bar(opacity=0.85).encode(x=value, color=colour, tooltip="tip:N"),
        base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1.2).encode(x=alt.X("low:Q"), x2="high:Q"),
        _ring(base.encode(x=value)),
    )
    return _unit(chart) | {"height": {"step": BAR_STEP}}


def steps(names: Sequence[str], looks: Mapping[str, Look], x_title: str, y_title: str) -> dict[str, Any]:
    """Step lines over time."""
    base = alt.Chart().encode(
        x=alt.X("x:Q", title=x_title),
        y=alt.Y("y:Q", title=y_title),
        **_channels(names, looks, ("color", "strokeDash"), "stroke"),
    )
    lines = base.mark_line(interpolate="step-after", strokeWidth=1.4)
    touch = base.mark_point(opacity=0, size=30).encode(tooltip="tip:N")
    return _unit(alt.layer(lines, touch, _ring(base)))


def grid(
    x_title: str,
    y_title: str,
    colour: str,
    domain: tuple[float, float] | None = None,
    downwards: Literal["ascending", "descending"] = "descending",
) -> dict[str, Any]:
    """A heat map of columns `x` and rows `y` by `value`; rows ascend or descend from the top."""
    limits = alt.Scale(scheme="cividis", domain=domain or alt.Undefined)
    base = alt.Chart().encode(
        x=alt.X("x:O", title=x_title, axis=alt.Axis(labelAngle=0, labelOverlap=True)),
        y=alt.Y("y:O", title=y_title, sort=downwards, axis=alt.Axis(labelOverlap=True)),
    )
    cells = base.mark_rect().encode(color=_heat(colour, limits), tooltip="tip:N")
    return _unit(alt.layer(cells, _ring(base)))


def image(x_title: str, y_title: str, colour: str) -> dict[str, Any]:
    """A heat map that comes as a picture in `url`, with axes from 0 to `x_end` and to `y_end`."""
    width, height = IMAGE_SIZE
    frame = {
        "x": alt.X(
            "x_end:Q", title=x_title, scale=alt.Scale(nice=False, zero=True), axis=alt.Axis(grid=False, tickCount=5)
        ),
        "y": alt.Y(
            "y_end:Q", title=y_title, scale=alt.Scale(nice=False, zero=True), axis=alt.Axis(grid=False, tickCount=5)
        ),
    }
    picture = (
        alt.Chart()
        .mark_image(width=width, height=height, aspect=False)
        .encode(x=alt.value(width / 2), y=alt.value(height / 2), url="url:N", tooltip="tip:N")
    )
    limits = alt.Scale(scheme="cividis", domain=[0, 1])
    key = alt.Chart().mark_point(opacity=0).encode(**frame, color=_heat(colour, limits, "share"))
    return _unit(alt.layer(key, picture)) | {"width": width, "height": height}


def _heat(title: str, limits: alt.Scale, name: str = "value") -> alt.Color:
    return alt.Color(f"{name}:Q", scale=limits, legend=alt.Legend(title=title, gradientLength=160, titleLimit=0))


def _layered(
    names: Sequence[str], looks: Mapping[str, Look], position: Mapping[str, Any], axes: Axes
) -> dict[str, Any]:
    y = alt.Y("y:Q", title=axes.y_title, scale=alt.Scale(zero=axes.zero))
    base = alt.Chart().encode(**_channels(names, looks, ("color",)))
    points = base.transform_filter("datum.kind !== 'level'")
    levels = base.transform_filter("datum.kind === 'level'")
    placed = points.encode(**position, y=y)
    dashed = _channels(names, looks, ("strokeDash",))
    edges = levels.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=0.7, opacity=0.6, strokeDash=[1, 3])
    chart = alt.layer(
        edges.encode(y=alt.Y("low:Q")),
        edges.encode(y=alt.Y("high:Q")),
        levels.mark_rule(strokeWidth=1.5).encode(y=y, tooltip="tip:N", **dashed),
        points.transform_filter("isValid(datum.low)")
        .mark_rule(opacity=0.55)
        .encode(**position, y=alt.Y("low:Q"), y2="high:Q"),
        placed.mark_line(strokeWidth=1.3, opacity=0.8).encode(**dashed),
        placed.mark_point(size=45, strokeWidth=1.6, filled=False).encode(
            tooltip="tip:N", **_channels(names, looks, ("shape",))
        ),
        _ring(placed),
    )
    return _unit(chart)


def _ring(placed: alt.Chart) -> alt.Chart:
    """Around the mark that the keyboard has come to."""
    ring = placed.transform_filter("datum.id === at").mark_point(size=260, strokeWidth=2, shape="circle", filled=False)
    return ring.encode(color=alt.value("#cc3311"), strokeDash=alt.value([1, 0]), shape=alt.value("circle"))


def _channels(
    names: Sequence[str], looks: Mapping[str, Look], wanted: Sequence[str], symbol: str | None = None
) -> dict[str, Any]:
    """Channels that give every series its look, with one legend for all of them."""
    domain = list(dict.fromkeys(names))
    legend = alt.Legend(symbolOpacity=1, **({"symbolType": symbol} if symbol else {}))
    kinds = {"color": (alt.Color, "colour"), "shape": (alt.Shape, "shape"), "strokeDash": (alt.StrokeDash, "dash")}
    channels = {}
    for name in wanted:
        channel, field = kinds[name]
        scale = alt.Scale(domain=domain, range=[getattr(looks[one], field) for one in domain])
        channels[name] = channel("series:N", legend=legend, scale=scale)
    return channels


def _unit(chart: alt.LayerChart) -> dict[str, Any]:
    """The declaration alone: without data, style and the name of the schema."""
    found = chart.to_dict()
    layers = [{key: value for key, value in layer.items() if key != "data"} for layer in found.pop("layer")]
    return {key: value for key, value in found.items() if key not in ("$schema", "config", "data")} | {"layer": layers}
