"""The report as one HTML file that needs no network: answer, tables, figures, samples, with style and script inside."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from harness.report.figures.figure import COLOURS, CONFIG, FULL_COLOURS, Figure, Skipped
from harness.report.page.html_tables import html_table, without
from harness.report.page.packing import packed, plain_json
from harness.report.page.samples import SamplePackets
from harness.report.reading.runs import Group, Run
from harness.report.tables.answer import sentences
from harness.report.tables.conditions import setting, warnings
from harness.report.tables.grid import Table
from harness.report.tables.group import GroupTables

ASSETS = "harness.report.page"
SCRIPTS = ("core.js", "tables.js", "figures.js", "samples.js")
# Vega's own addresses, of its schema and its editor, which the page never asks for; a reader would take them for links.
FOREIGN = ("https://vega.github.io/schema/vega/v6.json", "https://vega.github.io/editor/")


def render_page(
    runs: Sequence[Run],
    groups: Sequence[Group],
    tables: Mapping[str, GroupTables],
    shared: Sequence[Table],
    figures: Sequence[Figure | Skipped],
    samples_per_task: int,
) -> str:
    """The whole page.

    Args:
        tables: by group name.
        shared: tables that belong to no single group: load tests, published numbers, the runs.
        samples_per_task: how many single samples of each task can be looked at.
    """
    samples = {group.name: SamplePackets(group, samples_per_task) for group in groups}
    drawn = [figure for figure in figures if isinstance(figure, Figure)]
    said = {group.name: _said(group) for group in groups}
    packets = [(f"{name}/{task}", text) for name, one in samples.items() for task, text in one.packets().items()]
    packets += [(f"figure/{figure.name}", packed(_figure_data(figure))) for figure in drawn]
    return Template(_asset("page.html")).substitute(
        style=_asset("page.css"),
        runtime=_runtime() if drawn else "",
        script="\n".join(_asset(name) for name in SCRIPTS),
        summary=_summary(runs, groups),
        groups="".join(f'<option value="{escape(g.name)}">{escape(_option(g))}</option>' for g in groups),
        sections="".join(_group_section(group, tables[group.name]) for group in groups),
        shared="".join(html_table(table) for table in shared),
        skipped=_skipped(figures),
        figures=plain_json([_index(figure, said.get(figure.group, [])) for figure in drawn]),
        looks=plain_json({"config": CONFIG, "dark": COLOURS | FULL_COLOURS}),
        samples=plain_json({name: one.index() for name, one in samples.items()}),
        packets="".join(
            f'<script type="application/json" data-packet="{escape(name)}">"{text}"</script>\n'
            for name, text in packets
        ),
    )


@cache
def _runtime() -> str:
    """Vega, Vega-Lite and vega-embed as one script."""
    import vl_convert

    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    for address in FOREIGN:
        script = script.replace(address, "")
    return script.replace("</script", "<\\/script")


def _asset(name: str) -> str:
    return (files(ASSETS) / "assets" / name).read_text(encoding="utf-8")


def _index(figure: Figure, said: Sequence[str]) -> dict[str, Any]:
    """What the page must know of a figure before it is drawn."""
    caption = without(figure.caption, said)
    return {"name": figure.name, "title": figure.title, "caption": caption, "group": figure.group}


def _figure_data(figure: Figure) -> dict[str, Any]:
    keys = list(dict.fromkeys(key for row in figure.rows for key in row))
    rows = [[row.get(key) for key in keys] for row in figure.rows]
    return {"unit": figure.unit, "panels": figure.panels, "shared": figure.common, "keys": keys, "rows": rows}


def _option(group: Group) -> str:
    limit = group.runs[0].manifest.config["benchmark"]["limit"]
    return group.title if limit is None else f"{group.title}, limit {limit}"


def _said(group: Group) -> list[str]:
    return [setting(group), *warnings(group)]


def _group_section(group: Group, tables: GroupTables) -> str:
    said = _said(group)
    notes = "".join(f"<li>{escape(warning)}</li>" for warning in warnings(group))
    lines = "".join(f"<li><b>{escape(name)}</b> {escape(text)}</li>" for name, text in sentences(tables.answers))
    parts = {
        "sentences": [f'<ul class="verdicts">{lines}</ul>'],
        "about": [f"<p>{escape(setting(group))}</p>", f'<ul class="warning">{notes}</ul>' if notes else ""],
        "answer": _tables([tables.answer], said),
        "accuracy": [html_table(table, said, with_tints=table is tables.scores[0]) for table in tables.scores],
        "differences": _tables(tables.differences, said),
        "costs": _tables(tables.costs, said),
    }
    return "".join(
        f'<div data-group="{escape(group.name)}" data-part="{part}">{"".join(content)}</div>'
        for part, content in parts.items()
    )


def _tables(tables: Iterable[Table], said: Sequence[str]) -> list[str]:
    return [html_table(table, said) for table in tables]


def _summary(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    statuses = [run.manifest.status for run in runs]
    facts: dict[str, Any] = {
        "runs": len(runs),
        "not finished": sum(status != "finished" for status in statuses),
        "models": len({run.model for run in runs}),
        "policies": len({run.policy for run in runs}),
        "budgets": len({run.budget for run in runs if run.budget is not None}),
        "scored samples": f"{sum(len(run.predictions) for group in groups for run in group.runs):,}",
    }
    return "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())


def _skipped(figures: Sequence[Figure | Skipped]) -> str:
    missing = [figure for figure in figures if isinstance(figure, Skipped)]
    return "".join(f"<li><code>{escape(one.name)}</code>: {escape(one.reason)}</li>" for one in missing)
