"""`python -m harness.run.job`: the process of one run, which `harness.run.launching` starts and tells what to do."""

import os
import pickle
import signal
import sys
import threading
import traceback
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

from harness.errors import UserError

if TYPE_CHECKING:
    from harness.run.launching import Job
    from harness.run.sweep import Outcome

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)  # SLURM's and submitit's; Ctrl-C comes as the first
EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130


def main() -> int:
    """Carry out the run that stdin describes; returns the exit code."""
    for number in STOP_SIGNALS:
        signal.signal(number, _interrupt)
    try:
        job: Job = pickle.load(sys.stdin.buffer)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        outcome = _outcome(job)
        if job.sweep_folder is not None:
            from harness.run.sweep import write_outcome

            write_outcome(job.sweep_folder, outcome)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return {"failed": EXIT_FAILED, "interrupted": EXIT_INTERRUPTED}.get(outcome.status, EXIT_OK)


def _outcome(job: "Job") -> "Outcome":
    from harness.run.sweep import Outcome

    try:
        return _carry_out(job)
    except KeyboardInterrupt:
        return Outcome("interrupted", job.command)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return Outcome("failed", job.command, note=str(error))
    except Exception as error:
        traceback.print_exc()
        return Outcome("failed", job.command, note=f"{type(error).__name__}: {error}")


def _carry_out(job: "Job") -> "Outcome":
    from harness.run.experiment import carry_out, plan_run, read_metrics
    from harness.run.sweep import Outcome, claim

    planned = plan_run(job.config, job.command)
    if job.sweep_folder is not None:
        taken = claim(job.sweep_folder, planned.run_id)
        if taken.job != job.sweep_folder.name:
            note = f"the same run as job {taken.job}"
            print(f"{planned.run_id} is skipped: {note}")
            return Outcome("skipped", job.command, planned.run_id, note=note)
        planned = replace(planned, claim=taken.name)
    has_worked = carry_out(planned)
    score = read_metrics(planned.folder)["overall"]["score"]
    if has_worked:
        return Outcome("ok", job.command, planned.run_id, score)
    return Outcome("skipped", job.command, planned.run_id, score, "finished before")


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Stop once: a second signal must not break into the saving that the first one began."""
    for each in STOP_SIGNALS:
        signal.signal(each, lambda *_: None)
    raise KeyboardInterrupt


def _end_with_parent() -> None:
    """Kill the whole session when the parent is gone: its end of stdin is closed only then."""
    os.read(sys.stdin.fileno(), 1)
    os.killpg(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
