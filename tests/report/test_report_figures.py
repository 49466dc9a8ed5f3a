"""Figures have the panels, marks and axes they should; one declaration gives all formats, always the same."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from harness.report.figures.all import make_figures, report_looks, write_figures
from harness.report.figures.figure import Figure, Skipped, declaration, make_looks, save
from harness.report.figures.marks import Axes, budget_unit, point
from harness.report.figures.needles import needle_figures
from harness.report.figures.retention import heads_figure, png, retention_figures
from harness.report.figures.scores import accuracy_figure, answer_figure, length_figure
from harness.report.figures.speed import block_size_figure, latency_figure, throughput_figures, usage_figure
from harness.report.reading.load_tests import read_bench
from harness.report.reading.runs import make_groups, read_runs
from harness.report.tables.answer import find_answers, sentences
from harness.report.tables.differences import find_differences
from harness.store.manifest import read_manifest, write_manifest
from harness.store.predictions import read_predictions, replace_predictions
from tests.report.synthetic import TASK_SET, bench_rows, write_bench, write_run

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    parent = tmp_path_factory.mktemp("runs")
    write_run(parent, retention=True)
    for policy in ("window", "random"):
        for budget in (128, 256, 512):
            write_run(parent, policy, budget, retention=policy == "window" and budget == 256)
    write_run(parent, "stopped", 256, status="interrupted", num_done=20)
    return group_in(parent)


@pytest.fixture(scope="module")
def answers(group):
    return find_answers(group, find_differences(group))


def group_in(parent):
    (only,) = make_groups(read_runs([parent]))
    return only


def looks_of(group):
    return report_looks([group], [])


def of_panel(figure: Figure, panel: str) -> list[dict]:
    return [row for row in figure.rows if row["panel"] == panel]


def drawn(figure: Figure, folder) -> ElementTree.Element:
    save(figure, folder)
    return ElementTree.parse(folder / f"{figure.name}.svg").getroot()


def texts(root) -> list[str]:
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


def layers_of(figure: Figure, kind: str) -> list[dict]:
    return [layer for layer in figure.unit["layer"] if layer["mark"]["type"] == kind]


def test_accuracy_has_a_panel_a_task_and_a_row_a_run(group, tmp_path):
    figure = accuracy_figure(group, looks_of(group))
    assert list(figure.panels) == [
        "mean of 4 tasks",
        *("qasper (qa_f1)", "hotpotqa (qa_f1)", "gov_report (rouge)", "lcc (code_sim)"),
    ]
    for panel in figure.panels:
        rows = of_panel(figure, panel)
        assert [row["series"] for row in rows if row["kind"] == "level"] == ["full"]
        assert sorted(row["x"] for row in rows if row["series"] == "window") == ["128", "256", "512"]
    found = texts(drawn(figure, tmp_path))
    assert {"128", "256", "512", "full", "random", "window", *figure.panels} <= set(found)


def test_the_level_of_the_full_cache_is_its_score_with_its_interval(group):
    (level,) = [row for row in of_panel(accuracy_figure(group, looks_of(group)), "qasper (qa_f1)") if "x" not in row]
    score = next(run for run in group.runs if run.policy == "full").scores["qasper"]
    assert (level["y"], level["low"], level["high"]) == (score.score, score.ci_low, score.ci_high)


def test_unfinished_runs_are_in_no_curve_of_scores(group):
    figure = accuracy_figure(group, looks_of(group))
    assert {row["series"] for row in figure.rows} == {"full", "random", "window"}
    assert "stopped @ 256 [interrupted]" in figure.caption


def test_one_budget_is_drawn_as_bars(tmp_path):
    write_run(tmp_path)
    write_run(tmp_path, "window", 256)
    group = group_in(tmp_path)
    figure = accuracy_figure(group, looks_of(group))
    assert figure.unit["layer"][0]["mark"]["type"] == "bar"
    assert {row["series"] for row in of_panel(figure, "mean of 4 tasks")} == {"full", "window"}


def test_the_answer_is_in_percent_of_the_full_cache(group, answers, tmp_path):
    figure = answer_figure(group, answers, looks_of(group))
    memory = {(row["series"], row["x"]) for row in of_panel(figure, figure.panels[0])}
    assert {x for name, x in memory if name == "window"} == {10.0, 20.0, 40.0}
    assert ("full", 100.0) in memory
    time = of_panel(figure, figure.panels[1])
    assert {row["x"] for row in time if row["series"] != "full"} == {50.0}
    assert "Score kept, % of full cache" in texts(drawn(figure, tmp_path))


def test_a_sentence_a_policy_says_score_memory_and_time(answers):
    found = dict(sentences(answers))
    assert next(iter(found)) == "full"
    assert set(found) == {"full", "window", "random"}
    assert re.match(r"scores \d+\.\d with 10\.0 MiB of KV memory a request and 0\.2 s a sample\.$", found["full"])
    pattern = r"at 128 / 256 / 512 keeps (\d+) / (\d+) / (\d+) % of the score \(significantly less: all\), with "
    row = re.fullmatch(pattern + r"10 / 20 / 40 % of the memory, 50 % of the time\.", found["window"])
    of_window = [one for one in answers if one.run.policy == "window"]
    assert row.groups() == tuple(f"{one.kept:.0f}" for one in of_window)
    clauses = dict(sentences([one for one in answers if one.run.budget != 512]))["window"].rstrip(".").split("; ")
    assert [clause.split(" ")[1] for clause in clauses] == ["128", "256"]
    pattern = (
        r"at 256 keeps \d+ % \[\d+, \d+\] of the score, significantly less, with 20 % of the memory, 50 % of the time"
    )
    assert re.fullmatch(pattern, clauses[1])


def test_blocks_over_time_keep_their_peaks(tmp_path):
    folder = write_run(tmp_path, usage=False)
    lines = [f"1,{step / 10},{900 if step == 777 else step % 50},1" for step in range(1000)]
    (folder / "block_usage.csv").write_text("\n".join(["session,t_s,blocks,running", *lines]) + "\n")
    figure = usage_figure(group_in(tmp_path), make_looks(["full"]))
    assert len(figure.rows) == 200
    assert max(row["y"] for row in figure.rows) == 900
    assert [row["x"] for row in figure.rows] == sorted(row["x"] for row in figure.rows)


def test_runs_are_compared_by_samples_with_the_length_of_answers_beside(group):
    figure = throughput_figures([group], [], looks_of(group))[1]
    assert list(figure.panels) == ["samples/s", "mean answer (tokens)"]
    assert {row["y"] for row in of_panel(figure, "samples/s") if row["series"] == "full"} == {4.8}
    assert {row["y"] for row in of_panel(figure, "mean answer (tokens)")} == {20.0}


def test_ratio_quantities_begin_at_zero(group, tmp_path):
    write_bench(tmp_path, bench_rows())
    bench = read_bench([tmp_path])
    looks = report_looks([group], bench)
    for figure in (*throughput_figures([group], bench, looks), latency_figure(bench, looks)):
        (line,) = layers_of(figure, "line")
        assert line["encoding"]["y"]["scale"]["zero"] is True, figure.name


def test_load_tests_give_medians_and_their_range(tmp_path):
    write_bench(tmp_path, bench_rows())
    bench = read_bench([tmp_path])
    (figure,) = throughput_figures([], bench, report_looks([], bench))
    assert list(figure.panels) == ["output tokens/s", "prompt and output tokens/s"]
    rows = of_panel(figure, "output tokens/s")
    assert [(row["series"], row["kind"]) for row in rows] == [
        ("full", "level"),
        ("window", "point"),
        ("window", "point"),
    ]
    assert [rows[1][key] for key in ("x", "y", "low", "high")] == ["128", 220, 200, 240]
    latency = latency_figure(bench, report_looks([], bench))
    assert list(latency.panels) == ["TTFT (s)", "TPOT (s)", "end to end (s)"]
    assert [row["high"] for row in of_panel(latency, "TTFT (s)")] == [2.0, 2.0, 2.0]


def test_block_sizes_are_compared_where_there_are_several(tmp_path):
    write_bench(tmp_path, [*bench_rows(), *bench_rows(block_size=16)])
    for size in (16, 32):
        write_run(tmp_path, "window", 256, block_size=size)
    groups, bench = make_groups(read_runs([tmp_path])), read_bench([tmp_path])
    figure = block_size_figure(groups, bench, report_looks(groups, bench))
    runs, load = figure.panels
    assert [(row["series"], row["x"]) for row in of_panel(figure, runs)] == [
        ("window @ 256", "16"),
        ("window @ 256", "32"),
    ]
    assert {row["series"] for row in of_panel(figure, load)} == {"full", "window @ 128", "window @ 256"}


def test_accuracy_by_length_has_the_buckets_of_longbench_e(tmp_path):
    settings = {"source": "local", "limit": None, "longbench_e": True}
    for policy, budget in (("full", None), ("window", 256)):
        folder = write_run(tmp_path, policy, budget, tasks=("qasper", "hotpotqa"), benchmark=settings)
        found = read_predictions(folder)
        lengths = [100, 5000, 9000] * len(found)
        changed = [type(one)(**vars(one) | {"length": length}) for one, length in zip(found, lengths, strict=False)]
        replace_predictions(folder, changed)
    group = group_in(tmp_path)
    figure = length_figure(group, looks_of(group))
    assert [row["x"] for row in figure.rows if row["series"] == "full"] == ["0-4k", "4-8k", "8k+"]
    assert all(row["tip"].endswith("n = 8") for row in figure.rows)


def test_needles_found_and_kept_stand_side_by_side(tmp_path):
    folder = write_run(tmp_path, "window", 256, tasks=("qasper",), num_rows=4, scores={"qasper/mini-qasper-0-0": 1.0})
    places = [(512, 0.0), (512, 0.5), (1024, 0.0), (1024, 0.5)]
    samples = [
        type(one)(**vars(one) | {"length": length, "depth": depth})
        for one, (length, depth) in zip(read_predictions(folder), places, strict=True)
    ]
    replace_predictions(folder, samples)
    header = "layer,head,kept,kept_if_found,kept_if_missed,num_found,num_missed"
    (folder / "needles.csv").write_text(f"{header}\n0,0,0.5,1.0,0.25,1,3\n1,0,0.5,0.75,,1,0\n")
    found, kept = needle_figures(group_in(tmp_path))
    cells = {(row["x"], row["y"]): row["value"] for row in found.rows}
    assert set(cells) == {(512, 0), (512, 50), (1024, 0), (1024, 50)}
    assert cells[512, 0] == 1.0
    assert [(row["panel"].split(", ")[1], row["y"], row["value"]) for row in kept.rows] == [
        *[("found", 0, 1.0), ("found", 1, 0.75)],
        ("missed", 0, 0.25),
    ]
    assert {"Depth (% of the text)", "0", "50", "512", "1024"} <= set(texts(drawn(found, tmp_path)))


def test_a_figure_without_data_is_skipped_with_the_reason(tmp_path):
    write_run(tmp_path, usage=False)
    groups = make_groups(read_runs([tmp_path]))
    figures = make_figures(groups, [], {group.name: [] for group in groups})
    write_figures(tmp_path / "figures", figures)
    skipped = [one for one in figures if isinstance(one, Skipped)]
    assert {one.name.removesuffix("-tiny-longbench_mini-limit12"): one.reason for one in skipped} == {
        "answer": "no finished run beside a full cache that recorded block usage",
        "accuracy-vs-budget": "no finished run with a budget",
        "accuracy-by-length": "all prompts are about as long",
        "throughput-vs-budget-bench": "no load test (bench.json) was found",
        "latency-vs-budget-bench": "no load test (bench.json) was found",
        "block-size": "all runs of a group have one block size",
        "blocks-over-time": "no run recorded block usage",
        "kept-by-head": "in no run layers and heads keep unequally many tokens",
        "retention": "no run recorded retained positions",
    }
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    drawn_ones = [one.name for one in figures if isinstance(one, Figure)]
    assert names == {f"{name}.{kind}" for name in drawn_ones for kind in ("pdf", "svg", "png", "vl.json")}


def test_retention_maps_stand_side_by_side(group, tmp_path):
    (maps,) = retention_figures(group)
    assert list(maps.panels) == ["full, 48 samples", "window @ 256, 48 samples"]
    assert "a mean over samples, over the KV heads" in maps.caption
    root = drawn(maps, tmp_path)
    assert len(list(root.iter(f"{SVG}image"))) == 2
    assert {"Layer", "Share kept"} <= set(texts(root))
    assert len(TASK_SET) * 12 == 48


def test_unequal_counts_have_a_map_of_layers_and_heads(tmp_path):
    write_run(tmp_path)
    folder = write_run(tmp_path, "ragged", 256)
    made = read_manifest(folder)
    kept = {"num_prompts": 48, "mean": [[100.5, 411.5]] * 2, "least": [[90, 400]] * 2, "most": [[110, 420]] * 2}
    sessions = [replace(one, engine=one.engine | {"kept": kept}) for one in made.sessions]
    write_manifest(folder, replace(made, sessions=sessions))
    heads = heads_figure(group_in(tmp_path))
    assert list(heads.panels) == ["ragged @ 256"], "the full cache keeps as many in all heads"
    assert {(row["y"], row["x"]): row["value"] for row in heads.rows}[1, 1] == 411.5
    assert heads.rows[-1]["tip"] == "ragged @ 256, layer 1, head 1: 412 tokens, 400 to 420"


def test_the_picture_of_a_map_is_bright_where_all_was_kept():
    from io import BytesIO

    from PIL import Image

    picture = png(np.array([[1.0, 0.0], [0.5, 0.25]]))
    import base64

    image = Image.open(BytesIO(base64.b64decode(picture.split(",")[1])))
    width, height = image.size
    assert image.getpixel((0, height - 1)) == (254, 232, 56), "layer 0 is below"
    assert image.getpixel((width - 1, height - 1)) == (0, 34, 78)
    assert image.getpixel((0, 0)) == (112, 113, 115)


@pytest.mark.parametrize(
    ("budgets", "unit"),
    [
        ((0.25, 0.5), "share of the prompt"),
        ((0.25, 1.0), "share of the prompt"),
        ((64, 128), "tokens per layer and KV head"),
    ],
)
def test_the_axis_of_budgets_names_their_unit(budgets, unit):
    rows = [point("score", "window", budget, (50, None, None), "") for budget in budgets]
    unit_of = budget_unit(rows, make_looks(["window"]), budgets, Axes(None, "Score", zero=True))
    assert f"Budget ({unit})" in json.dumps(unit_of)


def test_the_same_figure_gives_the_same_bytes(group, answers, tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        save(answer_figure(group, answers, looks_of(group)), tmp_path / name)
    for path in (path for path in (tmp_path / "first").iterdir() if path.suffix != ".pdf"):  # its font tags vary
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes(), path.name


def test_a_saved_declaration_is_the_figure_itself(group, answers, tmp_path):
    figure = answer_figure(group, answers, looks_of(group))
    save(figure, tmp_path)
    assert json.loads((tmp_path / f"{figure.name}.vl.json").read_text()) == json.loads(json.dumps(declaration(figure)))


def test_forty_series_share_neither_colour_and_shape_nor_colour_and_dash():
    looks = list(make_looks([f"policy {number}" for number in range(40)]).values())
    for one, other in combinations(looks, 2):
        assert (one.colour, one.shape) != (other.colour, other.shape)
        assert (one.colour, one.dash) != (other.colour, other.dash)
    for one, other in pairwise(looks):
        assert one.colour != other.colour
        assert one.shape != other.shape
