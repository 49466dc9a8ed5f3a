"""A row of any benchmark, and what was loaded."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """One row of a task.

    Attributes:
        row_id: the published `_id`, unique within the task.
        task: name of the task.
        context, input: the two texts that go into the prompt.
        answers: the gold answers; a prediction is scored by its best one.
        all_classes: every class of a classification task, else None.
        length: words (English, code) or characters (Chinese) of input, context and answers, as published.
        language: as published ("en", "zh" or a programming language).
        where: "file:line" for messages; not part of the row's identity.
        depth: where in the context the evidence lies, 0 (start) to 1 (end or `input`); only known for longbench_mini.
    """

    row_id: str
    task: str
    context: str
    input: str
    answers: tuple[str, ...]
    all_classes: tuple[str, ...] | None
    length: int
    language: str
    where: str = field(default="", compare=False)
    depth: float | None = None


@dataclass(frozen=True)
class LoadReport:
    """What was loaded for one task.

    Attributes:
        num_rows: rows loaded.
        num_expected: rows of the whole task.
        skipped: "file:line: what is wrong" of every bad row left out.
        file: where the rows came from.
        sha256: SHA-256 (hex) of that file; of the rows themselves if they were generated.
    """

    num_rows: int
    num_expected: int
    skipped: list[str]
    file: str
    sha256: str

    @property
    def num_skipped(self) -> int:
        """Bad rows left out."""
        return len(self.skipped)

    @property
    def is_full(self) -> bool:
        """Whether this is the whole task."""
        return self.num_rows == self.num_expected and not self.skipped


def content_hash(rows: Iterable[Row]) -> str:
    """Return the SHA-256 (hex) of what the rows say, in their order; line ends of the files do not matter."""
    digest = hashlib.sha256()
    for row in rows:
        values = (row.row_id, row.task, row.context, row.input, row.answers, row.all_classes, row.length, row.language)
        digest.update(json.dumps(values).encode() + b"\n")
    return digest.hexdigest()
