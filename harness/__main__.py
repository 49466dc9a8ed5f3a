"""`python -m harness [group=option] [key=value] ...`: one run, or with `-m` a sweep of runs.

Exit codes: 0 all went well, 1 something failed, 130 stopped by Ctrl-C or SIGTERM. A failed run of a sweep does not stop
the others.
"""

import signal
import sys
from types import FrameType

import hydra
from omegaconf import DictConfig

from harness.config import HarnessConfig, register_schema
from harness.config_keys import composition_errors_named, with_open_keys
from harness.run.launching import EXIT_FAILED, EXIT_INTERRUPTED
from harness.run.sweep import SweepCallback, conclude


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")
def main(config: DictConfig) -> None:
    """Carry out one run; called by Hydra once a run."""
    from harness.run.launching import launch  # launcher plugins send this function, with all that it names, elsewhere

    launch(config)


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def entry_point() -> None:
    """Run Hydra's command line and exit with the right code."""
    register_schema()
    signal.signal(signal.SIGTERM, _interrupt)
    sys.argv[1:] = with_open_keys(sys.argv[1:])
    interrupted = False
    try:
        with composition_errors_named(HarnessConfig):
            main()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        is_done = SweepCallback.folder is None or conclude(SweepCallback.folder)
    if interrupted:
        sys.exit(EXIT_INTERRUPTED)
    if not is_done:
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    entry_point()
