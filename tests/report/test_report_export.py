"""Copies of runs without the benchmark's texts give the same tables; README's tables are what the copies say."""

import csv
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from harness.report.export import main
from harness.report.reading.runs import make_groups, read_runs
from harness.report.tables.costs import memory_table, speed_table
from harness.report.tables.scores import accuracy_table
from harness.report.tables.writers import markdown
from harness.store.manifest import read_manifest, write_manifest
from harness.store.predictions import predictions_sha256
from tests.report.synthetic import write_run

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "results" / "demo"
MARKED_TABLE = re.compile(r"<!-- results/demo/(?P<folder>[\w./-]+) -->\s*\n+(?P<table>(?:[ ]*\|[^\n]*\n)+)")
NUMBER = re.compile(r"[-−+]?\d[\d,]*\.?\d*")
INTERVAL = re.compile(r"± ?[\d.]+|\[[^\]]*\]")
NUM_DRAWS = 1000


def tables_of(parent) -> list[str]:
    (group,) = make_groups(read_runs([parent]))
    return [markdown(table) for table in (accuracy_table(group), memory_table(group), speed_table(group))]


def test_a_copy_holds_no_text_and_gives_the_same_tables(tmp_path, capsys):
    originals = tmp_path / "runs"
    for policy, budget in (("full", None), ("window", 256)):
        folder = write_run(originals, policy, budget, benchmark={"path": "/data/rows"})
        command = "python -m harness benchmark.path=/data/rows results_dir=../x"
        hashed = {"predictions_sha256": predictions_sha256(folder), "command": command}
        write_manifest(folder, replace(read_manifest(folder), **hashed))
    write_run(originals, "stopped", 256, status="interrupted", num_done=3)
    assert main([str(originals), "--out", str(tmp_path / "copies")]) == 0
    assert capsys.readouterr().out.startswith("2 runs, ")
    copies = sorted((tmp_path / "copies").iterdir())
    assert len(copies) == 2
    for copy in copies:
        manifest = read_manifest(copy)
        assert manifest.command == "python -m harness benchmark.path=rows results_dir=../x"
        assert manifest.config["benchmark"]["path"] == "rows"
        for line in (copy / "predictions.jsonl").read_text().splitlines():
            sample = json.loads(line)
            assert (sample["prediction"], sample["answers"], sample["all_classes"]) == ("", [], None)
    for folder in originals.glob("stopped*"):
        for file in folder.iterdir():
            file.unlink()
    assert tables_of(tmp_path / "copies") == tables_of(originals)


def test_steps_that_change_nothing_are_left_out_of_the_copy(tmp_path):
    folder = write_run(tmp_path / "runs", usage=False)
    lines = [f"1,{step / 10},{5 if step < 50 else 9},1,0" for step in range(100)]
    (folder / "block_usage.csv").write_text("\n".join(["session,t_s,blocks,running,prefilling", *lines]) + "\n")
    before = tables_of(tmp_path / "runs")
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "copies")]) == 0
    (copy,) = (tmp_path / "copies").iterdir()
    assert [line.split(",")[1] for line in (copy / "block_usage.csv").read_text().splitlines()[1:]] == [
        *("0.0", "4.9", "5.0", "9.9"),
    ]
    assert tables_of(tmp_path / "copies") == before


def test_nothing_to_copy_is_one_line(tmp_path, capsys):
    assert main([str(tmp_path), "--out", str(tmp_path / "copies")]) == 2
    assert "no finished run was found" in capsys.readouterr().err


def figures_of(folder: Path) -> list[float]:
    """Everything that README may say of a run, from its files alone and by code of this test."""
    manifest = json.loads((folder / "manifest.json").read_text())
    samples = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    by_task: dict[str, list[dict]] = {}
    for sample in samples:
        by_task.setdefault(sample["task"], []).append(sample)
    seconds = sum(session["generation_s"] for session in manifest["sessions"])
    tasks = [round(100 * fmean(one["score"] for one in rows), 2) for rows in by_task.values()]
    usage = list(csv.DictReader((folder / "block_usage.csv").read_text().splitlines()))
    return [
        fmean(tasks),
        *tasks,
        len(samples),
        *(len(rows) for rows in by_task.values()),
        len(samples) / seconds,
        seconds / len(samples),
        *(fmean(sample[key] for sample in samples) for key in ("final_resident_tokens", "num_output_tokens")),
        max(sample["peak_resident_tokens"] for sample in samples),
        sum(sample["num_evictions"] for sample in samples),
        max(int(step["blocks"]) for step in usage),
    ]


def interval_of(folder: Path) -> tuple[float, float]:
    """A bootstrap of contexts, each task on its own; drawn otherwise than the report's, so equal within a margin."""
    samples = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    by_task: dict[str, dict[str, list[float]]] = {}
    for one in samples:
        by_task.setdefault(one["task"], {}).setdefault(one["context_sha256"], []).append(100 * one["score"])
    chance = random.Random(1)
    means = []
    for _ in range(NUM_DRAWS):
        drawn = [chance.choices(list(contexts.values()), k=len(contexts)) for contexts in by_task.values()]
        means.append(fmean(fmean(score for context in task for score in context) for task in drawn))
    means.sort()
    return means[int(0.025 * NUM_DRAWS)], means[int(0.975 * NUM_DRAWS) - 1]


def number(text: str) -> float:
    return float(text.replace("−", "-").replace(",", ""))


def is_figure(text: str, figures: list[float]) -> bool:
    """Whether a number is one of the figures to the digits shown."""
    digits = len(text.split(".")[1]) if "." in text else 0
    return any(abs(number(text) - figure) <= 0.5 * 10**-digits + 1e-9 for figure in figures)


def one_sample(folder: Path) -> float:
    """What one sample more or less changes where all are right or wrong: an interval ends at one of these steps."""
    scores = [json.loads(line)["score"] for line in (folder / "predictions.jsonl").read_text().splitlines()]
    return 100 / len(scores) if set(scores) <= {0.0, 1.0} else 0.0


def is_bound(text: str, bounds: list[float], step: float) -> bool:
    """Whether a number is nearly one end of an interval, or half of its width."""
    return any(abs(number(text) - bound) <= max(step + 0.05, 1.0 + 0.05 * abs(bound)) for bound in bounds)


@pytest.mark.skipif(not (DEMO / "runs").is_dir(), reason="results/demo/runs holds no run yet")
def test_every_number_of_a_marked_table_of_the_readme_is_in_the_demo_runs():
    marked = list(MARKED_TABLE.finditer((ROOT / "README.md").read_text(encoding="utf-8")))
    assert marked, "a table made from results/demo/runs has the line <!-- results/demo/runs --> above it"
    for found in marked:
        folders = sorted(path.parent for path in (DEMO / found["folder"]).rglob("manifest.json"))
        assert folders, f"{found['folder']} holds no run"
        check_table(found["table"], folders)


def check_table(table: str, folders: list[Path]) -> None:
    by_policy: dict[str, list[Path]] = {}
    for folder in folders:
        config = json.loads((folder / "manifest.json").read_text())["config"]
        by_policy.setdefault(config["policy"]["name"], []).append(folder)
    _, _, *rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()]
    for policy_cell, *cells in rows:
        policy = re.search(r"`([\w-]+)`", policy_cell).group(1)
        assert policy in by_policy, f"no run of {policy}"
        figures = [figure for folder in by_policy[policy] for figure in figures_of(folder)]
        bounds, step = [], max(one_sample(folder) for folder in by_policy[policy])
        for folder in by_policy[policy]:
            low, high = interval_of(folder)
            bounds += [low, high, (high - low) / 2]
        configs = [json.loads((folder / "manifest.json").read_text())["config"] for folder in folders]
        figures += [config["policy"]["budget"] for config in configs if config["policy"]["budget"] is not None]
        shown = " ".join(cells)
        ends = [text for part in INTERVAL.findall(shown) for text in NUMBER.findall(part.replace(", ", " "))]
        for text in ends:
            assert is_bound(text, bounds, step), f"{policy}: {text} is in no interval of it"
        for text in NUMBER.findall(INTERVAL.sub("", shown)):
            assert is_figure(text, figures), f"{policy}: {text} is in no run of it"


def test_the_check_of_the_readme_sees_a_wrong_number(tmp_path):
    folders = [write_run(tmp_path, "full"), write_run(tmp_path, "window", 256)]
    score = figures_of(folders[1])[0]
    low, high = interval_of(folders[1])
    table = "| policy | mean score, 256 |\n|---|---|\n| `window` | {:.1f} ± {:.1f} |\n"
    check_table(table.format(score, (high - low) / 2), folders)
    with pytest.raises(AssertionError, match="is in no interval of it"):
        check_table(table.format(score, 15 + (high - low) / 2), folders)
    with pytest.raises(AssertionError, match="is in no run of it"):
        check_table(table.format(score + 25, (high - low) / 2), folders)
    with pytest.raises(AssertionError, match="no run of other"):
        check_table("| policy | x |\n|---|---|\n| `other` | 1 |\n", folders)
