"""The 21 tasks of LongBench v1 in the official order, one row of facts each; a row of your own may follow them.

A row with a `prompt` is an own task: it runs when `benchmark.tasks` names it, and LongBench's averages leave it out.

Source of LongBench's 21: THUDM/LongBench at 2e00731f (config/dataset2maxlen.json, config/dataset2prompt.json, pred.py,
eval.py).
"""

from harness.benchmarks.task import CODE, FEW_SHOT, MULTI_DOC, SINGLE_DOC, SUMMARISATION, SYNTHETIC, Task

SECOND_NEWLINE = ("\n{input}", "\n\n{input}")
TRAILING_SPACE = ("", " ")
TRAILING_NEWLINE = ("", "\n")

# fmt: off
TABLE = (
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

PUBLISHED: dict[str, Task] = {task.name: task for task in TABLE if not task.is_own}
LONGBENCH_E_TASKS = tuple(name for name, task in PUBLISHED.items() if task.in_longbench_e)
PAPER_TASKS = ("hotpotqa", "qasper", "gov_report", "multi_news", "multifieldqa_en")
