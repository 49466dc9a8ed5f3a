"""The tasks, one row of facts each: the 21 of LongBench v1 in the official order, then tasks of your own.

A row with a `prompt` is an own task: it runs when `benchmark.tasks` names it, and LongBench's averages leave it out.
Another package adds one through the entry-point group `kv_eviction.tasks`: `riddles = "my_package.my_module:RIDDLES"`.

Source of LongBench's 21: THUDM/LongBench at 2e00731f (config/dataset2maxlen.json, config/dataset2prompt.json, pred.py,
eval.py).
"""

import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from string import Formatter

from harness.errors import UserError

ENTRY_POINT_GROUP = "kv_eviction.tasks"

SINGLE_DOC = "single-doc QA"
MULTI_DOC = "multi-doc QA"
SUMMARISATION = "summarisation"
FEW_SHOT = "few-shot"
SYNTHETIC = "synthetic"
CODE = "code"

CATEGORIES = (SINGLE_DOC, MULTI_DOC, SUMMARISATION, FEW_SHOT, SYNTHETIC, CODE)
OWN = "own tasks"

SECOND_NEWLINE = ("\n{input}", "\n\n{input}")
TRAILING_SPACE = ("", " ")
TRAILING_NEWLINE = ("", "\n")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Task:
    """What is fixed about one task.

    Attributes:
        name: the published name, also the stem of the file of rows.
        num_rows: rows of the whole test set.
        max_new_tokens: tokens to generate.
        metric: name of the metric, a row of `harness.benchmarks.longbench.metrics.METRICS`.
        category: one of `CATEGORIES`; `OWN` for an own task.
        num_rows_e: rows of the task in LongBench-E, 0 when it is not part of it (task.md of the data set).
        language: "en", "zh" or "code"; Chinese tasks are left out of the average of English and code tasks.
        chat_template: whether a chat model gets its chat template around the prompt.
        first_line_only: whether only the first line of a prediction is scored.
        needs_input: whether the prompt is pointless without the row's `input`.
        prompt_sha256: first 16 hex digits of the SHA-256 of the official prompt template (UTF-8, with `{context}` and
            `{input}` for the two texts), which lm-eval holds; None for an own task.
        prompt_fix: (end as lm-eval has it, official end) where lm-eval's text lacks white space, else None.
        stop_at_newline: whether the answer also ends at a newline, after one token at least.
        prompt: the prompt template of an own task, a text for `str.format` with the fields `{context}` and `{input}`;
            None for LongBench's tasks.

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
        """Whether it is not one of LongBench's, so that it carries its prompt with it."""
        return self.prompt is not None

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
    if task.category != OWN or task.num_rows_e:
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


# fmt: off
_TABLE = (
    #    name, rows, new tokens, metric, category, rows of LongBench-E, language, chat template, first line, input
    Task("narrativeqa", 200, 128, "qa_f1", SINGLE_DOC, 0, "en", True, False, True, "aada7ed24b06abac"),
    Task("qasper", 200, 128, "qa_f1", SINGLE_DOC, 224, "en", True, False, True, "0fbdd123fe7f83d6"),
    Task("multifieldqa_en", 150, 64, "qa_f1", SINGLE_DOC, 150, "en", True, False, True, "20b4666a2de8a1f7"),
    Task("multifieldqa_zh", 200, 64, "qa_f1_zh", SINGLE_DOC, 0, "zh", True, False, True, "344b3a4e557cd547"),
    Task("hotpotqa", 200, 32, "qa_f1", MULTI_DOC, 300, "en", True, False, True, "9ec4ae308865bd0c"),
    Task("2wikimqa", 200, 32, "qa_f1", MULTI_DOC, 300, "en", True, False, True, "9ec4ae308865bd0c"),
    Task("musique", 200, 32, "qa_f1", MULTI_DOC, 0, "en", True, False, True, "9ec4ae308865bd0c"),
    Task("dureader", 200, 128, "rouge_zh", MULTI_DOC, 0, "zh", True, False, True, "ae53329f51b17908"),
    Task("gov_report", 200, 512, "rouge", SUMMARISATION, 300, "en", True, False, False, "91c25d585b189ced"),
    Task("qmsum", 200, 512, "rouge", SUMMARISATION, 0, "en", True, False, True, "dca23b678fe0183b"),
    Task("multi_news", 200, 512, "rouge", SUMMARISATION, 294, "en", True, False, False, "2af3f28c40b902e6"),
    Task("vcsum", 200, 512, "rouge_zh", SUMMARISATION, 0, "zh", True, False, False, "3e5d8241bc9b512e"),
    Task("trec", 200, 64, "classification", FEW_SHOT, 300, "en", False, True, True, "0eff8bebdba99d91"),
    Task("triviaqa", 200, 32, "qa_f1", FEW_SHOT, 300, "en", False, True, True, "00a802e6377e72fc", SECOND_NEWLINE),
    Task("samsum", 200, 128, "rouge", FEW_SHOT, 300, "en", False, True, True, "a68d884234907eef", SECOND_NEWLINE,
         stop_at_newline=True),
    Task("lsht", 200, 64, "classification", FEW_SHOT, 0, "zh", False, True, True, "f3edabdf7fae53d6"),
    Task("passage_count", 200, 32, "count", SYNTHETIC, 300, "en", True, False, False,
         "986550b6c61009c6", TRAILING_SPACE),
    Task("passage_retrieval_en", 200, 32, "retrieval", SYNTHETIC, 300, "en", True, False, True,
         "39b96b7fa52bdd2a", TRAILING_SPACE),
    Task("passage_retrieval_zh", 200, 32, "retrieval_zh", SYNTHETIC, 0, "zh", True, False, True,
         "c1e2346e245eb365"),
    Task("lcc", 500, 64, "code_sim", CODE, 300, "code", False, False, False, "6a1f24cf0bb83cd9", TRAILING_NEWLINE),
    Task("repobench-p", 500, 64, "code_sim", CODE, 300, "code", False, False, False,
         "ee9ec182ea5ffeb7", TRAILING_NEWLINE),
)
# fmt: on

_ROWS: dict[str, Task] = {task.name: task for task in _TABLE}


class _Tasks(Mapping[str, Task]):
    """The rows above, then the tasks of other packages by name; each of these is imported when first looked up."""

    def __getitem__(self, name: str) -> Task:
        return _ROWS[name] if name in _ROWS else _registered_task(name)

    def __iter__(self) -> Iterator[str]:
        yield from _ROWS
        yield from _registered()

    def __len__(self) -> int:
        return len(_ROWS) + len(_registered())


TASKS: Mapping[str, Task] = _Tasks()
PUBLISHED: dict[str, Task] = {name: task for name, task in _ROWS.items() if not task.is_own}
LONGBENCH_E_TASKS = tuple(name for name, task in PUBLISHED.items() if task.in_longbench_e)
PAPER_TASKS = ("hotpotqa", "qasper", "gov_report", "multi_news", "multifieldqa_en")


def get_task(name: str) -> Task:
    """Return the task called `name`.

    Raises:
        UserError: there is no such task, and the message gives the nearest names; or another package registers it, and
            it cannot be had from there.
    """
    if name in TASKS:
        return TASKS[name]
    close = difflib.get_close_matches(name, TASKS, n=3)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"The tasks are {', '.join(TASKS)}."
    raise UserError(f"task {name!r} is unknown. {hint}")


@functools.cache
def _registered() -> dict[str, EntryPoint]:
    points: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        if point.name in _ROWS or point.name in points:
            raise UserError(f"entry point {point.value} registers task {point.name}, which exists already. Rename it.")
        points[point.name] = point
    return points


@functools.cache
def _registered_task(name: str) -> Task:
    point = _registered()[name]
    try:
        task = point.load()
    except (ImportError, AttributeError) as error:
        raise UserError(f"task {name} cannot be had from entry point {point.value}: {error}. Mend it.") from error
    if not isinstance(task, Task) or not task.is_own or task.name != name:
        raise UserError(f"entry point {point.value} is {task!r}, must be a Task called {name} with a prompt. Mend it.")
    return task
