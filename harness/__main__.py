"""`python -m harness [group=option] [key=value] ...`: one run, or with `-m` a sweep of runs.

Exit codes: 0 all went well, 1 something failed, 130 stopped by Ctrl-C or SIGTERM. A failed run of a sweep does not stop
the others.
"""

import shlex
import signal
import sys
import traceback
from types import FrameType

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from harness.config import register_schema, to_dataclass
from harness.errors import UserError

PROGRAM = "python -m harness"
LOCAL_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

_failed_commands: list[str] = []


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")
def main(config: DictConfig) -> None:
    """Carry out one run; called by Hydra once a run."""
    command = f"{PROGRAM} {shlex.join(HydraConfig.get().overrides.task)}".rstrip()
    try:
        _run(config, command)
    except KeyboardInterrupt:
        print(f"\ninterrupted; finished samples are kept. To go on: {command}", file=sys.stderr)
        raise
    except Exception as error:
        if isinstance(error, UserError):
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        _failed_commands.append(command)
        if _runs_elsewhere():
            raise


def _run(config: DictConfig, command: str) -> None:
    checked = to_dataclass(config)
    from harness.experiment import run

    run(checked, command)


def _runs_elsewhere() -> bool:
    """Whether the job runs in a process of a launcher plugin, to which only an exception tells that it failed."""
    hydra_config = HydraConfig.get()
    return hydra_config.mode == RunMode.MULTIRUN and hydra_config.launcher._target_ != LOCAL_LAUNCHER


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def entry_point() -> None:
    """Run Hydra's command line and exit with the right code."""
    register_schema()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    if _failed_commands:
        if len(_failed_commands) > 1:
            print(f"{len(_failed_commands)} runs failed:", *_failed_commands, sep="\n  ", file=sys.stderr)
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    entry_point()
