"""A W&B workspace with the charts of this harness: `python -m harness.tracking.workspace --entity NAME`.

Needs the package wandb-workspaces (`pip install wandb-workspaces`) and an account. Exit code 0: done; 2: a mistake the
message explains.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from harness.errors import UserError, exit_code

SECTIONS = {
    "Score, memory and time": [
        ("scatter", "memory/mean_resident_share", "longbench/average"),
        ("scatter", "speed/samples_per_s", "longbench/average"),
        ("bar", "longbench/average", None),
    ],
    "KV memory over time": [("line", "kv/t_s", "kv/blocks"), ("line", "kv/t_s", "kv/running")],
    "Speed and evictions": [
        ("bar", "speed/samples_per_s", None),
        ("bar", "eviction/num_evictions", None),
        ("bar", "eviction/num_preemptions", None),
        ("bar", "memory/peak_kv_bytes", None),
    ],
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.tracking.workspace", description="Save a W&B workspace with the charts of this harness."
    )
    parser.add_argument("--entity", required=True, help="account or team")
    parser.add_argument("--project", default="kv-eviction", help="(default: %(default)s)")
    return exit_code(_run, parser.parse_args(arguments))


def _run(options: argparse.Namespace) -> None:
    print(make_workspace(options.entity, options.project).save().url)


def make_workspace(entity: str, project: str) -> Any:  # noqa: ANN401
    """The workspace, not saved yet.

    Raises:
        UserError: wandb-workspaces is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as panels
        import wandb_workspaces.workspaces as workspaces
    except ImportError:
        raise UserError("the package wandb-workspaces is missing. Run: pip install wandb-workspaces") from None

    def panel(kind: str, x: str, y: str | None) -> Any:  # noqa: ANN401
        if kind == "scatter":
            return panels.ScatterPlot(title=f"{y} against {x}", x=f"summary:{x}", y=f"summary:{y}")
        return panels.LinePlot(title=y, x=x, y=[y]) if kind == "line" else panels.BarPlot(title=x, metrics=[x])

    sections = [
        workspaces.Section(name=name, panels=[panel(*one) for one in content], is_open=True)
        for name, content in SECTIONS.items()
    ]
    return workspaces.Workspace(entity=entity, project=project, name="KV-cache eviction", sections=sections)


if __name__ == "__main__":
    sys.exit(main())
