"""The task of the needle grid."""

from harness.benchmarks.task import NEEDLE, Task

TABLE = (Task("needle", 1, 16, "string_match_all", NEEDLE, prompt="{context}\n\n{input}"),)
NEEDLE_TASKS = ("needle",)
