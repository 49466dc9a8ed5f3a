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
        length: words (English, code) or characters (Chinese) of input, context and answers, as published; for RULER
            and the needle grid the tokens of prompt and answer together that were asked for.
        language: as published ("en", "zh" or a programming language).
        where: "file:line" for messages; not part of the row's identity.
        depth: where in the context the evidence lies, 0 (start) to 1 (end or `input`); None where not known.
        answer_prefix: what stands before the answer already: after the chat template, or one space after the prompt.
        needles: the parts of the context that hold the answers, as they stand there; none where not known.
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
    answer_prefix: str = ""
    needles: tuple[str, ...] = ()


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
        values += (row.answer_prefix,) if row.answer_prefix else ()
        digest.update(json.dumps(values).encode() + b"\n")
    return digest.hexdigest()
