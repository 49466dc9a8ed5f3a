"""A sweep: what became of each of its jobs, in files that every launcher's processes can reach.

<sweep folder>/<job number>/outcome.json    how the job ended; missing if its process was killed
<sweep folder>/claims/<run id>              the job that carries out this run; other jobs of the same run skip it
"""

import contextlib
import json
import shutil
import sys
import uuid
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Literal

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from harness.run.forecast import announcement
from harness.store.manifest import write_json

OUTCOME = "outcome.json"
CLAIMS = "claims"
PLAIN_WIDTH = 160

Status = Literal["ok", "skipped", "failed", "interrupted"]


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        command: what starts this job alone, or goes on with it.
        score: mean of the task scores, None without one.
        note: why it was skipped or failed.
    """

    status: Status
    command: str
    run_id: str | None = None
    score: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Claim:
    """Which job of a sweep has a run.

    Attributes:
        job: its number.
        name: unique; the same when the job is queued again.
    """

    job: str
    name: str


class SweepCallback(Callback):
    """Hydra's word that a sweep begins, in the process that launches it."""

    folder: ClassVar[Path | None] = None
    overwrites: ClassVar[bool] = False
    results: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        """Check every member, then remember the sweep and forget the claims of an earlier one in the same folder.

        A sweep with a member that cannot run ends the program here: Hydra goes on after any other exception.
        """
        from harness.run.sweep_check import problems_of_members

        if problems := problems_of_members(config):
            print(*(f"error: {problem}" for problem in problems), "nothing was started", sep="\n", file=sys.stderr)
            sys.exit(1)
        SweepCallback.folder = Path(config.hydra.sweep.dir)
        SweepCallback.overwrites = bool(config.overwrite)
        SweepCallback.results = Path(config.results_dir)
        shutil.rmtree(SweepCallback.folder / CLAIMS, ignore_errors=True)
        print(announcement(config), flush=True)


def claim(job_folder: Path, run_id: str) -> Claim:
    """Take a run for this job, unless another job of the sweep has it.

    Returns:
        The claim of the job that has the run: this one, or one with the same run.
    """
    claims = job_folder.parent / CLAIMS
    claims.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (claims / run_id).symlink_to(f"{job_folder.name}-{uuid.uuid4().hex}")
    name = (claims / run_id).readlink().name
    return Claim(name.rpartition("-")[0], name)


def write_outcome(job_folder: Path, outcome: Outcome) -> None:
    """Record how a job ended."""
    write_json(job_folder / OUTCOME, asdict(outcome))


def read_outcomes(folder: Path) -> dict[int, Outcome]:
    """The outcome of every job of a sweep by its number."""
    jobs = sorted((int(path.name), path) for path in folder.glob("[0-9]*") if path.name.isdigit())
    return {number: _read(path / OUTCOME) for number, path in jobs}


def conclude(folder: Path) -> bool:
    """Print the table of a sweep and the commands of what is left to do.

    Returns:
        whether every job is done.
    """
    outcomes = read_outcomes(folder)
    _print_table(outcomes)
    counts = Counter(outcome.status for outcome in outcomes.values())
    if SweepCallback.results is not None:
        _print_ranking([SweepCallback.results / o.run_id for o in outcomes.values() if o.score is not None])
    print(f"{len(outcomes)} jobs: {', '.join(f'{n} {status}' for status, n in counts.items())}. Sweep folder {folder}")
    left = [o.command for o in outcomes.values() if o.status in ("failed", "interrupted") and o.command]
    if left:
        anew = " with overwrite=false" if SweepCallback.overwrites else ""
        print(f"to go on, the same sweep again{anew}, or:", *left, sep="\n  ")
    return all(outcome.status in ("ok", "skipped") for outcome in outcomes.values())


def _print_ranking(folders: list[Path]) -> None:
    """Where a sweep is over retrieval tasks or over seeds, print its policies, best first."""
    from harness.run.ranking import has_repeats, is_retrieval, rank, ranking_text, verdict

    folders = list(dict.fromkeys(folders))
    if not folders or not (is_retrieval(folders) or has_repeats(folders)):
        return
    ranked = rank(folders)
    print(f"\n{ranking_text(ranked)}")
    print(f"{verdict(ranked)}\n" if is_retrieval(folders) else "")


def _read(path: Path) -> Outcome:
    if path.exists():
        return Outcome(**json.loads(path.read_text(encoding="utf-8")))
    return Outcome("failed", "", note="its process ended without a word (killed?)")


def _print_table(outcomes: dict[int, Outcome]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("job", "status", "score", "run", "note")
    for number, outcome in outcomes.items():
        score = "-" if outcome.score is None else f"{outcome.score:.2f}"
        table.add_row(str(number), outcome.status, score, outcome.run_id or "-", outcome.note)
    console = Console(highlight=False, markup=False)
    (console if console.is_terminal else Console(highlight=False, markup=False, width=PLAIN_WIDTH)).print(table)
