"""Tables to the letter, from runs whose every score is known."""

import pandas as pd
import pytest

from harness.benchmarks.longbench.tasks import PUBLISHED
from harness.benchmarks.mini.generate import generate
from harness.report.reading.runs import make_groups, read_runs
from harness.report.tables.answer import find_answers, sentences
from harness.report.tables.costs import memory_table, speed_table
from harness.report.tables.differences import NUM_FLIPS, difference_tables, find_differences
from harness.report.tables.grid import Cell, format_number, mark_best
from harness.report.tables.scores import accuracy_table, own_averages_table
from harness.report.tables.writers import escape_latex, latex, markdown, write_table
from tests.report.synthetic import write_run

TASKS = ("qasper", "lcc")
NUM_ROWS = 10


def scores(of_task: dict[str, list[float]]) -> dict[str, float]:
    return {
        f"{task}/{row.row_id}": score
        for task, values in of_task.items()
        for row, score in zip(generate(task, NUM_ROWS, 0), values, strict=True)
    }


FULL = scores({"qasper": [0.5, 0.7] * 5, "lcc": [0.4] * 10})
GOOD = scores({"qasper": [0.4, 0.7] * 5, "lcc": [0.4] * 10})
BAD = scores({"qasper": [0.1, 0.2] * 5, "lcc": [0.2] * 10})


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    parent = tmp_path_factory.mktemp("runs")
    write_run(parent, tasks=TASKS, num_rows=NUM_ROWS, scores=FULL)
    write_run(parent, "good_one", 256, tasks=TASKS, num_rows=NUM_ROWS, scores=GOOD, options={"eps": 0.1})
    write_run(parent, "bad_one", 256, tasks=TASKS, num_rows=NUM_ROWS, scores=BAD)
    write_run(parent, "cut_short", 256, tasks=TASKS, num_rows=NUM_ROWS, scores=GOOD, status="interrupted", num_done=13)
    (only,) = make_groups(read_runs([parent]))
    return only


def differences_of(group):
    return difference_tables(group, find_differences(group))


def grid(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_scores_in_markdown(group):
    table = accuracy_table(group)
    found = [[part.strip() for part in line.strip("|").split("|")] for line in grid(markdown(table))]
    assert [found[0], *found[2:]] == [
        [
            *("Policy", "Budget (tokens)", "all tasks (2/21 tasks, 20/210)"),
            *("English and code tasks (2/16 tasks, 20/160)", "qasper (qa_f1, 10/10)", "lcc (code_sim, 10/10)"),
        ],
        ["full", "-", *["50.00 [47.0, 53.0]"] * 2, "60.00 [54.0, 66.0]", "40.00 [40.0, 40.0]"],
        ["bad_one", "256", *["17.50 [16.0, 19.0]"] * 2, "15.00 [12.0, 18.0]", "20.00 [20.0, 20.0]"],
        [
            *("cut_short † 13/20", "256", "47.50 (2/21 tasks, 13/210)", "47.50 (2/16 tasks, 13/160)"),
            *("55.00 [46.0, 64.0]", "40.00 (3/10)"),
        ],
        [
            *("good_one", "256", "**47.50** [43.0, 52.0]", "**47.50** [43.0, 52.0]"),
            *("**55.00** [46.0, 64.0]", "**40.00** [40.0, 40.0]"),
        ],
    ]


def test_scores_in_latex(group):
    lines = latex(accuracy_table(group)).splitlines()
    assert lines[:3] == [
        r"\begin{table*}[t]",
        r"\centering",
        r"\caption{Accuracy, tiny on longbench\_mini.}",
    ]
    start = lines.index(r"\toprule")
    assert lines[start - 1 : start + 2 : 2] == [r"\begin{tabular}{@{}lrrrrr@{}}", lines[start + 1]]
    assert lines[start + 1].startswith(r"Policy & \begin{tabular}[b]{@{}r@{}}Budget\\{\tiny tokens}\end{tabular} & ")
    assert lines[start + 1].endswith(
        r"& \begin{tabular}[b]{@{}r@{}}lcc\\{\tiny code\_sim}\\{\tiny 10/10}\end{tabular} \\"
    )
    rows = {line.split(" ")[0]: line for line in lines[start + 3 : -3]}
    assert list(rows) == ["full", r"bad\_one", r"cut\_short", r"good\_one", r"\bottomrule"]
    assert rows["full"].endswith(r"& 60.00 {\tiny [54.0, 66.0]} & 40.00 {\tiny [40.0, 40.0]} \\")
    assert rows[r"cut\_short"].startswith(r"cut\_short $\dagger$ 13/20 & 256 & ")
    assert r"& \textbf{55.00} {\tiny [46.0, 64.0]} & " in rows[r"good\_one"]
    assert "these are not LongBench scores. limit=10: the first 10 rows of each task only." in lines[-2]


def test_many_tasks_are_not_printed_with_intervals(tmp_path):
    write_run(tmp_path, tasks=tuple(PUBLISHED), num_rows=1)
    (group,) = make_groups(read_runs([tmp_path]))
    assert [column.title for column in accuracy_table(group).columns if column.in_print][2:] == [
        "all tasks",
        "English and code tasks",
    ]


def test_categories_and_tasks_keep_longbench_order(tmp_path):
    write_run(tmp_path, tasks=("repobench-p", "2wikimqa", "gov_report", "narrativeqa"))
    (group,) = make_groups(read_runs([tmp_path]))
    titles = [column.title for column in accuracy_table(group).columns]
    assert titles[2:] == [
        *("all tasks", "English and code tasks", "narrativeqa", "2wikimqa", "gov_report", "repobench-p"),
    ]
    assert [column.title for column in own_averages_table(group).columns][2:] == [
        *("all tasks", "single-doc QA", "multi-doc QA", "summarisation", "code"),
    ]


def test_an_unfinished_run_is_marked_counted_and_never_best(group):
    table = accuracy_table(group)
    row = next(row for row in table.rows if row[0].value == "cut_short")
    assert row[0].text == "cut_short † 13/20"
    assert row[-1].whole == "40.00 (3/10)"
    assert [cell.mark for cell in row] == [""] * len(row)
    assert "cut_short @ 256 [interrupted]: 13 of 20 samples scored, not a finished run." in table.notes
    partial = {record["name"]: record["partial"] for record in table.records if record["policy"] == "cut_short"}
    assert set(partial.values()) == {True}


def test_captions_tell_conditions_and_parameters(group):
    caption = accuracy_table(group).caption
    assert "float32, prompts up to 2048 tokens, Test CPU, 2 cores, vllm 0.32.0" in caption
    assert "Parameters: full (none); bad_one (none); cut_short (none); good_one (eps=0.1)." in caption


def test_csv_holds_every_score_with_interval_n_and_metric(group, tmp_path):
    write_table(accuracy_table(group), tmp_path)
    frame = pd.read_csv(tmp_path / "accuracy-tiny-longbench_mini-limit10.csv")
    row = frame[(frame.policy == "good_one") & (frame.name == "qasper")].iloc[0]
    assert (row.score, row.ci_low, row.ci_high, row.n, row.expected) == (55.0, 46.0, 64.0, 10, 10)
    assert (row.metric, row.options, row.limit) == ("qa_f1", "eps=0.1", 10)


def test_differences_are_paired_and_adjusted_over_the_whole_table(group):
    averages, tasks, pairs = differences_of(group)
    assert [[cell.text for cell in (*row[:5], *row[7:10])] for row in tasks.rows] == [
        ["bad_one", "256", "qasper", "−45.00 *", "[−48.00, −42.00]", "60.00", "15.00", "10"],
        ["good_one", "256", "qasper", "−5.00", "[−8.00, −2.00]", "60.00", "55.00", "10"],
        ["bad_one", "256", "lcc", "−20.00 *", "[−20.00, −20.00]", "40.00", "20.00", "10"],
        ["good_one", "256", "lcc", "0.00", "[0.00, 0.00]", "40.00", "40.00", "10"],
    ]
    ((first, _, second, difference, *_),) = pairs.rows
    assert (first.text, second.text, difference.text) == ("bad_one", "good_one", "−30.00 *")
    assert [row[-1].text for row in tasks.rows] == ["100 / 0 / 0", "50 / 50 / 0", "100 / 0 / 0", "0 / 100 / 0"]
    by_name = {(record["policy"], record["name"]): record for record in tasks.records}
    smallest, others = by_name["bad_one", "qasper"], by_name["good_one", "lcc"]
    assert smallest["p_holm"] == pytest.approx(4 * min(record["p"] for record in tasks.records))
    assert others["p_holm"] == 1.0
    assert "over all tests of this table (4)" in tasks.caption
    assert [row[2].text for row in averages.rows] == ["mean of 2 tasks"] * 2


@pytest.mark.parametrize(("num_policies", "is_said"), [(12, False), (13, True)])
def test_a_table_that_cannot_mark_anything_says_so(tmp_path, num_policies, is_said):
    """Ten contexts give 2/1024 at least: 25 tests (two are a policy's) are still below 0.05, 26 are not."""
    write_run(tmp_path, tasks=TASKS, num_rows=NUM_ROWS, scores=FULL)
    for number in range(num_policies):
        write_run(tmp_path, f"policy_{number}", 256, tasks=TASKS, num_rows=NUM_ROWS, scores=BAD)
    (only,) = make_groups(read_runs([tmp_path]))
    averages, tasks, *_ = differences_of(only)
    said = [note for note in tasks.notes if "no difference can be significant" in note]
    if is_said:
        assert said == [
            "With n = 10 and 26 tests no difference can be significant: the smallest p that a test can give is 0.002, "
            "times 26 0.051."
        ]
    else:
        assert said == []
    assert any("*" in cell.text for row in tasks.rows for cell in row) == (not is_said)
    assert not any("no difference can be significant" in note for note in averages.notes)


def test_a_large_table_can_still_mark_a_difference(tmp_path):
    """504 tests (12 policies, 2 budgets, 21 tasks) with enough samples in each."""
    assert 504 / (1 + NUM_FLIPS) < 0.05
    higher = {f"qasper/{row.row_id}": 0.9 for row in generate("qasper", 40, 0)}
    write_run(tmp_path, tasks=("qasper",), num_rows=40, scores=higher)
    write_run(tmp_path, "window", 256, tasks=("qasper",), num_rows=40, scores=dict.fromkeys(higher, 0.1))
    (only,) = make_groups(read_runs([tmp_path]))
    (record,) = differences_of(only)[0].records
    assert record["p"] == pytest.approx(1 / (1 + NUM_FLIPS))
    assert [cell.text for cell in differences_of(only)[0].rows[0]][5:7] == ["< 0.0001", "< 0.0001"]


def test_runs_on_other_samples_are_not_paired(group, tmp_path):
    write_run(tmp_path, num_done=47)
    write_run(tmp_path, "window", 256)
    (other,) = make_groups(read_runs([tmp_path]))
    averages, tasks = differences_of(other)
    assert (averages.rows, tasks.rows) == ([], [])
    assert any(note.startswith("window @ 256 is not compared: the runs hold different samples") for note in tasks.notes)


def test_a_group_without_full_cache_has_no_differences(tmp_path):
    write_run(tmp_path, "window", 256)
    (alone,) = make_groups(read_runs([tmp_path]))
    assert differences_of(alone) == []


def cells_of(table, policy: str) -> dict[str, str]:
    row = next(row for row in table.rows if row[0].value == policy)
    return {column.title: cell.text for column, cell in zip(table.columns, row, strict=True)}


def test_memory_comes_from_the_pool_and_is_held_against_the_full_cache(group):
    cells = cells_of(memory_table(group), "good_one")
    assert cells == {
        "Policy": "good_one",
        "Budget": "256",
        "Block": "32",
        "Peak blocks": "60",
        "In prefill": "-",
        "In decode": "-",
        "Peak KV": "15.0",
        "Mean blocks": "16.2",
        "Mean KV": "4.0",
        "Blocks a request": "8.0",
        "KV a request": "2.0",
        "Resident, peak": "1000",
        "Resident, mean peak": "1000",
        "Resident, end": "256",
        "Left, end": "25.1",
        "To full": "20.0",
    }
    assert cells_of(memory_table(group), "full")["To full"] == "-"


def test_what_is_not_freed_stands_apart_from_what_is(tmp_path):
    write_run(tmp_path, tasks=TASKS)
    thin = {"think": 0.4, "think_window": 32}
    write_run(tmp_path, "window", 256, tasks=TASKS, options=thin)
    write_run(tmp_path, "window", 256, tasks=TASKS)
    (group,) = make_groups(read_runs([tmp_path]))
    table = memory_table(group)
    titles = [column.title for column in table.columns]
    assert titles[3:6] == ["To full", "Nominal saving", "Resident, peak"], "no run only reads less"
    assert {(row[0].value, row[3].text, row[4].text) for row in table.rows} == {
        ("full", "-", "-"),
        ("window (think=0.4, think_window=32)", "20.0", "20.0"),
        ("window", "20.0", "-"),
    }
    assert "Nothing of it is freed, and no other figure counts it." in table.caption
    _, plain, thinned = group.runs
    thinned.metrics["memory"]["mean_read_share"] = 0.125
    again = memory_table(group)
    assert [column.title for column in again.columns][3:6] == ["To full", "Read", "Nominal saving"]
    assert [row[4].text for row in again.rows] == ["-", "-", "12.5"]
    assert [record["read_share"] for record in again.records] == [None, None, 12.5]
    said = dict(sentences(find_answers(group, find_differences(group))))
    assert "20 % of the memory (up to 20 % of the memory saved in name only, not freed)" in said[thinned.series]
    assert "in name only" not in said[plain.series]


def test_peaks_in_prefill_and_decode_are_told_apart_where_recorded(tmp_path):
    folder = write_run(tmp_path, usage=False)
    (folder / "block_usage.csv").write_text(
        "session,t_s,blocks,running,prefilling\n1,0.0,30,2,1\n1,1.0,12,2,0\n1,1.5,25,0,0\n1,2.0,10,2,0\n"
    )
    (group,) = make_groups(read_runs([tmp_path]))
    cells = cells_of(memory_table(group), "full")
    assert (cells["In prefill"], cells["In decode"]) == ("30", "12"), "blocks handed back are no step"
    assert cells["Blocks a request"] == "12.0"


def test_speed_holds_throughput_percentiles_and_evictions(group):
    cells = cells_of(speed_table(group), "good_one")
    assert {title: cells[title] for title in ("Output", "Total", "Samples", "TTFT p50", "TPOT p90", "E2E p99")} == {
        "Output": "80.0",
        "Total": "4080.0",
        "Samples": "4.000",
        "TTFT p50": "0.50",
        "TPOT p90": "100.00",
        "E2E p99": "2.40",
    }
    assert (cells["Evicted from"], cells["Evictions"], cells["Compaction"], cells["Preemptions"]) == (
        "100",
        "20",
        "5.00",
        "0",
    )


def test_compaction_is_not_sold_as_the_cost_of_a_policy(group):
    caption = speed_table(group).caption
    assert "Compaction: time in which evictions were carried out, as the host sees it (on a GPU the time to" in caption
    assert "What a policy watches during the forward passes (attention, queries) is not in it" in caption


def test_only_the_largest_is_best_and_only_its_interval_makes_others_near():
    cells = [Cell("a", 9.0, "", 8.0, 10.0), Cell("b", 8.0, "", 1.0, 20.0), Cell("c", 7.9, "", 0.0, 30.0), Cell("d")]
    assert [cell.mark for cell in mark_best(cells, [True] * 4)] == ["best", "near", "", ""]
    assert [cell.mark for cell in mark_best(cells, [False, True, True, True])] == ["", "best", "near", ""]
    assert [cell.mark for cell in mark_best(cells, [True, False, False, False])] == [""] * 4


def test_a_zero_has_no_sign():
    assert [format_number(value, 1, sign=True) for value in (-0.01, 0.2, -0.2)] == ["0.0", "+0.2", "−0.2"]


def test_latex_prints_every_special_character():
    assert escape_latex(r"a_b 5% {x} #1 ~ ^ \ ± ≈ <") == (
        r"a\_b 5\% \{x\} \#1 \textasciitilde{} \textasciicircum{} \textbackslash{} $\pm$ $\approx$ $<$"
    )
