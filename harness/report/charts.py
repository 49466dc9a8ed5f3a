"""Charts as data: made once from the runs, drawn by matplotlib for paper and by the page's script for the screen."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["line", "steps", "reference"]


@dataclass(frozen=True)
class Point:
    """One value.

    Attributes:
        low, high: its interval, None without one.
        label: what else a reader wants to know of it.
    """

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    label: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one colour and shape.

    Attributes:
        name: equal names look equal in all charts of a report.
        kind: "line" with markers, "steps" without, "reference": the level of its only point, over all of the x axis.
    """

    name: str
    points: Sequence[Point]
    kind: Kind = "line"


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False


@dataclass(frozen=True)
class Chart:
    """One figure.

    Attributes:
        name: fit for a file name, unique in the report.
        caption: conditions, and what the bands mean.
    """

    name: str
    title: str
    caption: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Skipped:
    """A figure that cannot be made, and why."""

    name: str
    reason: str
