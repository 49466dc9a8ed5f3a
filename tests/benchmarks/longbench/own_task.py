"""The own task of README.md's section "A task", read from there and installed as another package's."""

import functools
import json
import re
from pathlib import Path

from harness.benchmarks import tasks

README = Path(__file__).resolve().parents[3] / "README.md"
NAME = "riddles"


def section() -> str:
    """The section "A task" of the README."""
    return re.search(r"\n## A task\n(.*?)\n## ", README.read_text(encoding="utf-8"), re.DOTALL)[1]


def example(language: str) -> str:
    """The one block of a language in the section."""
    (block,) = re.findall(rf"```{language}\n(.*?)```", section(), re.DOTALL)
    return block


def row(**changes) -> dict:
    """The row of the example."""
    return json.loads(example("json")) | changes


def install(folder: Path, source: str | None = None, point: str | None = None, name: str = NAME) -> None:
    """Leave the example, or another module and entry point, in `folder` as pip would."""
    group = re.search(r'entry-points\."(.*?)"', example("toml"))[1]
    point = point or re.search(r'^(\w+) = "(.*?)"', example("toml"), re.MULTILINE).expand(r"\1 = \2")
    (folder / f"{name}.py").write_text(source or example("python"), encoding="utf-8")
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{point}\n")


def register(folder: Path, monkeypatch, **what) -> None:
    """Install in `folder`, and let this process look for tasks anew."""
    install(folder, **what)
    monkeypatch.syspath_prepend(folder)
    for found in ("_registered", "_registered_task"):
        monkeypatch.setattr(tasks, found, functools.cache(getattr(tasks, found).__wrapped__))
