"""Checks the plugin on a machine with a CUDA device: `python -m harness.engines.vllm.gpu_check`, or `make gpu-check`.

Runs the tests marked `gpu` of a checkout and prints a verdict on each.
"""

import subprocess
import sys
import tempfile
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


def main() -> int:
    """Exit status: 0 if all checks passed, 1 if one did not, 2 if this machine cannot be checked."""
    if reason := reason_not_to_run():
        print(f"error: gpu-check: {reason}", file=sys.stderr)
        return CANNOT_RUN
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", str(SUITE), "-m", "gpu", "-q", f"--junitxml={report}"]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        verdicts = read_verdicts(report) if report.exists() else []
    names = ", ".join(f"{name} ({memory:.0f} GiB)" for name, memory in cuda_gpus())
    Console().print(table_of(verdicts, f"gpu-check on {names}"))
    passed = sum(verdict.result == "passed" for verdict in verdicts)
    print(f"{passed} of {len(verdicts)} checks passed in {sum(verdict.seconds for verdict in verdicts):.0f} s")
    return int(status != 0 or passed < len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
