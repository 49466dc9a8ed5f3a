"""`python -m harness` as its users start it: exit codes, one-line errors, Ctrl-C, sweeps."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.hardware import cuda_gpus

ROOT = Path(__file__).resolve().parents[1]
GENEROUS_S = 120  # for a machine that others use too; times that users are promised are asserted apart


@pytest.fixture
def harness(tmp_path, byte_model):
    """Run the command line with the scripted engine; returns the finished process."""

    def run(*arguments: str, scripted: bool = True, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            command(tmp_path, byte_model, *arguments, scripted=scripted),
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=GENEROUS_S,
            check=False,
        )

    return run


def command(tmp_path, byte_model, *arguments: str, scripted: bool = True) -> list[str]:
    scripts = ["engine.name=tests.scripted_engine:ScriptedEngine", f"model.path={byte_model}"] if scripted else []
    return [sys.executable, "-m", "harness", *arguments, *scripts, f"results_dir={tmp_path / 'runs'}"]


def folders(tmp_path) -> list[Path]:
    return sorted((tmp_path / "runs").glob("*"))


def the_error(done: subprocess.CompletedProcess) -> str:
    """The one line on stderr of a run that the user can mend."""
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line


def test_help_is_quick_and_shows_five_examples(harness):
    started = time.monotonic()
    done = harness("--help", scripted=False)
    assert time.monotonic() - started < 10
    assert done.returncode == 0
    assert done.stdout.count("  python -m harness") == 5


def test_help_lists_every_option_of_every_group_with_its_values(harness):
    text = harness("--help", scripted=False).stdout
    for group in ("model", "policy", "benchmark", "engine", "tracker", "experiment"):
        section = text.split(f"\n{group}\n")[1].split("\n\n")[0]
        for file in (ROOT / "conf" / group).glob("*.yaml"):
            assert f"\n  {file.stem}\n" in f"\n{section}\n"
    assert "options.window=32" in text
    assert "max_num_batched_tokens=2048" in text


def test_help_needs_neither_vllm_nor_torch():
    program = (
        "import sys; sys.argv = ['harness', '--help']\n"
        "from harness.__main__ import entry_point\n"
        "try: entry_point()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'vllm', 'wandb', 'transformers', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_environment_is_set_before_torch_is_imported():
    program = "import sys, harness.run.experiment; print({'torch', 'transformers', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.skipif(bool(cuda_gpus()), reason="says what happens where there is no CUDA device")
def test_a_model_that_cannot_run_here_ends_in_one_message_within_20_s(harness, tmp_path):
    started = time.monotonic()
    done = harness(
        "policy=paged_eviction",
        "model=llama3.1-8b",
        scripted=False,
        HF_HOME=str(tmp_path / "empty"),
        HF_HUB_OFFLINE="1",
    )
    assert time.monotonic() - started < 20
    error = the_error(done)
    assert "no CUDA GPU was found" in error
    assert "weights of meta-llama/Llama-3.1-8B-Instruct not found" in error
    assert "hf download meta-llama/Llama-3.1-8B-Instruct" in error
    assert "model=smollm2-135m" in error
    assert folders(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["policy.budget=100"], "Use 96 or 128."),
        (["benchmark.tasks=[qaspre]"], "qasper"),
        (["benchmark=longbench", "benchmark.path=no/such/folder"], "benchmark.path=no/such/folder does not exist"),
    ],
)
def test_a_mistake_ends_in_one_line_before_a_run_folder_exists(harness, tmp_path, arguments, words):
    assert words in the_error(harness(*arguments))
    assert folders(tmp_path) == []


def test_an_unknown_policy_lists_the_known_ones(harness):
    done = harness("policy=paged")
    assert done.returncode == 1
    assert "policy=paged is not an option of policy." in done.stderr
    assert "paged_eviction" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_line_that_does_not_parse_is_named_by_file_and_line(harness, tmp_path):
    row = {"input": "q?", "context": "c", "answers": ["a"], "length": 1, "dataset": "qasper", "language": "en",
           "all_classes": None, "_id": "1"}  # fmt: skip
    (tmp_path / "qasper.jsonl").write_text(json.dumps(row) + "\n" + '{"input": \n')
    done = harness("benchmark=longbench", f"benchmark.path={tmp_path}", "benchmark.tasks=[qasper]")
    assert f"{tmp_path / 'qasper.jsonl'}:2" in the_error(done)


def test_every_member_of_a_sweep_is_checked_before_the_first_starts(harness, tmp_path):
    budgets, policies = "policy.budget=256,100", "policy=paged_eviction,snapkv"
    done = harness("-m", budgets, policies, "benchmark.tasks=[qasper,trek]", "++policy.options.windw=3")
    assert done.returncode == 1
    assert folders(tmp_path) == []
    *problems, last = done.stderr.strip().splitlines()
    assert last == "nothing was started"
    for words in ("policy.budget=100 is not a multiple of engine.block_size=32", "trek", "windw"):
        assert sum(words in problem for problem in problems) >= 1, words
    assert all(problem.startswith("error: ") for problem in problems)
    assert "Traceback" not in done.stderr
    assert "jobs:" not in done.stdout


def test_a_fault_of_the_program_keeps_its_traceback(harness, tmp_path):
    done = harness("benchmark.tasks=[qasper]", SCRIPTED_CRASH_AFTER="0")
    assert done.returncode == 1
    assert "RuntimeError: scripted crash" in done.stderr
    assert json.loads((folders(tmp_path)[0] / "manifest.json").read_text())["status"] == "failed"


@pytest.fixture
def own_configs(tmp_path) -> list[str]:
    """Flags of somebody whose configuration lies elsewhere, with a blank in its name."""
    folder = tmp_path / "my configs"
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "sticky.yaml").write_text("name: streaming_llm\nbudget: 512\n")
    return ["--config-dir", str(folder)]


def printed_command(text: str) -> list[str]:
    program, *arguments = shlex.split(text)
    assert program == "python"
    return [sys.executable, *arguments]


@pytest.mark.slow
def test_the_printed_command_goes_on_with_own_configurations_and_throws_nothing_away(harness, tmp_path, own_configs):
    arguments = [*own_configs, "policy=sticky", "overwrite=true", "benchmark.tasks=[qasper]", "benchmark.limit=3"]
    died = harness(*arguments, SCRIPTED_KILLED_BUDGET="512")
    command = printed_command(died.stderr.split("to go on: ")[1])
    assert command[3:6] == [*own_configs, "policy=sticky"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=GENEROUS_S)
    (folder,) = folders(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [session["num_samples"] for session in manifest["sessions"]] == [0, 2]
    assert printed_command(manifest["command"]) == command


@pytest.mark.slow
def test_a_sweep_says_how_to_go_on_with_own_configurations_and_throws_nothing_away(harness, tmp_path, own_configs):
    arguments = [*own_configs, "policy=sticky", "overwrite=true", "benchmark.tasks=[qasper]", "benchmark.limit=3"]
    died = harness("-m", *arguments, f"hydra.sweep.dir={tmp_path / 'sweep'}", SCRIPTED_KILLED_BUDGET="512")
    command = printed_command(died.stdout.split("to go on, the same sweep again with overwrite=false, or:\n")[1])
    assert command[-1] == "overwrite=false"
    (folder,) = folders(tmp_path)
    assert printed_command(json.loads((folder / "manifest.json").read_text())["command"]) == command


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_keeps_its_samples_and_says_how_to_go_on(harness, tmp_path, byte_model, stop):
    tasks = ["benchmark.tasks=[qasper,trec,lcc]", "benchmark.limit=3"]
    process = subprocess.Popen(
        command(tmp_path, byte_model, *tasks),
        cwd=ROOT,
        env=os.environ | {"SCRIPTED_DELAY_S": "0.5"},
        stderr=subprocess.PIPE,
        text=True,
    )
    give_up = time.monotonic() + GENEROUS_S
    while not any(path.stat().st_size for path in (tmp_path / "runs").glob("*/predictions.jsonl")):
        assert time.monotonic() < give_up
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(stop)
    _, errors = process.communicate(timeout=GENEROUS_S)
    assert process.returncode == 130
    assert "To go on: python -m harness 'benchmark.tasks=[qasper,trec,lcc]' benchmark.limit=3 engine.name=" in errors
    assert "Traceback" not in errors
    (folder,) = folders(tmp_path)
    assert json.loads((folder / "manifest.json").read_text())["status"] == "interrupted"
    finished = (folder / "predictions.jsonl").read_text().splitlines()
    assert 1 <= len(finished) < 9
    if stop == signal.SIGTERM:
        return  # what goes on after it is the same
    assert harness(*tasks).returncode == 0
    ids = [json.loads(line)["sample_id"] for line in (folder / "predictions.jsonl").read_text().splitlines()]
    assert len(ids) == len(set(ids)) == 9
