"""The paper's numbers are as documented, and only what fits their conditions stands beside them."""

from pathlib import Path

import pytest

from harness.benchmarks.tasks import TASKS
from harness.errors import UserError
from harness.report.reading.load_tests import read_bench, settings
from harness.report.reading.runs import read_runs
from harness.report.tables.load_tests import bench_table
from harness.report.tables.paper import COLUMNS, READ_FROM, paper_table, read_paper
from tests.report.synthetic import bench_rows, write_bench, write_run

PAPER = Path(__file__).resolve().parents[2] / "results" / "paper"
LOAD = {"num_requests": 64, "input_tokens": 1024, "output_tokens": 8192}
LOCAL = {"name": "longbench", "source": "local", "limit": None}


def measured(known, runs=(), bench=()) -> list[str]:
    table = paper_table(known, runs, bench)
    return [row[8].text for row in table.rows]


def row_of(known, **wanted):
    (found,) = [one for one in known if all(getattr(one, key) == value for key, value in wanted.items())]
    return found


def test_numbers_are_those_of_the_digest_with_source_and_doubt():
    known = read_paper(PAPER)
    score = row_of(known, method="paged_eviction", dataset="gov_report", budget=1024)
    assert (score.value, score.read_from, score.source, score.unit) == (24.5, READ_FROM["plot"], "N1 N2 N3", "score")
    gains = [one for one in known if one.metric == "throughput gain"]
    assert [(one.value, one.baseline, one.read_from) for one in gains] == [
        (37.0, "full", READ_FROM["text"]),
        (39.0, "inverse_key_l2", READ_FROM["text"]),
    ]
    assert all("the sources disagree" in one.note for one in known if one.metric == "latency reduction")
    titles = [column.title for column in paper_table(known, [], []).columns]
    read_from = [row[titles.index("Read from")].text for row in paper_table(known, [], []).rows]
    assert set(read_from) == set(READ_FROM.values())
    latencies = {one.model: one.value for one in known if one.metric == "latency reduction"}
    assert latencies == {"llama3.2-1b": 12.0, "llama3.2-3b": 10.0, "llama3.1-8b": 11.0}


def test_every_row_names_known_models_tasks_and_policies_and_its_source():
    root = PAPER.parents[1] / "conf"
    models, policies = ({path.stem for path in (root / part).glob("*.yaml")} for part in ("model", "policy"))
    for one in read_paper(PAPER):
        assert one.source
        assert set(one.model.split()) <= models
        assert {one.method, one.baseline or "full"} <= policies
        assert one.metric != "rouge" or one.dataset in TASKS
        assert (one.value, one.value_max) != (None, None)


def test_a_score_is_measured_by_a_run_of_the_same_model_method_and_budget(tmp_path):
    known = [row_of(read_paper(PAPER), method="paged_eviction", dataset="gov_report", budget=1024)]
    fitting = {"policy": "paged_eviction", "budget": 1024, "model": "llama3.2-1b", "tasks": ("gov_report",)}
    local = {
        "benchmark": LOCAL,
        "num_rows": 10,
        "scores": {f"gov_report/mini-gov_report-0-{n}": 0.25 for n in range(10)},
    }
    write_run(tmp_path / "fits", **fitting, **local)
    write_run(tmp_path / "mini", **fitting, num_rows=10)
    write_run(tmp_path / "budget", **fitting | {"budget": 512}, **local)
    write_run(tmp_path / "model", **fitting | {"model": "llama3.2-3b"}, **local)
    write_run(tmp_path / "stopped", **fitting, **local, status="interrupted")
    write_run(tmp_path / "short", **fitting, benchmark=LOCAL | {"max_prompt_tokens": 5000}, num_rows=10)
    write_run(tmp_path / "engine", **fitting, **local, engine={"name": "kvpress"})
    assert measured(known, read_runs([tmp_path / "fits"])) == ["25.00 (10/10)"]
    assert measured(known, read_runs([path for path in tmp_path.iterdir() if path.name != "fits"])) == ["not measured"]


def test_variants_of_a_method_are_rows_of_their_own_that_say_which(tmp_path):
    known = [row_of(read_paper(PAPER), method="paged_eviction", dataset="gov_report", budget=1024)]
    fitting = {"policy": "paged_eviction", "budget": 1024, "model": "llama3.2-1b", "tasks": ("gov_report",)}
    rows = [f"gov_report/mini-gov_report-0-{n}" for n in range(12)]
    literal, protected = {"protect_first": 0}, {"protect_first": 32}
    for options, num_rows, score in ((literal, 10, 0.25), (protected, 12, 0.5), (protected, 11, 0.75)):
        scores = dict.fromkeys(rows[:num_rows], score)
        folder = tmp_path / str(num_rows)
        write_run(folder, **fitting, benchmark=LOCAL, num_rows=num_rows, scores=scores, options=options, block_size=16)
    write_run(tmp_path / "32", **fitting, benchmark=LOCAL, options=literal, scores=dict.fromkeys(rows, 1.0))
    table = paper_table(known, read_runs([tmp_path]), [])
    found = {row[9].text.split(": ")[1]: row[8].text for row in table.rows}
    assert found == {
        "paged_eviction (protect_first=0), prompts up to 2048 tokens, float32, block 16": "25.00 (10/10)",
        "paged_eviction (protect_first=32), prompts up to 2048 tokens, float32, block 16": "50.00 (12/12)",
        "paged_eviction (protect_first=0), prompts up to 2048 tokens, float32, block 32": "100.00 (12/12)",
    }
    assert [row[7].text for row in table.rows] == ["~24.5"] * 3
    assert len(table.records) == 3


def test_both_forms_of_the_papers_method_stand_beside_its_number_by_name(tmp_path):
    known = [row_of(read_paper(PAPER), method="paged_eviction", dataset="gov_report", budget=1024)]
    scores = {f"gov_report/mini-gov_report-0-{n}": 0.25 for n in range(10)}
    for policy in ("paged_eviction", "paged_eviction_literal", "keydiff"):
        settings = {"policy": policy, "budget": 1024, "model": "llama3.2-1b", "tasks": ("gov_report",)}
        write_run(tmp_path / policy, **settings, benchmark=LOCAL, num_rows=10, scores=scores, block_size=16)
    table = paper_table(known, read_runs([tmp_path]), [])
    assert {row[9].text.split(": ")[1] for row in table.rows} == {
        "paged_eviction (no options), prompts up to 2048 tokens, float32, block 16",
        "paged_eviction_literal (no options), prompts up to 2048 tokens, float32, block 16",
    }


def test_latency_is_that_of_the_budget_and_the_load_of_the_authors_script(tmp_path):
    known = [one for one in read_paper(PAPER) if one.metric == "latency reduction" and one.model == "llama3.2-1b"]
    rows = []
    for row in bench_rows("llama3.2-1b", block_size=16):
        policy, budget = {None: ("full", None), 128: ("paged_eviction", 128), 256: ("paged_eviction", 4096)}[
            row["budget"]
        ]
        rows.append(row | LOAD | {"policy": policy, "budget": budget})
    small = [row for row in rows if row["budget"] != 4096]
    write_bench(tmp_path / "both", rows)
    write_bench(tmp_path / "small", small)
    write_bench(tmp_path / "other", [row | {"output_tokens": 256} for row in rows])
    assert measured(known, bench=read_bench([tmp_path / "both"])) == ["+33.3"]
    assert measured(known, bench=read_bench([tmp_path / "small"])) == ["not measured"]
    assert measured(known, bench=read_bench([tmp_path / "other"])) == ["not measured"]


def test_a_budget_that_the_paper_does_not_tell_gives_a_row_for_each_of_ours(tmp_path):
    known = [row_of(read_paper(PAPER), method="inverse_key_l2", metric="throughput")]
    rows = [
        row | LOAD | {"policy": "inverse_key_l2"} for row in bench_rows("llama3.2-1b", block_size=16) if row["budget"]
    ]
    table = paper_table(known, [], read_bench([write_bench(tmp_path, rows)]))
    assert [row[8].text for row in table.rows] == ["440", "330"]
    assert ["inverse_key_l2 @ 128" in table.rows[0][9].text, "inverse_key_l2 @ 256" in table.rows[1][9].text] == [
        True
    ] * 2


def test_throughput_and_gain_come_from_load_tests_of_the_same_load(tmp_path):
    known = [one for one in read_paper(PAPER) if one.file == "throughput"]
    rows = []
    for row in bench_rows("llama3.2-1b", block_size=16):
        policy, budget = {"window": ("paged_eviction", 1024), "full": ("full", None)}[row["policy"]]
        if row["budget"] != 256:
            rows.append(row | LOAD | {"policy": policy, "budget": budget})
    write_bench(tmp_path / "same", rows)
    write_bench(tmp_path / "other", [row | {"input_tokens": 512} for row in rows])
    assert measured(known, bench=read_bench([tmp_path / "same"])) == [
        *("440", "220", "not measured"),
        *("+100.0", "not measured"),
    ]
    assert set(measured(known, bench=read_bench([tmp_path / "other"]))) == {"not measured"}


def test_claims_without_a_single_condition_are_shown_and_not_measured():
    claims = [one for one in read_paper(PAPER) if one.file == "claims"]
    assert [row[7].text for row in paper_table(claims, [], []).rows] == [
        *("15 to 20", "15 to 20", "3 to 5", "up to 3.1", "up to 20", "up to 20"),
    ]
    assert set(measured(claims)) == {"not measured"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", "has the columns a, b"),
        (",".join(COLUMNS) + "\nm,d,x,p,many,,,1,,score,plot,N1,\n", r"numbers\.csv cannot be read .*many"),
        (
            ",".join(COLUMNS) + "\nm,d,x,p,,,,1,,score,maybe,N1,\n",
            r"numbers\.csv has read_from=maybe\. It must",
        ),
    ],
)
def test_wrong_files_are_refused_by_name(tmp_path, content, message):
    (tmp_path / "numbers.csv").write_text(content)
    with pytest.raises(UserError, match=message):
        read_paper(tmp_path)


def test_a_folder_without_numbers_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no CSV file"):
        read_paper(tmp_path)


def test_ratios_are_taken_repeat_by_repeat(tmp_path):
    rows = bench_rows()
    for row in rows:
        if row["policy"] == "full":
            row["output_tok_s"] = (100, 50, 200)[row["repeat"]]
    write_bench(tmp_path, rows)
    bench = read_bench([tmp_path])
    assert [one.ratios("output_tok_s") for one in settings(bench)[1:2]] == [
        [2.0, pytest.approx(4.4), pytest.approx(1.2)]
    ]
    table = bench_table(bench)
    shown = [[cell.whole for cell in row] for row in table.rows]
    assert shown[0][:7] == ["full", "-", "bench", "tiny", "32", "12 × 384 in, 256 out", "3"]
    assert shown[0][7:10] == ["100.0", "220.0", "-"]
    assert shown[1][6:] == [
        *("3", "220.0", "440.0", "2.00 (1.20 to 4.40)", "1.000", "2.000", "45.5", "68.2"),
        *("40", "-", "10.0", "3.00", "0"),
    ]


def test_a_bench_file_that_is_no_list_of_rows_is_refused(tmp_path):
    write_bench(tmp_path, [{"policy": "full"}])
    with pytest.raises(UserError, match=r"bench\.json is no list of load-test rows"):
        read_bench([tmp_path])
