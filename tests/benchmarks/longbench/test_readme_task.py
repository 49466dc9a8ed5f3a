"""The worked example of README.md's section "A task", run as it stands on the scripted engine."""

import csv
import hashlib
import json
import os
import shlex
import subprocess
import sys

from harness.store.predictions import read_predictions
from tests.benchmarks.longbench.own_task import README, example, install, row, section
from tests.scripted_run import GENEROUS_S, only_folder


def command(rows, *more: str) -> list[str]:
    """The command of the section, for a folder of rows."""
    (line,) = (line for line in section().splitlines() if line.startswith("    python "))
    python, *arguments = shlex.split(line)
    assert python == "python"
    assert "benchmark.path=DIR" in arguments
    return [sys.executable, *(argument.replace("=DIR", f"={rows}") for argument in arguments), *more]


def test_the_example_goes_from_its_row_to_its_score(tmp_path, byte_model):
    package, rows, results = tmp_path / "package", tmp_path / "rows", tmp_path / "runs"
    package.mkdir()
    rows.mkdir()
    install(package)
    (rows / "riddles.jsonl").write_text(json.dumps(row()) + "\n", encoding="utf-8")
    scripted = ("engine.name=tests.scripted_engine:ScriptedEngine", f"model.path={byte_model}")
    done = subprocess.run(
        command(rows, *scripted, "policy=full", f"results_dir={results}"),
        cwd=README.parent,
        env=os.environ | {"PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        timeout=GENEROUS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    folder = only_folder(results)
    (prediction,) = read_predictions(folder)
    prompt = (
        "Solve the riddle with one word of the text.\n\nText: The ferry crosses the river at nine. A gull follows it."
        "\n\nRiddle: What has a bed but never sleeps?\n\nWord:"
    )
    assert prediction.prompt_sha256 == hashlib.sha256(prompt.encode()).hexdigest()
    assert prediction.num_prompt_tokens == len(prompt)
    assert (prediction.sample_id, prediction.score) == ("riddles/1", 0.0)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert [(task["task"], task["num_samples"], task["num_expected"]) for task in metrics["tasks"]] == [
        ("riddles", 1, 1)
    ]
    assert (metrics["overall"]["name"], metrics["overall"]["score"]) == ("own tasks", 0.0)
    with (folder / "summary.csv").open(encoding="utf-8") as file:
        assert [line["task"] for line in csv.DictReader(file)] == ["riddles"]
    assert any(line.split()[1:] and "riddles" in line and "qa_f1" in line for line in done.stdout.splitlines())


def test_the_example_is_short():
    assert len(example("python").splitlines()) <= 12
