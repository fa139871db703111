"""A chapter as a learner has it: JupyterLab in a real browser, every cell run, every widget used.

It needs Chromium with its driver, and selenium; where they are missing the test is skipped.
"""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from notebook_chapter import NOTEBOOKS, chapters, lab

from minillm.lab.benchmarks.serving.server_process import free_port
from minillm_exercises.quiz import load_quiz
from tests.trace import test_browser

pytestmark, driver = test_browser.pytestmark, test_browser.driver
CHAPTER, SECONDS = "06", 240
READY = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
HELPERS = """
const book = jupyterapp.shell.currentWidget.content, cells = book.widgets;
const at = text => cells.findIndex(cell => cell.model.sharedModel.getSource().includes(text));
const node = text => cells[at(text)].node;
"""


class Page:
    """The notebook in the browser; a cell is named by a text of its source."""

    def __init__(self, driver: Any):
        self.driver = driver

    def run(self, script: str, *args: Any, helpers: str = HELPERS) -> Any:
        """What a script returns, with `node(text)` and `at(text)` for cells."""
        return self.driver.execute_script(helpers + script, *args)

    def wait(self, script: str, *args: Any, seconds: float = 30, helpers: str = HELPERS) -> Any:
        """Wait until a script returns something true, and return it; an error is not yet."""
        from selenium.webdriver.support.ui import WebDriverWait

        waiting = WebDriverWait(self.driver, seconds, 0.2, ignored_exceptions=[Exception])
        return waiting.until(lambda _: self.run(script, *args, helpers=helpers))

    def find(self, cell: str, selector: str) -> Any:
        """An element of a cell, scrolled into view."""
        self.run("book.scrollToItem(at(arguments[0]))", cell)
        found = "return node(arguments[0]).querySelector(arguments[1])"
        element = self.wait(found, cell, selector)
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        return element


def wait_for(port: int) -> None:
    """Wait until somebody listens, a minute at most."""
    for _ in range(120):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.5)
    raise TimeoutError(port)


@pytest.fixture
def page(driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    """JupyterLab on a copy of the chapter, all of its cells run."""
    for name in ("CI", "MINILLM_QUICK", "MINILLM_RESULTS"):
        monkeypatch.delenv(name, raising=False)
    folder, port = tmp_path / "work" / "notebooks", free_port()
    lab.prepare(NOTEBOOKS, folder)
    (path,) = chapters.chapter_paths(wanted=(CHAPTER,))
    words = [*lab.command(folder, path.name, False, port), "--IdentityProvider.token=t"]
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    env |= lab.calm_threads() | {"MINILLM_WORK": str(tmp_path / "work")}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(words, env=env, stdout=log, stderr=log)
    try:
        page = Page(driver)
        wait_for(port)
        driver.get(f"http://127.0.0.1:{port}/lab/tree/{path.name}?token=t")
        page.wait(f"return {READY}", seconds=90)
        page.run("jupyterapp.commands.execute('notebook:run-all-cells')")
        ran = f"return {READY} && node('quiz(').querySelector('.minillm-quiz') !== null"
        page.wait(ran, seconds=SECONDS)
        yield page
    finally:
        server.terminate()
        server.wait(30)


def test_every_widget_of_a_chapter_works(page: Page) -> None:
    outputs = "cells.flatMap(cell => cell.model.sharedModel.getOutputs?.() ?? [])"
    assert page.run(f"return {outputs}.length") > 50
    assert page.run(f"return {outputs}.filter(o => o.output_type === 'error')") == []
    # the bar: once the first cell has run, a cell has the colour of its kind
    page.find("predict(", ".minillm-predict")
    bar = "return getComputedStyle(node('predict(')).borderLeft"
    assert "4px solid" in page.run(bar)

    page.find("predict(", "button").click()
    page.wait("return node('predict(').textContent.includes('Recorded: a.')")

    pictures = "return node('explore(').querySelectorAll('.jupyter-widgets img').length"
    assert page.run(pictures) == 0
    slider = page.find("explore(", ".noUi-handle")
    slider.send_keys(test_browser.Keys.ARROW_RIGHT)
    page.wait(f"{pictures} > 0")  # drawn again, below the first drawing

    page.driver.switch_to.frame(page.find("step_through(", "iframe"))
    there = "return !!window.traceView && traceView.app.frames.length > 0"
    page.wait(there, helpers="")
    page.driver.switch_to.default_content()

    for number, question in enumerate(load_quiz(CHAPTER)):
        page.find("quiz(", "button")
        row = f"node('quiz(').querySelectorAll('.widget-hbox')[{number}]"
        page.run(f"{row}.querySelectorAll('button')[{'abc'.index(question.answer)}].click()")
        page.wait(f"return node('quiz(').textContent.includes('{number + 1}. right. ')")

    before = page.run("return cells.length")
    page.find('task("e06.1")', "button[data-code]").click()
    page.wait(f"return cells.length === {before + 1}")
    source = "return cells[at('task(\"e06.1\")') + 1].model.sharedModel.getSource()"
    starter = page.wait(source)
    assert starter.startswith('"""e06.1')
    assert starter.endswith('check("e06.1", Scheduler)')
