"""The 21 tasks of LongBench v1: one row of facts each, in the official order.

Source: THUDM/LongBench at 2e00731f (config/dataset2maxlen.json, config/dataset2prompt.json, pred.py, eval.py).
"""

import difflib
from dataclasses import dataclass

from harness.errors import UserError

SINGLE_DOC = "single-doc QA"
MULTI_DOC = "multi-doc QA"
SUMMARISATION = "summarisation"
FEW_SHOT = "few-shot"
SYNTHETIC = "synthetic"
CODE = "code"

CATEGORIES = (SINGLE_DOC, MULTI_DOC, SUMMARISATION, FEW_SHOT, SYNTHETIC, CODE)

SECOND_NEWLINE = ("\n{input}", "\n\n{input}")
TRAILING_SPACE = ("", " ")
TRAILING_NEWLINE = ("", "\n")


@dataclass(frozen=True)
class Task:
    """What is fixed about one task.

    Attributes:
        name: the published name, also the stem of the file of rows.
        category: one of `CATEGORIES`.
        num_rows: rows of the published test set.
        num_rows_e: rows of the task in LongBench-E, 0 when it is not part of it (task.md of the data set).
        max_new_tokens: tokens to generate.
        metric: name of the official metric.
        language: "en", "zh" or "code".
        chat_template: whether a chat model gets its chat template around the prompt.
        first_line_only: whether only the first line of a prediction is scored.
        needs_input: whether the prompt is pointless without the row's `input`.
        prompt_sha256: first 16 hex digits of the SHA-256 of the official prompt template (UTF-8).
        prompt_fix: (end as lm-eval has it, official end) where lm-eval's text lacks white space, else None.
    """

    name: str
    category: str
    num_rows: int
    num_rows_e: int
    max_new_tokens: int
    metric: str
    language: str
    chat_template: bool
    first_line_only: bool
    needs_input: bool
    prompt_sha256: str
    prompt_fix: tuple[str, str] | None = None

    @property
    def in_longbench_e(self) -> bool:
        """Whether LongBench-E has this task too."""
        return self.num_rows_e > 0


# fmt: off
_TABLE = (
    #    name, category, rows, the same of LongBench-E, new tokens, metric, language, chat template, first line, input
    Task("narrativeqa", SINGLE_DOC, 200, 0, 128, "qa_f1", "en", True, False, True, "aada7ed24b06abac"),
    Task("qasper", SINGLE_DOC, 200, 224, 128, "qa_f1", "en", True, False, True, "0fbdd123fe7f83d6"),
    Task("multifieldqa_en", SINGLE_DOC, 150, 150, 64, "qa_f1", "en", True, False, True, "20b4666a2de8a1f7"),
    Task("multifieldqa_zh", SINGLE_DOC, 200, 0, 64, "qa_f1_zh", "zh", True, False, True, "344b3a4e557cd547"),
    Task("hotpotqa", MULTI_DOC, 200, 300, 32, "qa_f1", "en", True, False, True, "9ec4ae308865bd0c"),
    Task("2wikimqa", MULTI_DOC, 200, 300, 32, "qa_f1", "en", True, False, True, "9ec4ae308865bd0c"),
    Task("musique", MULTI_DOC, 200, 0, 32, "qa_f1", "en", True, False, True, "9ec4ae308865bd0c"),
    Task("dureader", MULTI_DOC, 200, 0, 128, "rouge_zh", "zh", True, False, True, "ae53329f51b17908"),
    Task("gov_report", SUMMARISATION, 200, 300, 512, "rouge", "en", True, False, False, "91c25d585b189ced"),
    Task("qmsum", SUMMARISATION, 200, 0, 512, "rouge", "en", True, False, True, "dca23b678fe0183b"),
    Task("multi_news", SUMMARISATION, 200, 294, 512, "rouge", "en", True, False, False, "2af3f28c40b902e6"),
    Task("vcsum", SUMMARISATION, 200, 0, 512, "rouge_zh", "zh", True, False, False, "3e5d8241bc9b512e"),
    Task("trec", FEW_SHOT, 200, 300, 64, "classification", "en", False, True, True, "0eff8bebdba99d91"),
    Task("triviaqa", FEW_SHOT, 200, 300, 32, "qa_f1", "en", False, True, True, "00a802e6377e72fc", SECOND_NEWLINE),
    Task("samsum", FEW_SHOT, 200, 300, 128, "rouge", "en", False, True, True, "a68d884234907eef", SECOND_NEWLINE),
    Task("lsht", FEW_SHOT, 200, 0, 64, "classification", "zh", False, True, True, "f3edabdf7fae53d6"),
    Task("passage_count", SYNTHETIC, 200, 300, 32, "count", "en", True, False, False,
         "986550b6c61009c6", TRAILING_SPACE),
    Task("passage_retrieval_en", SYNTHETIC, 200, 300, 32, "retrieval", "en", True, False, True,
         "39b96b7fa52bdd2a", TRAILING_SPACE),
    Task("passage_retrieval_zh", SYNTHETIC, 200, 0, 32, "retrieval_zh", "zh", True, False, True,
         "c1e2346e245eb365"),
    Task("lcc", CODE, 500, 300, 64, "code_sim", "code", False, False, False, "6a1f24cf0bb83cd9", TRAILING_NEWLINE),
    Task("repobench-p", CODE, 500, 300, 64, "code_sim", "code", False, False, False,
         "ee9ec182ea5ffeb7", TRAILING_NEWLINE),
)
# fmt: on

TASKS: dict[str, Task] = {task.name: task for task in _TABLE}
LONGBENCH_E_TASKS = tuple(task.name for task in _TABLE if task.in_longbench_e)
PAPER_TASKS = ("hotpotqa", "qasper", "gov_report", "multi_news", "multifieldqa_en")


def get_task(name: str) -> Task:
    """Return the task called `name`.

    Raises:
        UserError: there is no such task; the message gives the nearest names.
    """
    if name in TASKS:
        return TASKS[name]
    close = difflib.get_close_matches(name, TASKS, n=3)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"The tasks are {', '.join(TASKS)}."
    raise UserError(f"task {name!r} is not a LongBench task. {hint}")
