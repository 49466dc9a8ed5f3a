"""What runs of several engines, machines and options are held against, and what is said of them."""

import csv
from dataclasses import replace

import pytest

from harness.benchmarks.mini.generate import generate
from harness.compare import main as compare
from harness.report.figures.all import report_looks
from harness.report.figures.speed import throughput_figures
from harness.report.reading.runs import Group, make_groups, read_runs
from harness.report.tables.conditions import BUDGET_MEANING, setting, warnings
from harness.report.tables.costs import memory_table, speed_table
from harness.report.tables.differences import Differences, difference_tables, find_differences
from harness.report.tables.scores import accuracy_table
from harness.store.manifest import read_manifest, write_manifest
from tests.report.synthetic import write_run

KVPRESS = {"name": "kvpress"}


def group_of(parent) -> Group:
    (only,) = make_groups(read_runs([parent]))
    return only


def differences_of(group: Group):
    found: Differences = find_differences(group)
    return difference_tables(group, found)[:2]


def run_of(group: Group, policy: str, engine: str):
    (found,) = [run for run in group.runs if (run.policy, run.engine) == (policy, engine)]
    return found


def to_full(group: Group, label: str) -> str:
    table = memory_table(group)
    (row,) = [row for run, row in zip(group.runs, table.rows, strict=True) if run.label == label]
    return row[[column.title for column in table.columns].index("To full")].text


def test_memory_is_held_against_the_full_cache_of_the_same_engine_only(tmp_path):
    write_run(tmp_path, engine=KVPRESS)
    write_run(tmp_path, "window", 256)
    write_run(tmp_path, "random", 256, engine=KVPRESS)
    group = group_of(tmp_path)
    assert to_full(group, "window (engine=vllm) @ 256") == "-"
    assert to_full(group, "random (engine=kvpress) @ 256") == "20.0"


def test_memory_is_held_against_as_many_requests_at_once_only(tmp_path):
    write_run(tmp_path)
    write_run(tmp_path, "window", 256, engine={"max_num_seqs": 4})
    write_run(tmp_path, "random", 256)
    group = group_of(tmp_path)
    assert to_full(group, "window (max_num_seqs=4) @ 256") == "-"
    assert to_full(group, "random (max_num_seqs=16) @ 256") == "20.0"


@pytest.mark.parametrize("first", ["vllm", "kvpress"])
def test_scores_are_rather_held_against_the_full_cache_of_the_same_engine(tmp_path, first):
    for engine in sorted(("vllm", "kvpress"), key=first.__ne__):
        write_run(tmp_path, engine={"name": engine})
        write_run(tmp_path, "window", 256, engine={"name": engine}, block_size=64)
    group = group_of(tmp_path)
    for engine in ("vllm", "kvpress"):
        assert group.baseline(run_of(group, "window", engine)) is run_of(group, "full", engine)
    assert not any("is held against" in note for note in differences_of(group)[0].notes)


def test_scores_held_against_another_engine_say_so(tmp_path):
    write_run(tmp_path, engine=KVPRESS)
    write_run(tmp_path, "window", 256)
    averages, tasks = differences_of(group_of(tmp_path))
    note = "window (engine=vllm) @ 256 is held against the full cache of engine=kvpress, its own has none."
    assert note in averages.notes
    assert note in tasks.notes


def test_blocks_are_said_to_come_from_where_they_come_from(tmp_path):
    write_run(tmp_path / "vllm")
    write_run(tmp_path / "peers", engine={"name": "hf"})
    write_run(tmp_path / "peers", "window", 256, engine=KVPRESS)
    pool = "read from vLLM's pool"
    counted = "counted from the cache lengths of the only request that runs (engine=hf, kvpress)"
    assert f"after every step {pool}." in memory_table(group_of(tmp_path / "vllm")).caption
    assert f"after every step {counted}." in memory_table(group_of(tmp_path / "peers")).caption
    assert f"after every step {pool}, {counted}." in memory_table(group_of(tmp_path)).caption


def test_all_machines_are_named_and_times_of_several_are_said_not_to_compare(tmp_path):
    write_run(tmp_path, cpu="Fast CPU")
    write_run(tmp_path, "window", 256, cpu="Slow CPU")
    group = group_of(tmp_path)
    assert "Fast CPU, 2 cores and Slow CPU, 2 cores" in setting(group)
    note = "The runs were made on different machines (column Machine of Runs): their times do not compare."
    assert note in speed_table(group).notes
    assert note not in memory_table(group).notes
    assert note in throughput_figures([group], [], report_looks([group], []))[1].caption


def test_runs_slowed_by_recording_positions_are_named_where_speed_is_shown(tmp_path):
    write_run(tmp_path, retention=True)
    write_run(tmp_path, "window", 256, retention=True)
    write_run(tmp_path, "random", 256)
    (note,) = [note for note in speed_table(group_of(tmp_path)).notes if "record_retention" in note]
    assert note.endswith("slows evicting runs, and the full cache records nothing: window @ 256.")


def test_every_option_set_of_a_policy_is_told(tmp_path):
    write_run(tmp_path, "window", 256, options={"sinks": 4})
    write_run(tmp_path, "window", 256, options={"sinks": 0})
    write_run(tmp_path, "window", 512, options={"sinks": 0})
    assert "Parameters: window (sinks=0); window (sinks=4)." in accuracy_table(group_of(tmp_path)).caption


def test_the_budget_is_not_said_to_hold_all_tokens_where_only_prompts_are_evicted():
    for policy in ("snapkv", "chunkkv", "expected_attention", "lagkv"):
        assert policy in BUDGET_MEANING
    assert "tokens of the prompt, and generated ones come on top" in BUDGET_MEANING


def test_a_mean_is_the_same_number_in_all_tables(tmp_path):
    """Tasks of 13.404, 13.404 and 13.409: their mean rounds to 13.41, that of their published two decimals to 13.40."""
    num_higher = {"qasper": 4, "hotpotqa": 4, "lcc": 9}
    scores = {
        f"{task}/{row.row_id}": 0.1341 if number < higher else 0.134
        for task, higher in num_higher.items()
        for number, row in enumerate(generate(task, 10, 0))
    }
    for policy, budget in (("full", None), ("window", 256)):
        write_run(tmp_path, policy, budget, tasks=tuple(num_higher), num_rows=10, scores=scores)
    group = group_of(tmp_path)
    averages, tasks = differences_of(group)
    accuracy = accuracy_table(group)
    texts = [cell.text for cell in accuracy.rows[0]]
    shown = dict(zip([column.title for column in accuracy.columns], texts, strict=True))
    (mean,) = (dict(zip([c.title for c in averages.columns], row, strict=True)) for row in averages.rows)
    assert [mean[key].text for key in ("Full cache", "Policy's score")] == [shown["all tasks"]] * 2 == ["13.40"] * 2
    place = [column.title for column in tasks.columns].index("Full cache")
    assert {row[2].text: row[place].text for row in tasks.rows} == {task: shown[task] for task in num_higher}


@pytest.mark.parametrize(
    ("codes", "differ"),
    [
        ([("s", {"a:A": "1"}), ("s", {"b:B": "2"})], False),
        ([("s", {"a:A": "1"}), ("s", {"a:A": "1", "helper": "3"})], False),
        ([("s", {"a:A": "1"}), ("s", {"a:A": "2"})], True),
        ([("s", {"a:A": "1", "helper": "3"}), ("s", {"b:B": "2", "helper": "4"})], True),
        ([("s", {"a:A": "1"}), ("t", {"a:A": "1"})], True),
    ],
)
def test_runs_of_different_code_are_noticed_but_not_those_of_different_policies(tmp_path, codes, differ):
    write_run(tmp_path)
    write_run(tmp_path, "window", 256)
    group = group_of(tmp_path)
    for run, (shared, own) in zip(group.runs, codes, strict=True):
        object.__setattr__(run, "manifest", replace(run.manifest, code_sha256=shared, own_code=own))
    assert any("different versions" in warning for warning in warnings(group)) is differ


def test_the_report_and_the_command_give_the_same_p_values(tmp_path, capsys):
    tasks = ("qasper", "lcc")
    folders = [write_run(tmp_path, policy, budget, tasks=tasks) for policy, budget in (("full", None), ("window", 64))]
    folders.append(write_run(tmp_path, "random", 64, tasks=tasks))
    assert compare([*map(str, folders), "--out", str(tmp_path / "compared.csv")]) == 0
    assert "adjusted over all tasks shown" in capsys.readouterr().out
    with (tmp_path / "compared.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    averages, tables = differences_of(group_of(tmp_path))
    records = {(one["run_id"], one["name"]): one for one in (*averages.records, *tables.records)}
    ids = {folder.name: read_manifest(folder).run_id for folder in folders}
    assert len(rows) == len(records) == 6
    for row in rows:
        record = records[ids[row["run_b"]], row["task"]]
        assert [float(row[key]) for key in ("p", "p_holm", "ci_low")] == pytest.approx(
            [record[key] for key in ("p", "p_holm", "ci_low")]
        )


def test_runs_of_different_software_are_noticed_in_report_and_command(tmp_path, capsys):
    folders = [write_run(tmp_path), write_run(tmp_path, "window", 256)]
    changed = read_manifest(folders[1])
    write_manifest(folders[1], replace(changed, versions=changed.versions | {"vllm": "0.33.0"}))
    said = "made with different software: vllm 0.32.0, 0.33.0."
    assert any(said in warning for warning in warnings(group_of(tmp_path)))
    assert compare([str(folder) for folder in folders]) == 0
    assert said in capsys.readouterr().out
