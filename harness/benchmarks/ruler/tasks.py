"""The 13 tasks of RULER (Hsieh et al., arXiv 2404.06654) under the names they have in lm-eval, in its order.

The text that lm-eval's generators make is the whole prompt; what they put before the answer is `Row.answer_prefix`.
"""

from harness.benchmarks.task import RULER, Task

NUM_ROWS = 500  # a length, as RULER and lm-eval make


def _task(name: str, max_new_tokens: int, metric: str = "string_match_all") -> Task:
    return Task(name, NUM_ROWS, max_new_tokens, metric, RULER, needs_input=False, prompt="{context}")


TABLE = (
    *(_task(f"niah_single_{number}", 128) for number in (1, 2, 3)),
    *(_task(f"niah_multikey_{number}", 128) for number in (1, 2, 3)),
    _task("niah_multiquery", 128),
    _task("niah_multivalue", 128),
    _task("ruler_vt", 30),
    _task("ruler_cwe", 120),
    _task("ruler_fwe", 50),
    _task("ruler_qa_squad", 32, "string_match_part"),
    _task("ruler_qa_hotpot", 32, "string_match_part"),
)
RULER_TASKS = tuple(task.name for task in TABLE)
QA_TASKS = ("ruler_qa_squad", "ruler_qa_hotpot")
