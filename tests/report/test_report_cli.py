"""`python -m harness.report`: from run folders to files, with one line for every mistake."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.report.__main__ import main
from harness.store.manifest import Session, read_manifest, write_manifest
from tests.report.synthetic import bench_rows, write_bench, write_run

ROOT = Path(__file__).resolve().parents[2]
PAPER = ["--paper", str(ROOT / "results" / "paper")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    parent = tmp_path_factory.mktemp("runs")
    write_run(parent, tasks=("qasper",))
    write_run(parent, "window", 256, tasks=("qasper",))
    write_run(parent, "broken", 256, tasks=("qasper",), status="failed")
    write_bench(parent, bench_rows())
    return parent


def test_it_writes_tables_figures_document_and_page_and_says_where(runs, tmp_path, capsys):
    assert main([str(runs), "--out", str(tmp_path), *PAPER]) == 0
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    group = "tiny-longbench_mini-limit12"
    names = [f"{name}-{group}" for name in ("answer", "accuracy", "memory", "speed")]
    names += [f"difference-{group}-averages", "bench", "runs"]
    assert {f"tables/{name}.{kind}" for name in names for kind in ("csv", "md", "tex", "parquet")} == {
        name for name in written if name.startswith("tables/")
    }
    assert {"report.md", "report.html"} <= written
    document = (tmp_path / "report.md").read_text()
    images = re.findall(r"\]\((figures/[^)]+)\)", document)
    assert images
    assert set(images) <= written
    printed = capsys.readouterr().out
    assert printed.startswith("3 runs in 1 groups, 9 rows of load tests\n")
    assert f"Page      {tmp_path / 'report.html'}" in printed
    assert f"skipped   retention-{group}: no run recorded retained positions" in printed


def test_only_figures_can_be_asked_for(runs, tmp_path):
    assert main([str(runs), "--figures", str(tmp_path / "figures"), *PAPER]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["figures"]
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {".pdf", ".svg", ".png", ".json"}


def test_a_report_of_load_tests_alone(tmp_path):
    write_bench(tmp_path / "runs", bench_rows())
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out"), *PAPER]) == 0
    assert "Model tiny; Block 32 tokens" in (tmp_path / "out" / "report.md").read_text()


def test_runs_without_any_sample_or_score_can_be_reported(tmp_path, capsys):
    started = write_run(tmp_path / "runs", "window", 256, status="started", num_done=0, usage=False)
    write_manifest(started, replace(read_manifest(started), sessions=[Session("2026-01-01T00:00:00+00:00")]))
    write_run(tmp_path / "runs", status="failed")
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out"), *PAPER]) == 0
    assert (
        "window @ 256 [started]: 0 of 48 samples scored, not a finished run."
        in (tmp_path / "out" / "report.md").read_text()
    )
    assert "(0, each as SVG, PNG, PDF)" in capsys.readouterr().out


def test_the_same_runs_give_the_same_page(runs, tmp_path):
    pages = []
    for name in ("first", "second"):
        assert main([str(runs), "--out", str(tmp_path / name), *PAPER]) == 0
        pages.append((tmp_path / name / "report.html").read_bytes())
    assert pages[0] == pages[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        ([str(ROOT / "conf")], "no run was found in"),
        ([str(ROOT / "conf"), "--samples-per-task", "-1"], "--samples-per-task=-1 is negative"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, message, capsys):
    assert main([*arguments, *PAPER]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_no_output_names_a_place_of_this_machine(runs, tmp_path):
    assert main([str(runs), "--out", str(tmp_path), *PAPER]) == 0
    for path in tmp_path.rglob("*"):
        if path.suffix in (".md", ".html", ".csv", ".tex", ".svg"):
            assert str(runs) not in path.read_text(encoding="utf-8"), path


def test_real_runs_of_this_checkout_can_be_reported(tmp_path):
    folder = ROOT / "results" / "runs"
    if not any(folder.rglob("manifest.json")):
        pytest.skip("no run in results/runs; make one with python -m harness")
    assert main([str(folder), "--out", str(tmp_path), *PAPER]) == 0
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_help_imports_nothing_that_takes_its_time():
    script = (
        "import sys\n"
        "from harness.report.__main__ import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    print(sorted({name.split('.')[0] for name in sys.modules} & set(sys.argv[1:])))"
    )
    heavy = ["pandas", "numpy", "altair", "vl_convert", "torch", "hydra"]
    done = subprocess.run([sys.executable, "-c", script, *heavy], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
