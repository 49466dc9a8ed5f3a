"""Headless Chromium for tests of the page: no network, its own empty profile, console and requests on record."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
LOGS = ("browser", "performance")
LOCAL_SCHEMES = ("file:", "data:", "blob:")


def missing_parts() -> list[str]:
    """What is not installed here of what a test needs."""
    programs = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    try:
        import selenium  # noqa: F401
    except ImportError:
        return [*programs, "selenium"]
    return programs


@contextmanager
def open_page(path: Path, width: int = 1280, height: int = 900) -> Iterator["Chrome"]:
    """The page in a new browser; both programs end with the block."""
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", dict.fromkeys(LOGS, "ALL"))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        driver = Chrome(options, ChromeService(shutil.which("chromedriver")))
        try:
            driver.get("about:blank")
            for log in LOGS:
                driver.get_log(log)
            driver.get(path.as_uri())
            wait_until_loaded(driver)
            yield driver
        finally:
            driver.quit()


def reload_page(driver: "Chrome") -> None:
    """The same page anew, its scripts run: ``refresh`` alone may return while the new document is still being read."""
    driver.execute_script("window.isOld = true")
    driver.refresh()
    wait_until_loaded(driver)


def wait_until_loaded(driver: "Chrome") -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    script = "return window.isOld === undefined && document.readyState === 'complete'"
    WebDriverWait(driver, 30).until(lambda browser: browser.execute_script(script))


def requested(driver: "Chrome") -> list[str]:
    """Every address that the page asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]


def is_local(url: str) -> bool:
    return url.startswith(LOCAL_SCHEMES)
