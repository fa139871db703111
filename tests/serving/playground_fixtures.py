"""The fixtures of the playground's tests: a server, a browser, and tabs in it.

The browser needs Chromium with its driver, and selenium; where they are missing its tests are
skipped.
"""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.playground_server import PlaygroundServer
from tests.serving.playground_tab import Tab, prefer, resize

CHROME = shutil.which("chromium") or shutil.which("chromium-browser")
CHROME = CHROME or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


@pytest.fixture(scope="module")
def scripted() -> Iterator[PlaygroundServer]:
    running = PlaygroundServer()
    yield running
    running.shutdown()
    running.server_close()


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    if not (CHROME and DRIVER):
        pytest.skip("no Chromium with a driver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROME
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield browser
    browser.quit()


@pytest.fixture
def tab(driver: Any, scripted: PlaygroundServer) -> Iterator[Any]:
    """Opens the page of a script; in the end no script may have failed, and nothing is blocked."""
    resize(driver, 1300, 1000)
    prefer(driver, "light")
    yield lambda script: Tab(driver, scripted, script)
    log = driver.get_log("browser")
    # A refused request is a line of the network, and a hint about forms is a line for its author.
    assert [e for e in log if e["source"] != "network" and e["level"] != "DEBUG"] == []
    driver.execute_script("sessionStorage.clear()")
