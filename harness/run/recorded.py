"""Whether what lies in a run folder is of this run, and whole."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness.benchmarks.rows import Row
from harness.errors import UserError
from harness.store.manifest import Manifest
from harness.store.predictions import FILE_NAME, Prediction, predictions_sha256
from harness.store.run_folder import other_versions

NUM_NAMED = 3
OVERWRITE = "use overwrite=true to make the run anew"


def check_finished(folder: Path, found: Manifest, wanted: Manifest) -> None:
    """Refuse to show a finished run whose predictions are gone or changed; say which versions made it.

    Raises:
        UserError: names the file.
    """
    path, sha256 = folder / FILE_NAME, predictions_sha256(folder)
    if sha256 is None:
        raise UserError(f"{path} of this finished run is gone. Put it back, or {OVERWRITE}.")
    if found.predictions_sha256 not in (None, sha256):
        raise UserError(f"{path} is not what this run wrote when it finished. Put it back, or {OVERWRITE}.")
    if other := other_versions(found, wanted):
        print(f"warning: {folder} was made with {other}; overwrite=true makes it anew.", file=sys.stderr, flush=True)


def check_predictions(
    folder: Path, predictions: Sequence[Prediction], rows: Mapping[str, Row], prompt_sha256: Callable[[Row], str]
) -> None:
    """Refuse predictions of samples that the run does not have, or of other prompts than it asks.

    Args:
        rows: the run's rows by sample id.
        prompt_sha256: digest of a row's prompt as it is asked now.

    Raises:
        UserError: names the samples.
    """
    foreign = [p.sample_id for p in predictions if p.sample_id not in rows]
    if foreign:
        raise UserError(_text(folder, foreign, "no samples of this run"))
    other = [p.sample_id for p in predictions if prompt_sha256(rows[p.sample_id]) != p.prompt_sha256]
    if other:
        raise UserError(_text(folder, other, "answers to other prompts than this run asks"))


def _text(folder: Path, samples: Sequence[str], what: str) -> str:
    named = ", ".join(samples[:NUM_NAMED]) + (", ..." if len(samples) > NUM_NAMED else "")
    return f"{folder / FILE_NAME} holds {what}: {named}. Delete these {len(samples)} lines, or {OVERWRITE}."
