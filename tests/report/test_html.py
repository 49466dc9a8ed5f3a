"""The page in a real browser: it opens from disk without network, sorts, filters, draws, and shows single samples."""

import base64
import json
import re
import zlib

import pytest

from harness.report.__main__ import main
from tests.report.browser import is_local, missing_parts, open_page, requested
from tests.report.synthetic import NUM_LAYERS, bench_rows, write_bench, write_run

needs_browser = pytest.mark.skipif(bool(missing_parts()), reason=f"needs {', '.join(missing_parts())}")
PAPER = ["--paper", "results/paper"]
PAGE_COLOUR = "return getComputedStyle(document.body).backgroundColor"
ACCURACY = "#accuracy [data-group]:not([hidden]) table"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report on two groups of runs; the larger one is shown first."""
    parent = tmp_path_factory.mktemp("runs")
    write_run(parent, retention=True)
    for policy in ("window", "random"):
        for budget in (128, 256):
            write_run(parent, policy, budget, retention=True)
    write_run(parent, model="other", tasks=("qasper",))
    write_bench(parent, bench_rows())
    out = tmp_path_factory.mktemp("report")
    assert main([str(parent), "--out", str(out), *PAPER]) == 0
    return out / "report.html"


@pytest.fixture(scope="module")
def driver(page):
    with open_page(page) as browser:
        yield browser


@pytest.fixture(autouse=True)
def reloaded(request):
    """Every test of the browser starts from a fresh page."""
    if "driver" in request.fixturenames:
        request.getfixturevalue("driver").refresh()


def find(driver, css):
    return driver.find_element("css selector", css)


def find_all(driver, css):
    return driver.find_elements("css selector", css)


def click(driver, element):
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'}); arguments[0].click()", element)


def column(driver, table_css, number):
    """Texts of a column of the rows that can be seen."""
    script = (
        "return [...document.querySelector(arguments[0]).tBodies[0].rows]"
        ".filter(r => !r.hidden).map(r => r.cells[arguments[1]].textContent)"
    )
    return driver.execute_script(script, table_css, number)


def wait_for(driver, css):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(driver, 10).until(lambda browser: find(browser, css))


def test_the_page_is_one_file_that_names_no_other_place(page):
    text = page.read_text(encoding="utf-8")
    assert '<html lang="en">' in text
    assert re.findall(r"(?:src|href)=[\"']?(?!#|data:)[^\s\"'>$]+", text) == []
    assert len(re.findall(r"https?://", text)) == text.count("http://www.w3.org/2000/svg")
    assert re.findall(r"<th(?=[ >])(?! scope=)", text.split("<script")[0]) == []


def test_two_hundred_samples_with_prompts_stay_below_a_megabyte(tmp_path):
    tasks = ("qasper", "hotpotqa", "gov_report", "multi_news", "lcc")
    write_run(tmp_path / "runs", tasks=tasks, num_rows=40, retention=True)
    write_run(tmp_path / "runs", "window", 256, tasks=tasks, num_rows=40, retention=True)
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path), "--samples-per-task", "40", *PAPER]) == 0
    page = tmp_path / "report.html"
    index = json.loads(re.search(r'id="sample-data">(.*?)</script>', page.read_text(), re.S).group(1))
    assert sum(len(samples) for group in index.values() for samples in group["tasks"].values()) == 200
    assert page.stat().st_size < 1_000_000


def test_a_packet_holds_prompt_answers_and_the_map_of_every_run(page):
    text = page.read_text(encoding="utf-8")
    packed = re.search(r'data-packet="tiny-longbench_mini-limit12/qasper">"(.*?)"', text).group(1)
    detail = json.loads(zlib.decompress(base64.b64decode(packed)))["qasper/mini-qasper-0-0"]
    assert "{context}" not in detail["prompt"]["head"]
    assert len(detail["prompt"]["head"]) > 1000
    assert len(detail["runs"]) == len(detail["maps"]) == 5
    assert len(detail["maps"]["0"]["prefill_end"]["rows"]) == NUM_LAYERS


@needs_browser
def test_it_works_without_console_messages_and_asks_for_nothing_but_itself(page):
    with open_page(page) as browser:
        assert find(browser, "h1").text == "KV-cache eviction report"
        before = browser.execute_script(PAGE_COLOUR)
        click(browser, find(browser, "#theme"))
        assert browser.execute_script(PAGE_COLOUR) != before
        click(browser, find(browser, "#sample-browser tbody button"))
        wait_for(browser, ".detail .card")
        urls = requested(browser)
        assert urls.count(page.as_uri()) == 1
        assert [url for url in urls if not is_local(url)] == []
        assert browser.get_log("browser") == []


@needs_browser
def test_a_click_on_a_heading_sorts_and_a_second_one_turns_the_order(driver):
    button = find(driver, f"{ACCURACY} thead th:nth-child(3) button")
    click(driver, button)
    rising = column(driver, ACCURACY, 2)
    click(driver, button)
    falling = column(driver, ACCURACY, 2)
    values = [float(text.split(" ")[0]) for text in rising]
    assert values == sorted(values)
    assert len(set(values)) == 5
    assert falling == rising[::-1]
    assert find(driver, f"{ACCURACY} thead th:nth-child(3)").get_attribute("aria-sort") == "descending"


@needs_browser
def test_a_heading_can_be_reached_and_pressed_with_the_keyboard(driver):
    button = find(driver, f"{ACCURACY} thead th:nth-child(1) button")
    button.send_keys("\n")
    assert column(driver, ACCURACY, 0) == ["full", "random", "random", "window", "window"]


@needs_browser
def test_a_filter_leaves_the_rows_with_all_its_words(driver):
    assert len(column(driver, ACCURACY, 0)) == 5
    find(driver, "#accuracy [data-group]:not([hidden]) input[type=search]").send_keys("window 128")
    assert column(driver, ACCURACY, 0) == ["window"]
    assert find(driver, "#accuracy [data-group]:not([hidden]) output").text == "1 of 5 rows"


@needs_browser
def test_another_model_can_be_chosen(driver):
    from selenium.webdriver.support.ui import Select

    Select(find(driver, "#group")).select_by_value("other-longbench_mini-limit12")
    assert column(driver, ACCURACY, 0) == ["full"]
    assert find(driver, "#differences .empty").is_displayed()
    assert len(find_all(driver, "#sample-browser tbody tr")) == 10


@needs_browser
def test_a_chart_has_a_mark_for_every_run_and_says_its_value(driver):
    chart = "#chart-accuracy-vs-budget-tiny-longbench_mini-limit12"
    marks = find_all(driver, f"{chart} .series .mark")
    assert len(marks) == 4
    assert [line.get_attribute("data-series") for line in find_all(driver, f"{chart} .series")] == [
        "full",
        "random",
        "window",
    ]
    assert find(driver, f"{chart} .axis.x").text == "Budget (tokens per layer and KV head)"
    svg = find(driver, f"{chart} .chart svg")
    driver.execute_script("arguments[0].focus()", svg)
    svg.send_keys("\ue014")
    assert find(driver, f"{chart} .tip").text.startswith("full\nScore: ")


@needs_browser
def test_a_series_can_be_switched_off_and_on(driver):
    chart = "#chart-accuracy-vs-budget-tiny-longbench_mini-limit12"
    button = next(one for one in find_all(driver, f"{chart} .legend button") if one.text == "window")
    click(driver, button)
    assert not find(driver, f'{chart} [data-series="window"]').is_displayed()
    assert button.get_attribute("aria-pressed") == "false"
    click(driver, button)
    assert find(driver, f'{chart} [data-series="window"]').is_displayed()


@needs_browser
def test_a_sample_opens_with_question_reference_answers_and_maps(driver):
    button = next(one for one in find_all(driver, "#sample-browser tbody button") if "qasper-0-0" in one.text)
    click(driver, button)
    wait_for(driver, ".detail .card")
    assert find(driver, ".detail h3").text == "qasper/mini-qasper-0-0"
    assert find(driver, ".detail .question").text.endswith("?")
    assert find(driver, ".detail .answers").text.startswith("REFERENCE")
    assert len(find_all(driver, ".detail .card")) == len(find_all(driver, ".detail .card canvas")) == 5
    assert "<as window says & means it>" in find_all(driver, ".detail .card pre")[-1].text
    prompt = find(driver, ".prompt details pre")
    assert not prompt.is_displayed()
    click(driver, find(driver, ".prompt summary"))
    assert prompt.is_displayed()


@needs_browser
def test_a_map_is_bright_where_positions_were_kept(driver):
    click(driver, find(driver, "#sample-browser tbody button"))
    wait_for(driver, ".detail .card canvas")
    script = (
        "const c = [...document.querySelectorAll('.card')].find(e => e.textContent.includes('window @ 128'))"
        ".querySelector('canvas'); const at = x => [...c.getContext('2d').getImageData(x, c.height - 1, 1, 1).data];"
        "return [at(Math.floor(c.width / 2)), at(c.width - 1)]"
    )
    middle, end = driver.execute_script(script)
    assert middle == [0, 34, 78, 255]
    assert end == [254, 232, 56, 255]
