"""What is fixed about one task, whichever benchmark it is of."""

import re
from dataclasses import dataclass
from string import Formatter

from harness.errors import UserError

SINGLE_DOC = "single-doc QA"
MULTI_DOC = "multi-doc QA"
SUMMARISATION = "summarisation"
FEW_SHOT = "few-shot"
SYNTHETIC = "synthetic"
CODE = "code"

CATEGORIES = (SINGLE_DOC, MULTI_DOC, SUMMARISATION, FEW_SHOT, SYNTHETIC, CODE)
RULER = "RULER"
NEEDLE = "needle"
OWN = "own tasks"
_GENERATED = (RULER, NEEDLE)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Task:
    """What is fixed about one task.

    Attributes:
        name: the published name, also the stem of the file of rows.
        num_rows: rows of the whole test set.
        max_new_tokens: tokens to generate.
        metric: name of the metric, a row of `harness.benchmarks.longbench.metrics.METRICS`.
        category: one of `CATEGORIES`, RULER or NEEDLE; `OWN` for an own task.
        num_rows_e: rows of the task in LongBench-E, 0 when it is not part of it (task.md of the data set).
        language: "en", "zh" or "code"; Chinese tasks are left out of the average of English and code tasks.
        chat_template: whether a chat model gets its chat template around the prompt.
        first_line_only: whether only the first line of a prediction is scored.
        needs_input: whether the prompt is pointless without the row's `input`.
        prompt_sha256: first 16 hex digits of the SHA-256 of the official prompt template (UTF-8, with `{context}` and
            `{input}` for the two texts), which lm-eval holds; None for an own task.
        prompt_fix: (end as lm-eval has it, official end) where lm-eval's text lacks white space, else None.
        stop_at_newline: whether the answer also ends at a newline, after one token at least.
        prompt: the prompt template of a task that is not LongBench's, a text for `str.format` with the fields
            `{context}` and `{input}`.

    Raises:
        UserError: an own task that cannot work, or a task that is neither LongBench's nor an own one.
    """

    name: str
    num_rows: int
    max_new_tokens: int
    metric: str
    category: str = OWN
    num_rows_e: int = 0
    language: str = "en"
    chat_template: bool = True
    first_line_only: bool = False
    needs_input: bool = True
    prompt_sha256: str | None = None
    prompt_fix: tuple[str, str] | None = None
    stop_at_newline: bool = False
    prompt: str | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.prompt_sha256 is None):
            raise UserError(f"task {self.name} must have a prompt or, if it is LongBench's, prompt_sha256. Give one.")
        if self.prompt is not None:
            _check_own(self, self.prompt)

    @property
    def is_own(self) -> bool:
        """Whether it belongs to none of the project's benchmarks."""
        return self.category == OWN

    @property
    def in_longbench_e(self) -> bool:
        """Whether LongBench-E has this task too."""
        return self.num_rows_e > 0


def _check_own(task: Task, prompt: str) -> None:
    if not _NAME.fullmatch(task.name) or task.name in CATEGORIES:
        raise UserError(
            f"task {task.name!r} cannot be called so: a name holds letters, digits, '.', '_' and '-' only, and is not "
            "that of a category. Rename it."
        )
    if task.category not in (*_GENERATED, OWN) or task.num_rows_e:
        raise UserError(
            f"task {task.name} has a prompt of its own; category and num_rows_e are LongBench's. Remove them."
        )
    try:
        fields = {field for _, field, _, _ in Formatter().parse(prompt) if field is not None}
    except ValueError as error:
        raise UserError(
            f"the prompt of task {task.name}: {error}. Write {{{{ and }}}} for braces of its text."
        ) from error
    needed = {"context", "input"} if task.needs_input else {"context"}
    if not needed <= fields <= {"context", "input"}:
        raise UserError(
            f"the prompt of task {task.name} has the fields {_braced(fields)}. It needs {_braced(needed)} and may have "
            "{context} and {input}. Write {{ and }} for braces of its text, and needs_input=False if it has no {input}."
        )


def _braced(fields: set[str]) -> str:
    return ", ".join(f"{{{field}}}" for field in sorted(fields)) or "none"
