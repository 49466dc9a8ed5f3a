"""The page in a real browser: it opens from disk without network, sorts, filters, draws, and shows single samples."""

import base64
import json
import re
import zlib

import pytest

from harness.report.__main__ import main
from tests.report.browser import is_local, missing_parts, open_page, reload_page, requested
from tests.report.synthetic import NUM_LAYERS, bench_rows, write_bench, write_run

needs_browser = pytest.mark.skipif(bool(missing_parts()), reason=f"needs {', '.join(missing_parts())}")
PAPER = ["--paper", "results/paper"]
PAGE_COLOUR = "return getComputedStyle(document.body).backgroundColor"
# Names of formats and a comment inside Vega; none is asked for.
KNOWN_ADDRESSES = {
    "http://www.w3.org/2000/svg",
    "http://www.w3.org/2000/xmlns/",
    "http://www.w3.org/1999/xlink",
    "https://github.com/vega/vega-lite/issues/2415",
}
CHART = "#chart-accuracy-vs-budget-tiny-longbench_mini-limit12"
ANSWER = "#chart-answer-tiny-longbench_mini-limit12"
ACCURACY = "#accuracy [data-group]:not([hidden]) table"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report on three groups of runs; the largest one is shown first."""
    parent = tmp_path_factory.mktemp("runs")
    write_run(parent, retention=True)
    for policy in ("window", "random"):
        for budget in (128, 256):
            write_run(parent, policy, budget, retention=True)
    write_run(parent, model="other", tasks=("qasper",))
    for policy, budget in (("full", None), ("window", 256)):
        write_run(parent, policy, budget, model="one_budget", tasks=("qasper",))
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
        reload_page(request.getfixturevalue("driver"))


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
    before, _runtime, after = text.split("<script>")
    assert re.findall(r"(?:src|href)=[\"']?(?!#|data:)[^\s\"'>$]+", before + after) == []
    assert set(re.findall(r"https?://[\w./-]+", text)) <= KNOWN_ADDRESSES
    assert re.findall(r"<th(?=[ >])(?! scope=)", text.split("<script")[0]) == []


def test_two_hundred_samples_with_prompts_stay_below_two_megabytes(tmp_path):
    tasks = ("qasper", "hotpotqa", "gov_report", "multi_news", "lcc")
    write_run(tmp_path / "runs", tasks=tasks, num_rows=40, retention=True)
    write_run(tmp_path / "runs", "window", 256, tasks=tasks, num_rows=40, retention=True)
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path), "--samples-per-task", "40", *PAPER]) == 0
    page = tmp_path / "report.html"
    index = json.loads(re.search(r'id="sample-data">(.*?)</script>', page.read_text(), re.S).group(1))
    assert sum(len(samples) for group in index.values() for samples in group["tasks"].values()) == 200
    assert page.stat().st_size < 2_000_000


def test_a_packet_holds_prompt_answers_and_the_map_of_every_run(page):
    text = page.read_text(encoding="utf-8")
    packed = re.search(r'data-packet="tiny-longbench_mini-limit12/qasper">"(.*?)"', text).group(1)
    detail = json.loads(zlib.decompress(base64.b64decode(packed)))["qasper/mini-qasper-0-0"]
    assert "{context}" not in detail["prompt"]["head"]
    assert len(detail["prompt"]["head"]) > 1000
    assert len(detail["runs"]) == len(detail["maps"]) == 5
    assert len(detail["maps"]["0"]["prefill_end"]["rows"]) == NUM_LAYERS


def drawn(driver, css: str) -> None:
    """Wait until the figure is drawn, without scrolling to it."""
    wait_for(driver, css)
    script = "const done = arguments[1]; draw(document.querySelector(arguments[0])).then(done, done)"
    driver.set_script_timeout(30)
    assert driver.execute_async_script(script, css) is None


def set_screen(driver, width: int, height: int, theme: str) -> None:
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    script = "document.documentElement.dataset.theme = arguments[0]; dispatchEvent(new Event('resize'));"
    driver.execute_script(script + "document.dispatchEvent(new CustomEvent('themechange'))", theme)


def draw_all(driver) -> None:
    """Draw every figure, those too that were not scrolled to."""
    script = (
        "const done = arguments[0]; const boxes = [...document.querySelectorAll('figure.chart')];"
        "Promise.all(boxes.map((box) => draw(box))).then(() => done('drawn'), (error) => done(String(error)))"
    )
    driver.set_script_timeout(30)
    assert driver.execute_async_script(script) == "drawn"


@needs_browser
def test_it_works_without_console_messages_and_asks_for_nothing_but_itself(page):
    with open_page(page) as browser:
        assert find(browser, "h1").text == "KV-cache eviction report"
        before = browser.execute_script(PAGE_COLOUR)
        click(browser, find(browser, "#theme"))
        assert browser.execute_script(PAGE_COLOUR) != before
        draw_all(browser)
        click(browser, find(browser, "#sample-browser tbody button"))
        wait_for(browser, ".detail .card")
        urls = requested(browser)
        assert urls.count(page.as_uri()) == 1
        assert [url for url in urls if not is_local(url)] == []
        assert browser.get_log("browser") == []


@needs_browser
@pytest.mark.parametrize(("width", "height"), [(1400, 900), (400, 800)])
def test_the_first_screen_holds_picture_and_sentence_and_nothing_overflows(page, width, height):
    with open_page(page, width, height) as browser:
        for theme in ("light", "dark"):
            set_screen(browser, width, height, theme)
            draw_all(browser)
            assert browser.execute_script("return document.documentElement.scrollWidth") == width
            for css in (f"{ANSWER} svg.marks", "#sentences [data-part]:not([hidden]) li"):
                box = browser.execute_script(
                    "const r = document.querySelector(arguments[0]).getBoundingClientRect();"
                    "return [r.left, r.right, r.top, r.bottom]",
                    css,
                )
                assert 0 <= box[0] < box[1] <= width, css
                assert 0 <= box[2] < box[3] <= height, css
            score = browser.execute_script(
                "const cell = document.querySelector(arguments[0] + ' tbody tr').cells[2];"
                "return cell.getBoundingClientRect().right",
                ACCURACY,
            )
            assert score <= width, "the first score is on the screen"
        assert browser.get_log("browser") == []


@needs_browser
def test_a_clipped_table_says_how_much_more_there_is(page):
    with open_page(page, 400, 800) as browser:
        set_screen(browser, 400, 800, "light")
        hint = wait_for(browser, "#accuracy [data-group]:not([hidden]) .clip:not(:empty)")
        assert int(re.fullmatch(r"(\d+) more columns →", hint.text).group(1)) >= 3
        script = "const s = document.querySelector('#accuracy [data-group]:not([hidden]) .scroll'); s.scrollLeft = 9999"
        browser.execute_script(script)
        wait_for(browser, "#accuracy [data-group]:not([hidden]) .clip:empty")


@needs_browser
def test_a_page_without_samples_has_no_script_error(tmp_path):
    write_run(tmp_path / "runs", tasks=("qasper",), num_rows=2, usage=False)
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path), "--samples-per-task", "0", *PAPER]) == 0
    with open_page(tmp_path / "report.html") as browser:
        draw_all(browser)
        assert find(browser, "#sample-browser").text == "No samples are on this page."
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
def test_one_task_at_one_budget_is_drawn_without_console_messages(page):
    from selenium.webdriver.support.ui import Select

    with open_page(page) as browser:
        Select(find(browser, "#group")).select_by_value("one_budget-longbench_mini-limit12")
        draw_all(browser)
        assert find_all(browser, "#chart-accuracy-vs-budget-one_budget-longbench_mini-limit12 svg")
        assert browser.get_log("browser") == []


@needs_browser
def test_the_keyboard_reads_every_value_and_rings_its_mark(driver):
    drawn(driver, CHART)
    plot = find(driver, f"{CHART} .plot")
    driver.execute_script("arguments[0].focus()", plot)
    plot.send_keys("\ue014")
    assert find(driver, f"{CHART} .reading").text.startswith("full: ")
    plot.send_keys("\ue014")
    assert re.match(r"random @ 128: \d+\.\d+ \[.*\], n = 48/252", find(driver, f"{CHART} .reading").text)
    assert wait_for(driver, f'{CHART} path[stroke="#cc3311"]'), "drawn by Vega a moment later"
    assert len(find_all(driver, f'{CHART} path[stroke="#cc3311"]')) == 1


@needs_browser
def test_panels_are_chosen_and_series_switched_off(driver):
    from selenium.webdriver.support.ui import Select

    drawn(driver, CHART)
    pick = Select(find(driver, f"{CHART} select"))
    assert [option.text for option in pick.options][:3] == ["All 5", "mean of 4 tasks", "qasper (qa_f1)"]
    pick.select_by_visible_text("All 5")
    shown = "return document.querySelector(arguments[0]).state.shown.length"
    assert driver.execute_script(shown, CHART) == 25
    box = find_all(driver, f"{CHART} .series input")[1]
    click(driver, box)
    assert driver.execute_script(shown, CHART) == 15
    click(driver, box)
    assert driver.execute_script(shown, CHART) == 25


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
