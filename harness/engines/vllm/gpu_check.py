"""Checks the plugin on a machine with a CUDA device: `python -m harness.engines.vllm.gpu_check`, or `make gpu-check`.

Runs the tests marked `gpu` of a checkout and prints a verdict on each; then the paper's load tests, cut to a quarter of
its output tokens, as tables. `--checks-only` leaves these out; `--dry-run` says what would run, on any machine.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.hardware import cuda_gpus, inference_device

ROOT = Path(__file__).resolve().parents[3]
SUITE = ROOT / "tests" / "gpu"
COLOURS = {"passed": "green", "failed": "red", "skipped": "yellow"}
CANNOT_RUN = 2
CHECK_SECONDS, ROW_SECONDS = 300, 600
QUARTER = ("model=llama3.2-1b", "load_format=dummy", "repeats=1", "overwrite=true", "load.output_tokens=2048")
LOAD_TESTS = {
    "throughput and latency": ("preset=throughput", *QUARTER,
                               "variants.policies=[paged_eviction,streaming_llm,keydiff]",
                               "variants.budgets=[1024]"),
    "page size": ("preset=page_size", *QUARTER, "variants.policies=[paged_eviction]", "variants.block_sizes=[32]"),
}  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check; `note` is what it measured, or the first line of why it did not pass."""

    check: str
    result: str
    seconds: float
    note: str


def reason_not_to_run() -> str | None:
    """Why this machine cannot be checked, and what to do; None if it can."""
    if not cuda_gpus():
        return "no CUDA device found (nvidia-smi lists none). Run this on a machine with an NVIDIA GPU."
    if inference_device() != "cuda":
        return "vLLM is installed for CPU here. Install it for CUDA: make setup EXTRA=gpu."
    if not SUITE.is_dir():
        return f"the tests are not at {SUITE}. Run this from a checkout of the repository."
    return None


def read_verdicts(report: Path) -> list[Verdict]:
    """Every check of a JUnit report, in the order in which they ran."""
    return [_verdict(case) for case in ElementTree.parse(report).iter("testcase")]


def _verdict(case: ElementTree.Element) -> Verdict:
    failure = next((child for tag in ("failure", "error") for child in case.findall(tag)), None)
    skip = case.find("skipped")
    notes = [item.get("value", "") for item in case.iter("property") if item.get("name") == "note"]
    if failure is not None:
        notes.append((failure.get("message") or "").strip().partition("\n")[0])
    elif skip is not None:
        notes.append(skip.get("message") or "")
    result = "failed" if failure is not None else "skipped" if skip is not None else "passed"
    check = (case.get("name") or "").removeprefix("test_").replace("_", " ")
    return Verdict(check, result, float(case.get("time") or 0), "; ".join(note for note in notes if note))


def table_of(verdicts: list[Verdict], title: str) -> Table:
    """One row a check."""
    table = Table("check", "result", "seconds", "note", title=title)
    table.columns[2].justify = "right"
    for verdict in verdicts:
        result = f"[{COLOURS[verdict.result]}]{verdict.result}[/]"
        table.add_row(escape(verdict.check), result, f"{verdict.seconds:.1f}", escape(verdict.note))
    return table


def check() -> bool:
    """Run the tests and print the verdicts; True if all passed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", str(SUITE), "-m", "gpu", "-q", f"--junitxml={report}"]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        verdicts = read_verdicts(report) if report.exists() else []
    names = ", ".join(f"{name} ({memory:.0f} GiB)" for name, memory in cuda_gpus())
    Console().print(table_of(verdicts, f"gpu-check on {names}"))
    passed = sum(verdict.result == "passed" for verdict in verdicts)
    seconds = sum(verdict.seconds for verdict in verdicts)
    print(f"{passed} of {len(verdicts)} checks passed in {seconds:.0f} s (meant to stay under {CHECK_SECONDS})")
    return status == 0 and passed == len(verdicts) > 0


def load_test_command(arguments: tuple[str, ...]) -> list[str]:
    """The command of a row of `LOAD_TESTS`."""
    return [sys.executable, "-m", "harness.bench", *arguments]


def print_rows(seconds: float) -> bool:
    """Carry out the load tests one after the other, as far as the time goes; True if all were finished."""
    end, finished = time.monotonic() + seconds, 0
    for name, arguments in LOAD_TESTS.items():
        command = load_test_command(arguments)
        print(f"\n{name}: {shlex.join(command[1:])}", flush=True)
        try:
            status = subprocess.run(command, cwd=ROOT, timeout=max(0, end - time.monotonic()), check=False).returncode
        except subprocess.TimeoutExpired:
            print(f"stopped: {seconds:.0f} s for all load tests are over. Run the command above alone.")
            break
        finished += status == 0
    print(f"\n{finished} of {len(LOAD_TESTS)} load tests finished. At the paper's size (hours):")
    print("python -m harness.bench -m preset=throughput,latency,page_size model=llama3.1-8b load_format=dummy")
    return finished == len(LOAD_TESTS)


def rehearse() -> int:
    """Collect the checks and read the load tests' settings, without running any; the exit status."""
    command = [sys.executable, "-m", "pytest", str(SUITE), "-m", "gpu", "-q", "--collect-only"]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    for name, arguments in LOAD_TESTS.items():
        command = load_test_command(arguments)
        print(f"\n{name}: {shlex.join(command[1:])}", flush=True)
        status |= subprocess.run(
            [*command, "--cfg", "job"], cwd=ROOT, stdout=subprocess.DEVNULL, check=False
        ).returncode
    return int(status != 0)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 if all checks passed, 1 if one did not, 2 if this machine cannot be checked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checks-only", action="store_true", help="leave the load tests out")
    parser.add_argument("--dry-run", action="store_true", help="say what would run")
    options = parser.parse_args(arguments)
    if options.dry_run:
        return rehearse()
    if reason := reason_not_to_run():
        print(f"error: gpu-check: {reason}", file=sys.stderr)
        return CANNOT_RUN
    passed = check()
    return int(not (passed and (options.checks_only or print_rows(ROW_SECONDS))))


if __name__ == "__main__":
    sys.exit(main())
