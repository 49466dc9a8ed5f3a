"""Report finished runs and load tests to W&B afterwards: `python -m harness.tracking FOLDERS... [--offline]`.

Exit code 0: done; 2: a mistake the message explains.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.errors import UserError, exit_code

LOAD_TEST = "bench.json"
RUN = "manifest.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.tracking", description="Report finished runs and load tests to Weights & Biases."
    )
    parser.add_argument("folders", nargs="+", type=Path, help="folders of runs and load tests, or folders above them")
    parser.add_argument("--project", default="kv-eviction", help="(default: %(default)s)")
    parser.add_argument("--entity", help="account or team (default: that of the account)")
    parser.add_argument("--group", default="reported later", help="(default: %(default)s)")
    parser.add_argument("--offline", action="store_true", help="write the W&B files beside the run; sync them later")
    return exit_code(_run, parser.parse_args(arguments))


def _run(options: argparse.Namespace) -> None:
    from harness.config import TrackerConfig
    from harness.metrics import run_metrics
    from harness.report.reading.runs import find_folders
    from harness.store.manifest import read_manifest
    from harness.store.predictions import read_predictions
    from harness.tracking.wandb import report, report_load_test

    tracker = TrackerConfig(
        name="wandb",
        mode="offline" if options.offline else "online",
        project=options.project,
        entity=options.entity,
        group=options.group,
        job_type="accuracy",
        tags=[],
    )
    runs, load_tests = find_folders(options.folders, RUN), find_folders(options.folders, LOAD_TEST)
    if not runs and not load_tests:
        raise UserError(f"{', '.join(map(str, options.folders))}: no run and no load test there. Give their folders.")
    for folder in runs:
        manifest, predictions = read_manifest(folder), read_predictions(folder)
        print(report(tracker, folder, manifest, run_metrics(manifest, predictions), predictions))
    for folder in load_tests:
        print(report_load_test(tracker, folder))


if __name__ == "__main__":
    sys.exit(main())
