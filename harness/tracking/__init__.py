"""Reporting finished runs elsewhere. A run never depends on it: what goes wrong here is a warning."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.config import TrackerConfig
from harness.store.manifest import Manifest, write_json
from harness.store.predictions import read_predictions

FILE_NAME = "tracked.json"


def track(tracker: TrackerConfig, folder: Path, manifest: Manifest, metrics: dict[str, Any]) -> None:
    """Report a finished run, unless this very report was made before.

    What was reported stands in `tracked.json`, so that the same command again adds nothing. Any failure, such as no
    network or no account, is one warning: the run is on disk, and the next start of the same command tries again.

    Args:
        tracker: where to and under which names.
        folder: the run folder.
        manifest, metrics: the run's record and numbers.
    """
    if tracker.name == "none":
        return
    from harness.tracking.wandb import outer_run, report

    wanted = asdict(tracker) | {"outer_run": outer_run()}
    try:
        if _reported(folder) == wanted:
            return
        place = report(tracker, folder, manifest, metrics, read_predictions(folder))
        write_json(folder / FILE_NAME, {"tracker": wanted, "place": place})
    except Exception as error:
        print(
            f"warning: the run is finished and saved, but was not reported to {tracker.name} ({tracker.mode}): "
            f"{_first_line(error)} The same command again tries once more; tracker=wandb_offline needs no network.",
            file=sys.stderr,
        )
    else:
        print(f"W&B          {place}")


def _reported(folder: Path) -> dict[str, Any] | None:
    path = folder / FILE_NAME
    return json.loads(path.read_text(encoding="utf-8"))["tracker"] if path.exists() else None


def _first_line(error: Exception) -> str:
    line = (str(error).strip() or type(error).__name__).splitlines()[0].strip()
    return line if line.endswith(".") else f"{line}."
