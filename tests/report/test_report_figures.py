"""Figures have the labels they should, and as many points as there are runs."""

import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from harness.report.bench_runs import read_bench
from harness.report.chart_runs import accuracy_chart, pareto_chart, usage_chart
from harness.report.chart_speed import latency_charts, page_size_chart, throughput_charts
from harness.report.charts import Chart, Panel, Point, Series, Skipped
from harness.report.drawing import COLOURS, draw, make_styles, save
from harness.report.retention_figures import retention_figures
from harness.report.runs import make_groups, read_runs

from harness.report.figures import make_charts, write_figures
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
    (only,) = make_groups(read_runs([parent]))
    return only


def drawn(chart: Chart, folder) -> ElementTree.Element:
    names = [series.name for panel in chart.panels for series in panel.series]
    _, svg, _ = save(draw(chart, make_styles(names)), folder, chart.name)
    return ElementTree.parse(svg).getroot()


def texts(root) -> list[str]:
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


def marks(root, panel: int, series: int) -> int:
    (group,) = (one for one in root.iter(f"{SVG}g") if one.get("id") == f"series-{panel}-{series}")
    return len(list(group.iter(f"{SVG}use")))


def test_accuracy_has_a_panel_a_task_and_a_mark_a_run(group, tmp_path):
    chart = accuracy_chart(group)
    assert [panel.title for panel in chart.panels] == [
        "mean of 4 tasks",
        *("qasper (qa_f1)", "hotpotqa (qa_f1)", "gov_report (rouge)", "lcc (code_sim)"),
    ]
    root = drawn(chart, tmp_path)
    for panel in range(5):
        assert [series.name for series in chart.panels[panel].series] == ["full", "random", "window"]
        assert [marks(root, panel, series) for series in (1, 2)] == [3, 3]
    found = texts(root)
    assert found.count("Budget (tokens per layer and KV head)") == 1
    assert found.count("Score") == 1
    assert {"128", "256", "512", "full", "random", "window"} <= set(found)


def test_the_level_of_the_full_cache_is_its_score_with_its_interval(group):
    panel = accuracy_chart(group).panels[1]
    score = next(run for run in group.runs if run.policy == "full").scores["qasper"]
    (level,) = panel.series[0].points
    assert panel.series[0].kind == "reference"
    assert (level.y, level.low, level.high) == (score.score, score.ci_low, score.ci_high)


def test_unfinished_runs_are_in_no_curve_of_scores(group):
    names = {series.name for panel in accuracy_chart(group).panels for series in panel.series}
    assert names == {"full", "random", "window"}
    assert any("stopped @ 256 [interrupted]" in chart.caption for chart in (accuracy_chart(group), pareto_chart(group)))


def test_memory_is_measured_and_does_not_depend_on_how_many_requests_ran_at_once(group, tmp_path):
    chart = pareto_chart(group)
    window = next(series for series in chart.panels[0].series if series.name == "window")
    assert [point.x for point in window.points] == [1.0, 2.0, 4.0]
    assert [point.label for point in window.points] == ["window @ 128", "window @ 256", "window @ 512"]
    root = drawn(chart, tmp_path)
    assert "KV memory of a running request, mean (MiB)" in texts(root)
    assert [marks(root, 0, series) for series in range(3)] == [1, 3, 3]


def test_blocks_over_time_keep_their_peaks(tmp_path):
    folder = write_run(tmp_path, usage=False)
    lines = [f"1,{step / 10},{900 if step == 777 else step % 50},1" for step in range(1000)]
    (folder / "block_usage.csv").write_text("\n".join(["session,t_s,blocks,running", *lines]) + "\n")
    (group,) = make_groups(read_runs([tmp_path]))
    (series,) = usage_chart(group).panels[0].series
    assert len(series.points) == 250
    assert max(point.y for point in series.points) == 900
    assert [point.x for point in series.points] == sorted(point.x for point in series.points)


def test_load_tests_give_medians_and_their_range(tmp_path):
    write_bench(tmp_path, bench_rows())
    (chart,) = throughput_charts([], read_bench([tmp_path]))
    output, total = chart.panels
    assert output.title == "tiny, 12 × 384 in, 256 out, block 32"
    assert [(series.name, series.kind, len(series.points)) for series in output.series] == [
        ("full", "reference", 1),
        ("window", "line", 2),
    ]
    first = output.series[1].points[0]
    assert (first.x, first.y, first.low, first.high) == (128, pytest.approx(220), 200, pytest.approx(240))
    assert total.y_label == "Prompt and output tokens/s"
    (latency,) = latency_charts([], read_bench([tmp_path]))
    assert [panel.y_label for panel in latency.panels] == ["TTFT (s)", "TPOT (s)", "End to end (s)"]
    assert [point.high for point in latency.panels[0].series[1].points] == [2.0, 2.0]


def test_block_sizes_are_compared_where_there_are_several(tmp_path):
    write_bench(tmp_path, [*bench_rows(), *bench_rows(block_size=16)])
    for size in (16, 32):
        write_run(tmp_path, "window", 256, block_size=size)
    chart = page_size_chart(make_groups(read_runs([tmp_path])), read_bench([tmp_path]))
    runs, bench = chart.panels
    assert [(series.name, [point.x for point in series.points]) for series in runs.series] == [
        ("window @ 256", [16, 32])
    ]
    assert [series.name for series in bench.series] == ["full", "window @ 128", "window @ 256"]
    root = drawn(chart, tmp_path)
    assert [marks(root, 0, 0), *(marks(root, 1, series) for series in range(3))] == [2, 2, 2, 2]


def test_a_figure_without_data_is_skipped_with_the_reason(tmp_path):
    write_run(tmp_path, usage=False)
    groups = make_groups(read_runs([tmp_path]))
    written, skipped = write_figures(tmp_path / "figures", groups, make_charts(groups, []))
    assert {one.name.removesuffix("-tiny-longbench_mini-limit12"): one.reason for one in skipped} == {
        "accuracy-vs-budget": "no finished run with a budget",
        "accuracy-vs-memory": "no finished run recorded block usage",
        "throughput-vs-budget-bench": "no load test (bench.json) was found",
        "latency-vs-budget-bench": "no load test (bench.json) was found",
        "page-size": "all runs of a group have one block size",
        "blocks-over-time": "no run recorded block usage",
        "retention": "no run recorded retained positions",
    }
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {f"{one.name}.{kind}" for one in written for kind in ("pdf", "svg", "png")}


def test_retention_maps_stand_side_by_side(group, tmp_path):
    figures = retention_figures(group)
    names = [name for name, _ in figures]
    assert names[0] == f"retention-mean-prefill_end-{group.name}"
    assert [name.split("-")[1] for name in names[1:]] == list(TASK_SET[:3])
    _, svg, _ = save(figures[0][1], tmp_path, "mean")
    root = ElementTree.parse(svg).getroot()
    assert len([one for one in root.iter(f"{SVG}g") if (one.get("id") or "").startswith("map-")]) == 2
    assert {"full, 48 samples", "window @ 256, 48 samples", "Layer"} <= set(texts(root))


def test_the_same_chart_gives_the_same_bytes(group, tmp_path):
    chart = pareto_chart(group)
    styles = make_styles([series.name for series in chart.panels[0].series])
    first, second = (
        [path.read_bytes() for path in save(draw(chart, styles), tmp_path, name)] for name in ("first", "second")
    )
    assert first == second


def test_neighbours_differ_in_colour_marker_and_line_and_repeats_in_line():
    styles = make_styles([f"policy {number}" for number in range(2 * len(COLOURS))])
    looks = list(styles.values())
    for one, other in pairwise(looks):
        assert all(one[key] != other[key] for key in ("color", "marker", "linestyle"))
    assert len({str(look) for look in looks}) == len(looks)


def test_a_single_value_has_a_bar_instead_of_a_band(tmp_path):
    series = [Series("a", [Point(1, 2, 1, 3)]), Series("b", [Point(1, 2, 1, 3), Point(2, 3, 2, 4)])]
    chart = Chart("lone", "t", "c", [Panel("p", "x", "y", series)])
    axes = draw(chart, make_styles(["a", "b"])).axes[0]
    assert len(axes.containers) == 1
    assert isinstance(accuracy_chart(make_groups(read_runs([write_run(tmp_path)]))[0]), Skipped)


@pytest.mark.parametrize("num_panels", [1, 2, 4])
def test_long_names_and_titles_stay_inside_the_figure_and_apart(num_panels):
    names = [f"paged_eviction (protect_first={number}, protect_last={number}) @ 1024" for number in range(14)]
    series = [Series(name, [Point(512, 20, 10, 30), Point(1024, 25, 15, 35)]) for name in names]
    title = "a load test, smollm2-135m, 12 × 384 in, 256 out, block 32, AMD EPYC, 2 cores"
    panels = [Panel(title, "x", "y", series) for _ in range(num_panels)]
    figure = draw(Chart("c", "c", "", panels), make_styles(names))
    figure.canvas.draw()
    (legend,) = figure.legends
    box, whole = legend.get_window_extent(), figure.bbox
    assert box.x0 >= whole.x0
    assert box.x1 <= whole.x1
    titles = [axes.title.get_window_extent() for axes in figure.axes]
    assert all(left.x1 < right.x0 for left, right in pairwise(titles))
    assert all(title.y1 <= box.y0 + 1 for title in titles)
    assert all(axes.get_window_extent().height > 0.5 * axes.get_window_extent().width for axes in figure.axes)
