"""`block_usage.csv`: KV blocks in use after every engine step, one stretch of rows a session."""

import csv
import os
from collections.abc import Iterable
from pathlib import Path

from harness.generation import BlockUsageSample

FILE_NAME = "block_usage.csv"
COLUMNS = ("session", "t_s", "blocks", "running", "prefilling")


def append_block_usage(folder: Path, session: int, usage: Iterable[BlockUsageSample]) -> None:
    """Add the steps of one session, after cutting off a line that a crash left unfinished.

    `t_s` counts from that session's first step.
    """
    path = folder / FILE_NAME
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            writer.writerow(COLUMNS)
        writer.writerows((session, step.t_s, step.blocks, step.running, step.prefilling) for step in usage)
