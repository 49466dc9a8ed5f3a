"""`block_usage.csv`: KV blocks in use after every engine step, one stretch of rows a session."""

import csv
import io
from collections.abc import Collection, Iterable
from pathlib import Path

from harness.engines.contract import BlockUsageSample
from harness.store.manifest import write_atomically

FILE_NAME = "block_usage.csv"
COLUMNS = ("session", "t_s", "blocks", "running", "prefilling")


def append_block_usage(folder: Path, session: int, usage: Iterable[BlockUsageSample]) -> None:
    """Add the steps of one session, all or none; `t_s` counts from that session's first step."""
    path = folder / FILE_NAME
    rows = io.StringIO(newline="")
    writer = csv.writer(rows, lineterminator="\n")
    if not path.exists():
        writer.writerow(COLUMNS)
    writer.writerows((session, step.t_s, step.blocks, step.running, step.prefilling) for step in usage)
    earlier = path.read_text(encoding="utf-8") if path.exists() else ""
    write_atomically(path, earlier + rows.getvalue())


def keep_sessions(folder: Path, sessions: Collection[int]) -> None:
    """Remove the steps of all other sessions."""
    path = folder / FILE_NAME
    if path.exists():
        header, *rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
        write_atomically(path, "".join([header, *(row for row in rows if int(row.split(",", 1)[0]) in sessions)]))
