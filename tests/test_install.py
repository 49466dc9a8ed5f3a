"""An installed harness works outside the repository: configuration, prompts and assets come with it."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.scripted_run import GENEROUS_S, only_folder

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "conf", "harness", "policies")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The content of the wheel, and a scripted engine beside it, in a folder of their own."""
    clone, wheels, site = (tmp_path_factory.mktemp(name) for name in ("clone", "wheels", "site"))
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, clone / part)
    build = "import setuptools.build_meta as backend, sys; backend.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(wheels)], cwd=clone, check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    shutil.copy(ROOT / "tests" / "scripted_engine.py", site / "an_engine.py")
    return site


def run(site, folder, *command: str) -> str:
    env = os.environ | {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder, env=env, capture_output=True, text=True, timeout=GENEROUS_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_licence_and_entry_points_are_part_of_the_wheel(installed):
    (info,) = installed.glob("*.dist-info")
    assert "License-Expression: Apache-2.0" in (info / "METADATA").read_text()
    assert "Apache License" in (info / "licenses" / "LICENSE").read_text()
    assert "[vllm.general_plugins]" in (info / "entry_points.txt").read_text()
    assert not (installed / "tests").exists()


def test_a_run_and_its_report_work_from_another_folder(installed, tmp_path, byte_model):
    assert "name: longbench_mini" in run(installed, tmp_path, "harness", "--cfg", "job")
    more = ["engine.name=an_engine:ScriptedEngine", f"model.path={byte_model}", "benchmark.tasks=[trec,lcc]"]
    run(installed, tmp_path, "harness", *more)
    folder = only_folder(tmp_path / "results" / "runs")
    assert (folder / "metrics.json").exists()
    assert '"git": null' in (folder / "manifest.json").read_text()
    run(installed, tmp_path, "harness.report", "results/runs")
    assert "trec" in (tmp_path / "results" / "report" / "report.html").read_text()
