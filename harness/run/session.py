"""What a session of a run does, written down as it goes, so that one that is killed loses next to nothing of it."""

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness.engines.contract import Engine
from harness.store.block_usage import append_block_usage
from harness.store.manifest import Manifest, Session, Status, now, write_manifest

MEASURE_EVERY_S = 60.0
MEASURE_AT_MOST = 0.01  # of the time


class SessionRecord:
    """The newest session in a run's manifest. Counts are right after any interruption; see `Session`."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Write down that a session begins.

        Args:
            folder: the run folder.
            manifest: the run's record without this session.
        """
        self._folder = folder
        self._session = Session(started_at=now())
        self._manifest = replace(manifest, status="started", error=None, sessions=[*manifest.sessions, self._session])
        self._num_usage_rows = 0
        self._next_measure = time.monotonic() + MEASURE_EVERY_S
        write_manifest(folder, self._manifest)

    def describe(self, prompting: dict[str, Any]) -> None:
        """Write down how prompts are put to the model, and say so where they are without a chat template."""
        self._manifest = replace(self._manifest, prompting=prompting)
        write_manifest(self._folder, self._updated("started"))
        if prompting["chat_template"] is None:
            print("note: no chat template; prompts go to the model as they are, as to a base model", flush=True)

    def count(self, num_output_tokens: int, generation_s: float) -> None:
        """One more sample is on disk, `generation_s` seconds after the first request."""
        self._session = replace(
            self._session,
            num_samples=self._session.num_samples + 1,
            num_output_tokens=self._session.num_output_tokens + num_output_tokens,
            generation_s=generation_s,
        )

    def measure_if_due(self, engine: Engine) -> None:
        """Measure now and then: every minute, less often where that would take more than a hundredth of the time."""
        started = time.monotonic()
        if started >= self._next_measure:
            self.measure(engine)
            write_manifest(self._folder, self._updated("started"))
            ended = time.monotonic()
            self._next_measure = ended + max(MEASURE_EVERY_S, (ended - started) / MEASURE_AT_MOST)

    def measure(self, engine: Engine) -> None:
        """Take the engine's own counts into the session, and the steps since last time into the run folder."""
        stats = engine.stats()
        append_block_usage(self._folder, len(self._manifest.sessions), stats.block_usage[self._num_usage_rows :])
        self._num_usage_rows = len(stats.block_usage)
        counts: dict[str, Any] = asdict(stats)
        del counts["block_usage"]
        self._session = replace(self._session, engine=counts, num_measured=self._session.num_samples)

    def end(self, status: Status, error: str | None = None) -> Manifest:
        """The manifest as it is when the session ends; not written yet."""
        self._session = replace(self._session, status=status, ended_at=now())
        return self._updated(status, error)

    def _updated(self, status: Status, error: str | None = None) -> Manifest:
        sessions = [*self._manifest.sessions[:-1], self._session]
        return replace(self._manifest, status=status, error=error, sessions=sessions)
