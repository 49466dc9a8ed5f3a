"""Where rows lie: a folder, an archive, or the published archive on the Hugging Face hub.

JSONL is read line by line by hand, because the `json` builder of `datasets` turns a missing field into None, a number
into text and text into a number without a word, and its errors name neither the file nor the line. Parquet copies,
whose types are part of the file, are read with `datasets`.
"""

import gzip
import hashlib
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from harness.errors import UserError
from harness.hub import cached_file, why_unreachable

HUB_DATASET = "zai-org/LongBench"
HUB_ARCHIVE = "data.zip"
_FETCH = (
    "Fetch it where there is a network and run with benchmark.path=FILE_OR_FOLDER, or run benchmark=longbench_mini, "
    "which needs no files."
)
ROWS_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
_ARCHIVE_ERRORS = (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, OSError, RuntimeError)


@dataclass(frozen=True)
class RowsFile:
    """The file with the rows of one task.

    Attributes:
        path: a JSONL file, which may be compressed (.gz), a Parquet file, or an archive.
        member: name of the JSONL file inside the archive, else None.
    """

    path: Path
    member: str | None = None

    @property
    def name(self) -> str:
        """The name for messages."""
        return str(self.path) if self.member is None else f"{self.path}/{self.member}"


def find_rows_file(path: Path, stem: str) -> RowsFile:
    """Find the rows called `stem` (a task, or a task with `_e` for LongBench-E) in a folder or an archive.

    A folder holds `<stem>.jsonl` or `<stem>.jsonl.gz`, here or in `data/` (the published archive unpacked),
    `<stem>.parquet` or `<stem>/<one file>.parquet` (copies on the hub); an archive holds `<stem>.jsonl` in any folder.
    A single file of rows is itself, whatever it is called: rows of another task in it are refused when they are read.

    Raises:
        UserError: nothing there, more than one candidate, or a damaged archive.
    """
    if path.is_dir():
        return _find_in_folder(path, stem)
    if path.name.endswith(ROWS_SUFFIXES) and path.is_file():
        return RowsFile(path)
    if path.is_file():
        return _find_in_archive(path, stem)
    raise UserError(
        f"benchmark.path={path} does not exist. Give the folder or archive that holds {stem}.jsonl, "
        "or run benchmark=longbench_mini, which needs no files."
    )


def task_of_file(path: Path) -> str | None:
    """The task that a single file of rows is named after; None if `path` is no such file."""
    suffix = next((suffix for suffix in ROWS_SUFFIXES if path.name.endswith(suffix)), None)
    return None if suffix is None or not path.is_file() else path.name.removesuffix(suffix)


def _find_in_folder(folder: Path, stem: str) -> RowsFile:
    places = (folder, folder / "data")
    lines = [place / f"{stem}{suffix}" for place in places for suffix in (".jsonl", ".jsonl.gz")]
    candidates = (*lines, folder / f"{stem}.parquet")
    for candidate in (*candidates, *sorted((folder / stem).glob("*.parquet"))):
        if candidate.is_file():
            return RowsFile(candidate)
    looked_for = ", ".join(str(candidate) for candidate in candidates)
    raise UserError(
        f"no rows of {stem}: looked for {looked_for} and {folder / stem}/*.parquet. "
        "Set benchmark.path to the folder that holds them, or leave the task out of benchmark.tasks."
    )


def _find_in_archive(path: Path, stem: str) -> RowsFile:
    members = [name for name in _member_names(path) if PurePosixPath(name).name == f"{stem}.jsonl"]
    if len(members) == 1:
        return RowsFile(path, members[0])
    found = f"has {' and '.join(members)}; it must have only one" if members else "has none"
    raise UserError(
        f"looked for {stem}.jsonl in the archive {path}: it {found}. "
        "Correct benchmark.path, or leave the task out of benchmark.tasks."
    )


def _member_names(path: Path) -> list[str]:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return archive.namelist()
        with tarfile.open(path) as archive:
            return [member.name for member in archive if member.isfile()]
    except _ARCHIVE_ERRORS as error:
        raise UserError(
            f"benchmark.path={path} is neither a folder nor a readable .zip or .tar archive ({error}). "
            "Give the folder of the JSONL files, or fetch the archive again."
        ) from error


@contextmanager
def _open(file: RowsFile) -> Iterator[BinaryIO]:
    """Open the bytes of a rows file; a damaged file raises UserError, also while it is read."""
    try:
        if file.member is None:
            with gzip.open(file.path) if file.path.suffix == ".gz" else file.path.open("rb") as stream:
                yield stream
        elif zipfile.is_zipfile(file.path):
            with zipfile.ZipFile(file.path) as archive, archive.open(file.member) as stream:
                yield stream
        else:
            with tarfile.open(file.path) as archive, archive.extractfile(file.member) as stream:
                yield stream
    except _ARCHIVE_ERRORS as error:
        raise UserError(f"{file.name} cannot be read ({error}). Fetch it again.") from error


def iter_records(file: RowsFile) -> Iterator[tuple[int, bytes | dict[str, object]]]:
    """Yield (line or row number from 1, one JSONL line or one Parquet row) lazily; blank lines are passed over.

    Raises:
        UserError: the file is damaged.
    """
    if file.path.suffix == ".parquet":
        yield from enumerate(_iter_parquet(file), start=1)
        return
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, line


def _iter_parquet(file: RowsFile) -> Iterator[dict[str, object]]:
    import datasets

    try:
        yield from datasets.load_dataset("parquet", data_files=str(file.path), split="train", streaming=True)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{file.name} cannot be read as Parquet ({error}). Fetch it again.") from error


def file_sha256(file: RowsFile) -> str:
    """Return the SHA-256 (hex) of the rows file as it lies there, line ends included.

    Raises:
        UserError: the file is damaged.
    """
    with _open(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def download_archive(revision: str | None) -> Path:
    """Fetch the published archive from the hub into the hub's cache; `revision` is a commit, tag or branch.

    The data set is an archive with a loader script, which `datasets` 4 and later refuse to run.

    Raises:
        UserError: the hub cannot be reached or has no such revision.
    """
    import httpx
    from huggingface_hub import hf_hub_download

    if found := cached_file(HUB_DATASET, HUB_ARCHIVE, revision, "dataset"):
        return found
    if reason := why_unreachable():
        raise UserError(
            f"{HUB_ARCHIVE} of the data set {HUB_DATASET} (revision {revision or 'main'}) is not in the hub's cache, "
            f"and {reason}. {_FETCH}"
        )
    try:
        return Path(hf_hub_download(HUB_DATASET, HUB_ARCHIVE, repo_type="dataset", revision=revision))
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise UserError(
            f"{HUB_ARCHIVE} of the data set {HUB_DATASET} (revision {revision or 'main'}) cannot be fetched from the "
            f"Hugging Face hub: {str(error).splitlines()[0]} {_FETCH}"
        ) from error
