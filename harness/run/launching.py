"""Every run is carried out by a process of its own, in a session of its own, while this one watches over it.

One process for a whole sweep would do as far as memory goes (measured on CPU: 807, 802, 810, 810 MiB resident after
each of four vLLM engines of 1.8 GiB in one process), but on a GPU the CUDA context stays with the process, a crash in
native code or the out-of-memory killer would take the whole sweep, and thread counts and vLLM's switches are read once
a process. A process a run costs its imports, about 10 s, and gives all of it back.

The session of its own keeps Ctrl-C of a terminal from vLLM's processes, which would die in the middle of a step and
say so at length: the run is told alone, and shuts its engine down in order. What is left of it after that is killed.
"""

import contextlib
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from harness.config import HarnessConfig
from harness.config_checks import to_dataclass
from harness.config_keys import refuse_unknown_hydra_keys, without_pluses
from harness.errors import UserError
from harness.run.sweep import Outcome, write_outcome

PROGRAM = "python -m harness"
CONFIG_NAME = "config"
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
QUIET_TRACKER = "ignore:resource_tracker:UserWarning"  # it cleans up after killed processes, and need not say so
STOP_S = 20.0
LINGER_S = 5.0


@dataclass(frozen=True)
class Job:
    """What `harness.run.job` is given.

    Attributes:
        sweep_folder: the job's folder in the sweep, None for a single run.
    """

    config: HarnessConfig
    command: str
    sweep_folder: Path | None


def launch(config: DictConfig) -> None:
    """Carry out one run; Hydra's task, called once a run in whichever process the launcher chose.

    A single run that fails ends the program; in a sweep, the outcome is recorded and the next job goes on.

    Raises:
        KeyboardInterrupt: the run was told to stop, and did.
    """
    hydra = HydraConfig.get()
    command = resuming_command(hydra, config)
    sweep_folder = Path(hydra.runtime.output_dir) if hydra.mode == RunMode.MULTIRUN else None
    try:
        code = _carry_out(config, command, sweep_folder)
        if code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        print(f"\ninterrupted; finished samples are kept. To go on: {command}", file=sys.stderr)
        raise
    if code and sweep_folder is None:
        sys.exit(EXIT_FAILED)


def _carry_out(config: DictConfig, command: str, sweep_folder: Path | None) -> int:
    """Check the configuration, and carry out the run in another process; returns its exit code."""
    try:
        refuse_unknown_hydra_keys(HydraConfig.get())
        job = Job(to_dataclass(config), command, sweep_folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        _record(sweep_folder, Outcome("failed", command, note=str(error)))
        return EXIT_FAILED
    code = run_apart(job)
    if code < 0:
        cause = f"the run was killed by {signal.Signals(-code).name}"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        print(f"error: {cause}{hint}. Finished samples are kept; to go on: {command}", file=sys.stderr)
        _record(sweep_folder, Outcome("failed", command, note=cause))
    return code


def resuming_command(hydra: HydraConf, config: DictConfig) -> str:
    """What starts this run alone with the same configuration, or goes on with it: it does not overwrite."""
    flags = [] if hydra.job.config_name == CONFIG_NAME else ["--config-name", hydra.job.config_name]
    for source in hydra.runtime.config_sources:
        if source.provider == "command-line":
            flags += ["--config-dir", source.path]
    search_path = [override for override in hydra.overrides.hydra if override.startswith("hydra.searchpath=")]
    task = [override for override in hydra.overrides.task if not re.match(r"\+*overwrite=", override)]
    overrides = [without_pluses(override) for override in task]
    last = ["overwrite=false"] if config.overwrite else []
    return f"{PROGRAM} {shlex.join([*flags, *search_path, *overrides, *last])}".rstrip()


def run_apart(job: Job) -> int:
    """Carry out a run in a process of its own.

    Returns:
        its exit code; minus the signal that killed it. Nothing of it is left running.

    Raises:
        KeyboardInterrupt: this process was told to stop; the run was stopped before.
    """
    warnings = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), QUIET_TRACKER)))
    process = subprocess.Popen(
        [sys.executable, "-m", "harness.run.job"],
        stdin=subprocess.PIPE,
        env=os.environ | {"PYTHONWARNINGS": warnings},
        start_new_session=True,
    )
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(pickle.dumps(job))
            process.stdin.flush()
        return process.wait()
    except BaseException:
        _stop(process)
        raise
    finally:
        process.stdin.close()
        _end_group(process.pid)


def _stop(process: subprocess.Popen) -> None:
    """Let the run end in order; kill it if that takes too long, or if Ctrl-C is pressed again."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        print("the run does not stop in time and is killed", file=sys.stderr)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _end_group(group: int) -> None:
    """Give the processes that a run left behind a moment to end, then kill them, so that their memory is free."""
    give_up = time.monotonic() + LINGER_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < give_up:
            os.killpg(group, 0)
            time.sleep(0.02)
        os.killpg(group, signal.SIGKILL)


def _record(sweep_folder: Path | None, outcome: Outcome) -> None:
    if sweep_folder is not None:
        write_outcome(sweep_folder, outcome)
