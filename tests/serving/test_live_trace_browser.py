"""The live trace page in a browser: it loads itself again and shows new steps.

It needs Chromium with its driver, and selenium; where they are missing the tests are skipped.
"""

import time
from pathlib import Path
from typing import Any

import pytest

from minillm import AsyncLLMEngine
from minillm.lab.drawings import live
from minillm.serving.app import build_app
from minillm.serving.settings import Settings
from minillm.trace.recorder import Trace
from tests.engine.small import write_model
from tests.serving.asgi_calls import call
from tests.serving.async_small import make_async, run
from tests.serving.playground_fixtures import driver

__all__ = ["driver"]  # a fixture

pytestmark = pytest.mark.slow
INTERVAL = 1.0  # seconds
STEPS = "return window.traceView ? traceView.model.numColumns : 0"
REFRESHES = "return document.querySelector('meta[http-equiv=refresh]') !== null"


def generate(engine: AsyncLLMEngine) -> None:
    body = {"prompt": "abc", "max_tokens": 12, "ignore_eos": True}
    assert run(call(build_app(engine, Settings(("m",))), "/v1/completions", body)).status == 200


def test_the_page_shows_new_steps_until_the_server_ends(tmp_path: Path, driver: Any) -> None:
    engine = make_async(write_model(tmp_path))
    from selenium.common.exceptions import WebDriverException

    path, shown = tmp_path / "page.html", list[int]()

    def ask(code: str) -> Any:
        try:
            return driver.execute_script(code)
        except WebDriverException:  # the page is just being loaded again
            return None

    def wait(code: str, answer: Any) -> None:
        end = time.monotonic() + 60
        while ask(code) != answer:
            assert time.monotonic() < end, "the page does not change"
            time.sleep(0.02)

    def written(trace: Trace) -> None:
        if not shown:
            driver.get(path.as_uri())
        wait(STEPS, len(trace))
        wait(REFRESHES, True)
        shown.append(len(trace))
        if len(shown) == 3:
            raise KeyboardInterrupt  # Ctrl-C, or the end of the server
        generate(engine)

    try:
        generate(engine)
        with pytest.raises(KeyboardInterrupt):
            live.follow("http://server", path, INTERVAL, lambda _: engine.trace, written)
        assert shown == [12, 24, 36]
        wait(REFRESHES, False)
        driver.execute_script("window.same = true")
        time.sleep(3 * INTERVAL)
        assert driver.execute_script("return window.same === true")
        assert driver.execute_script(STEPS) == 36
        assert driver.get_log("browser") == []
    finally:
        engine.shutdown()
