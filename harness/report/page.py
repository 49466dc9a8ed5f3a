"""The report as one HTML file that needs no network: tables, charts and samples, with its style and script inside."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from harness.report.charts import Chart, Skipped
from harness.report.conditions import setting, warnings
from harness.report.figures import chart_styles
from harness.report.grid import Table
from harness.report.html_tables import html_table
from harness.report.page_data import SamplePackets, chart_data, plain_json
from harness.report.runs import Group, Run

ASSETS = "harness.report"
SCRIPTS = ("core.js", "tables.js", "axes.js", "charts.js", "samples.js")


@dataclass(frozen=True)
class GroupTables:
    """The tables of one group, in the order in which they are shown."""

    accuracy: Table
    differences: Sequence[Table]
    memory: Table
    speed: Table


def render_page(
    runs: Sequence[Run],
    groups: Sequence[Group],
    tables: Mapping[str, GroupTables],
    shared: Sequence[Table],
    charts: Sequence[Chart | Skipped],
    samples_per_task: int,
) -> str:
    """The whole page.

    Args:
        tables: by group name.
        shared: tables that belong to no single group: load tests, the paper's numbers, the runs.
        samples_per_task: how many single samples of each task can be looked at.
    """
    packets = {group.name: SamplePackets(group, samples_per_task) for group in groups}
    index = {name: one.index() for name, one in packets.items()}
    return Template(_asset("page.html")).substitute(
        style=_asset("page.css"),
        script="\n".join(_asset(name) for name in SCRIPTS),
        summary=_summary(runs, groups),
        groups="".join(f'<option value="{escape(g.name)}">{escape(_option(g))}</option>' for g in groups),
        sections="".join(_group_section(group, tables[group.name]) for group in groups),
        shared="".join(html_table(table) for table in shared),
        skipped=_skipped(charts),
        charts=plain_json(
            chart_data(charts, chart_styles(charts), [text for group in groups for text in _said(group)])
        ),
        samples=plain_json(index),
        packets="".join(
            f'<script type="application/json" data-packet="{escape(f"{name}/{task}")}">"{text}"</script>\n'
            for name, one in packets.items()
            for task, text in one.packets().items()
        ),
    )


def _asset(name: str) -> str:
    return (files(ASSETS) / "assets" / name).read_text(encoding="utf-8")


def _option(group: Group) -> str:
    limit = group.runs[0].manifest.config["benchmark"]["limit"]
    return group.title if limit is None else f"{group.title}, limit {limit}"


def _said(group: Group) -> list[str]:
    return [setting(group), *warnings(group)]


def _group_section(group: Group, tables: GroupTables) -> str:
    said = _said(group)
    notes = "".join(f"<li>{escape(warning)}</li>" for warning in warnings(group))
    parts = {
        "about": [f"<p>{escape(setting(group))}</p>", f'<ul class="warning">{notes}</ul>' if notes else ""],
        "accuracy": [html_table(tables.accuracy, said, with_tints=True)],
        "differences": [html_table(table, said) for table in tables.differences],
        "memory": [html_table(tables.memory, said)],
        "speed": [html_table(tables.speed, said)],
    }
    return "".join(
        f'<div data-group="{escape(group.name)}" data-part="{part}">{"".join(content)}</div>'
        for part, content in parts.items()
    )


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


def _skipped(charts: Sequence[Chart | Skipped]) -> str:
    missing = [chart for chart in charts if isinstance(chart, Skipped)]
    return "".join(f"<li><code>{escape(one.name)}</code>: {escape(one.reason)}</li>" for one in missing)
