"""`python -m harness.bench [preset=NAME] [key=value] ...`: one load test, or with `-m` several.

Exit codes: 0 all went well, 1 something failed, 130 stopped by Ctrl-C or SIGTERM.
"""

import shlex
import signal
import sys
import traceback
from types import FrameType

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from harness.bench.config import BenchConfig, make_plan, register_schema
from harness.config_keys import composition_errors_named, refuse_unknown_hydra_keys
from harness.errors import UserError

PROGRAM = "python -m harness.bench"
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

_failed_commands: list[str] = []


@hydra.main(version_base="1.3", config_path="pkg://conf.bench", config_name="config")
def main(config: DictConfig) -> None:
    """Carry out one load test; called by Hydra once a test."""
    command = f"{PROGRAM} {shlex.join(HydraConfig.get().overrides.task)}".rstrip()
    try:
        refuse_unknown_hydra_keys(HydraConfig.get())
        plan = make_plan(config)
        from harness.bench.run import run

        run(plan, command)
    except Exception as error:
        if isinstance(error, UserError):
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        _failed_commands.append(command)


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def entry_point() -> None:
    """Run Hydra's command line and exit with the right code."""
    register_schema()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with composition_errors_named(BenchConfig):
            main()
    except KeyboardInterrupt:
        print(
            "\ninterrupted; finished repeats are kept; to go on: the same command with overwrite=false", file=sys.stderr
        )
        sys.exit(EXIT_INTERRUPTED)
    if _failed_commands:
        if len(_failed_commands) > 1:
            print(f"{len(_failed_commands)} load tests failed:", *_failed_commands, sep="\n  ", file=sys.stderr)
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    entry_point()
