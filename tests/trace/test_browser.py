"""The page in a real browser, driven by keys and pointer, and what it says read back.

It needs Chromium with its driver, and selenium; where they are missing the tests are skipped.
"""

import html
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minillm.lab.drawings.figure import widget
from minillm.lab.drawings.page import write_page
from minillm.lab.drawings.timeline import BEHIND, timeline
from tests.trace.simulation import data, simulate, with_ranks

webdriver = pytest.importorskip("selenium.webdriver")
Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
CHROME = shutil.which("chromium") or shutil.which("chromium-browser")
CHROME = CHROME or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROME and DRIVER), reason="no Chromium with a driver"),
]
SIZES: dict[int, dict[str, Any]] = {
    10: {"num_blocks": 24, "pause": 6},
    100: {"num_blocks": 40, "pause": 6, "mode": "swap"},
    1000: {"num_blocks": 2000, "pause": 5, "mode": "swap", "seats": 64, "tokens": 560,
           "most_steps": 5000},
}  # fmt: skip
HOSTILE = ("<img src=x onerror='window.broken=1'>", "</script><script>window.broken=1</script>",
           "שלום \u202e olleh", "y" * 500, "a\nb")  # fmt: skip


class Viewer:
    """A browser with the page of some data."""

    def __init__(self, driver: Any, path: Path, drawing: dict[str, Any]):
        self.driver, self.data = driver, drawing
        driver.get(path.as_uri())
        self.wait("return !!window.traceView && traceView.app.frames.length > 0")

    def run(self, script: str, *args: Any) -> Any:
        """Run JavaScript and return what it returns."""
        return self.driver.execute_script(script, *args)

    def wait(self, script: str) -> None:
        """Wait until JavaScript returns something true, 20 seconds at most."""
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 20, 0.02).until(lambda _: self.run(script))

    def settle(self) -> None:
        """Wait until frames and the live region have caught up."""
        self.driver.execute_async_script(
            "const done = arguments[0]; setTimeout(() => requestAnimationFrame("
            "() => requestAnimationFrame(done)), 150)"
        )

    def press(self, *keys: str, shift: bool = False) -> None:
        """Type keys, one after the other, wherever the focus is."""
        actions = webdriver.ActionChains(self.driver, duration=0)
        if shift:
            actions.key_down(Keys.SHIFT)
        for key in keys:
            actions.send_keys(key)
        if shift:
            actions.key_up(Keys.SHIFT)
        actions.perform()
        self.settle()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A pointer event, in pixels of the window."""
        event = {"type": kind, "x": x, "y": y, **more}
        self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)

    def hover(self, x: float, y: float) -> None:
        self.mouse("mouseMoved", x, y)
        self.settle()

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)
        self.settle()

    def drag(self, start: tuple[float, float], end: tuple[float, float], **more: Any) -> None:
        self.mouse("mousePressed", *start, button="left", clickCount=1, **more)
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        for place in (middle, end):
            self.mouse("mouseMoved", *place, button="left", **more)
        self.mouse("mouseReleased", *end, button="left", clickCount=1, **more)
        self.settle()

    def text(self, element: str) -> str:
        """What an element says, without the marks that isolate names."""
        text = self.run("return document.getElementById(arguments[0]).textContent", element)
        return text.replace("\u2068", "").replace("\u2069", "")

    @property
    def cursor(self) -> dict[str, Any]:
        return self.run("return traceView.app.cursor")

    @property
    def view(self) -> tuple[float, float]:
        return tuple(self.run("return [traceView.app.scale.from, traceView.app.scale.to]"))

    def place(self, panel: str, column: int, row: int) -> tuple[float, float]:
        """The middle of a cell, in pixels of the window."""
        x, y = self.run(
            """const { app } = traceView, { scale } = app, rows = app[arguments[0]];
            const box = document.getElementById(arguments[0] === "map" ? "blocks" : "gantt")
              .getBoundingClientRect(), column = arguments[1];
            const middle = (scale.left(column) + scale.right(column)) / 2;
            return [box.left + app.gutter + scale.x(middle),
                    box.top + rows.top(arguments[2]) + rows.rowHeight / 2];""",
            panel, column, row,
        )  # fmt: skip
        return x, y

    # ---- what the data says ------------------------------------------------------------------

    def span(self, sequence: int, column: int) -> list[Any] | None:
        spans = self.data["sequences"][sequence]["spans"]
        return next((span for span in spans if span[1] <= column <= span[2]), None)

    def reason(self, index: int, column: int) -> str:
        text = self.data["reasons"][index]
        runs = [run for run in self.data["steps"]["blocked"] if run[0] <= column <= run[1]]
        if text != BEHIND or not runs:
            return text
        name = self.data["sequences"][runs[0][2]]["name"]
        return f"behind {name} ({self.data['reasons'][runs[0][3]]})"

    def state(self, sequence: int, column: int) -> str:
        """What the page must say of a sequence, from the data alone."""
        span = self.span(sequence, column)
        if span is None:
            early = column < self.data["sequences"][sequence]["spans"][0][1]
            return "not there yet" if early else "finished"
        kind, first, _, a, *more = span
        if kind in "pr":
            verb = "prefill of" if kind == "p" else "recomputed"
            return f"{verb} {more[0]} token"
        if kind == "d":
            return f"decode of 1 token, position {a + column - first:,}"
        says = {"w": "waiting", "s": "running, but stalled", "o": "swapped out to host memory",
                "x": "preempted, its blocks are gone"}  # fmt: skip
        return f"{says[kind]}: {self.reason(a, column)}"

    def events(self, sequence: int) -> list[int]:
        """First columns of preemptions and refusals."""
        spans = self.data["sequences"][sequence]["spans"]
        return [
            span[1]
            for before, span in zip([["", 0, 0, 0], *spans], spans, strict=False)
            if span[0] in "wsox" and (before[0], before[3]) != (span[0], span[3])
        ]

    def step(self, column: int) -> str:
        return f"Step {self.data['steps']['step'][column]}."


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROME
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield browser
    browser.quit()


@pytest.fixture(autouse=True)
def silent(driver: Any) -> Iterator[None]:
    """A window of a known size, and nothing on the console in the end."""
    resize(driver, 1400, 900)
    still = {"name": "prefers-reduced-motion", "value": "reduce"}
    light = {"name": "prefers-color-scheme", "value": "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [still, light]})
    yield
    assert driver.get_log("browser") == []


def resize(driver: Any, width: int, height: int, ratio: float = 1) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": ratio, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, tuple[Path, dict[str, Any]]]:
    folder, found = tmp_path_factory.mktemp("pages"), {}
    drawings: dict[Any, Any] = {size: data(size, **options) for size, options in SIZES.items()}
    drawings["hostile"] = data(8, 24, names=HOSTILE)
    drawings["ranks"] = timeline(with_ranks(simulate(100, **SIZES[100]), 3))
    for size, drawing in drawings.items():
        found[size] = (folder / f"{size}.html", drawing)
        write_page(drawing, found[size][0], f"{size}.jsonl")
    return found


@pytest.fixture(params=list(SIZES))
def viewer(request: pytest.FixtureRequest, driver: Any, pages: Any) -> Viewer:
    return Viewer(driver, *pages[request.param])


@pytest.fixture
def small(driver: Any, pages: Any) -> Viewer:
    return Viewer(driver, *pages[10])


def preempted(viewer: Viewer) -> int:
    """A sequence that was preempted, and was refused for other reasons, too."""
    return max(
        range(len(viewer.data["sequences"])),
        key=lambda i: (viewer.data["sequences"][i]["preemptions"] > 0, len(viewer.events(i))),
    )


def choose(viewer: Viewer, sequence: int) -> None:
    """Find a request by its whole name; the first match may be another's beginning."""
    viewer.press("/", viewer.data["sequences"][sequence]["name"])
    for _ in range(1000):
        if viewer.cursor["sequence"] == sequence:
            break
        viewer.press(Keys.ENTER)
    assert viewer.cursor["sequence"] == sequence
    viewer.press(Keys.ESCAPE)  # leaves the search, and keeps what is chosen


def test_totals_are_those_of_the_data(viewer: Viewer) -> None:
    steps, sequences = viewer.data["steps"], viewer.data["sequences"]
    text, number = viewer.text("totals"), sum(steps["recomputed"])
    again = f", {number:,} again" if number else ""
    for what, value in {
        "steps": len(steps["step"]),
        f"tokens computed{again}": sum(steps["prefill"]) + sum(steps["decode"]),
        "preemptions": sum(sequence["preemptions"] for sequence in sequences),
        "prompt tokens cached": sum(s["cached"] for s in sequences if s["parent"] is None),
    }.items():
        assert f"{what}{value:,}" in text
    assert len(sequences) == viewer.run("return traceView.model.sequences.length")
    told = "const { model } = traceView; return model.sequences.map((_, i) => model.recomputed(i))"
    assert sum(viewer.run(told)) == number


def test_arrows_move_through_the_steps(viewer: Viewer) -> None:
    last = len(viewer.data["steps"]["step"]) - 1
    for key, shift, column in (
        (Keys.HOME, False, 0),
        (Keys.ARROW_RIGHT, False, 1),
        (Keys.ARROW_RIGHT, True, 11),
        (Keys.ARROW_LEFT, False, 10),
        (Keys.END, False, last),
        (Keys.ARROW_RIGHT, False, last),
        (Keys.ARROW_LEFT, True, last - 10),
    ):
        viewer.press(key, shift=shift)
        assert viewer.cursor["column"] == column
        assert viewer.cursor["pinned"]
        assert viewer.text("live").startswith(viewer.step(column))
        steps = viewer.data["steps"]
        counts = f"{steps['running'][column]} running, {steps['waiting'][column]} waiting, "
        assert counts in viewer.text("live")
        assert f"running{steps['running'][column]:,}" in viewer.text("details")


def test_arrows_move_through_the_requests(viewer: Viewer) -> None:
    order = viewer.run("return traceView.model.order('arrival')")
    viewer.press(Keys.HOME)
    for key, shift, row in (
        (Keys.ARROW_DOWN, False, 0),
        (Keys.ARROW_DOWN, False, 1),
        (Keys.ARROW_DOWN, True, 11),
        (Keys.ARROW_UP, False, 10),
        (Keys.ARROW_UP, True, 0),
    ):
        viewer.press(key, shift=shift)
        sequence = order[row]
        assert viewer.cursor["sequence"] == sequence
        name = viewer.data["sequences"][sequence]["name"]
        assert f"{name}: {viewer.state(sequence, 0)}" in viewer.text("live")


def test_n_and_p_go_through_preemptions_and_refusals(viewer: Viewer) -> None:
    sequence = preempted(viewer)
    name = viewer.data["sequences"][sequence]["name"]
    choose(viewer, sequence)
    viewer.press(Keys.HOME)
    columns = [column for column in viewer.events(sequence) if column > 0][:8]
    assert any(viewer.span(sequence, column)[0] in "xo" for column in viewer.events(sequence))  # type: ignore[index]
    for key, path in (("n", columns), ("p", columns[-2::-1])):
        for column in path:
            viewer.press(key)
            assert viewer.cursor["column"] == column
            expected = f"{viewer.step(column)} {name}: {viewer.state(sequence, column)}."
            assert viewer.text("live").startswith(expected)
            assert viewer.state(sequence, column) in viewer.text("details")


def test_a_preemption_is_told_with_its_victim_and_its_winner(viewer: Viewer) -> None:
    victim, span = next(
        (index, span)
        for index, sequence in enumerate(viewer.data["sequences"])
        for span in sequence["spans"]
        if span[0] in "xo" and "preempted for" in viewer.data["reasons"][span[3]]
    )
    viewer.press("n")  # nothing is chosen: the first preemption of all
    first = min(span[1] for s in viewer.data["sequences"] for span in s["spans"] if span[0] in "xo")
    assert viewer.cursor["column"] == first
    viewer.run("traceView.app.move({ column: arguments[0], pinned: true })", span[1])
    viewer.settle()
    name = viewer.data["sequences"][victim]["name"]
    details = viewer.text("details")
    assert "Preempted in this step" in details
    assert f"{name}: {viewer.data['reasons'][span[3]]}" in details
    assert f"{name}: {viewer.state(victim, span[1])}" in viewer.text("live")


def test_a_request_says_when_it_lost_its_blocks_and_to_whom(viewer: Viewer) -> None:
    sequence, reasons = preempted(viewer), viewer.data["reasons"]
    lost = [
        (viewer.data["steps"]["step"][span[1]], reasons[span[3]])
        for span in viewer.data["sequences"][sequence]["spans"]
        if span[0] in "xo" and reasons[span[3]].startswith("preempted for")
    ]
    assert lost
    choose(viewer, sequence)
    details = viewer.text("details")
    listed = "".join(f"step {step:,}: {reason}" for step, reason in lost[:12])
    assert f"preemptions{len(lost)}" in details
    assert f"Lost its blocks{listed}" in details
    viewer.run("document.querySelector('#details button.link').click()")
    viewer.settle()
    assert viewer.text("live").startswith(f"Step {lost[0][0]}.")


def test_the_next_in_line_and_its_reason_are_told(viewer: Viewer) -> None:
    for first, last, sequence, reason in viewer.data["steps"]["blocked"][:40:10]:
        viewer.run("traceView.app.move({ column: arguments[0], pinned: true })", last)
        viewer.settle()
        name, why = viewer.data["sequences"][sequence]["name"], viewer.data["reasons"][reason]
        assert f"Next in line, but refused{name}: {why}" in viewer.text("details")
        assert viewer.run("return traceView.model.blockedAt(arguments[0])", first)
    told = viewer.run(
        "const { model } = traceView; return [...model.begin.keys()].map((c) => model.blockedAt(c))"
    )
    expected: list[Any] = [None] * len(told)
    for first, last, *who in viewer.data["steps"]["blocked"]:
        expected[first : last + 1] = [who] * (last + 1 - first)
    assert told == expected
    assert None in told


def test_hovering_shows_a_click_pins_and_escape_releases(small: Viewer) -> None:
    order = small.run("return traceView.model.order('arrival')")
    sequence, other = order[3], order[0]
    column = small.data["sequences"][sequence]["spans"][1][1]
    small.hover(*small.place("gantt", column, 3))
    assert (small.cursor["sequence"], small.cursor["column"]) == (sequence, column)
    assert not small.cursor["pinned"]
    assert small.state(sequence, column) in small.text("details")
    assert small.state(sequence, column) in small.text("tip")
    small.click(*small.place("gantt", column, 3))
    assert small.cursor["pinned"]
    small.hover(*small.place("gantt", 2, 0))
    assert small.cursor["sequence"] == sequence
    assert small.state(other, 2) in small.text("tip")
    small.press(Keys.ESCAPE)
    assert not small.cursor["pinned"]
    small.hover(*small.place("gantt", 2, 0))
    assert small.cursor["sequence"] == other


def test_a_block_says_who_holds_it(small: Viewer) -> None:
    seen = set()
    for block, changes in enumerate(small.data["blocks"]):
        ends = [column for column, _ in changes[1:]] + [len(small.data["steps"]["step"])]
        for (column, holders), end in zip(changes, ends, strict=False):
            if end > column and min(len(holders), 2) not in seen:
                seen.add(min(len(holders), 2))
                small.hover(*small.place("map", column, block))
                details = small.text("details")
                assert f"Block {block}" in details
                names = [small.data["sequences"][holder]["name"] for holder in holders]
                says = ["free after use", f"held by {''.join(names[:1])}", "shared by "]
                assert says[min(len(holders), 2)] in details
                assert len(holders) < 2 or f"shared by {len(holders)} sequences" in details
                assert all(name in details for name in names)
    assert seen == {0, 1, 2}


def test_keys_and_buttons_zoom(viewer: Viewer) -> None:
    everything = viewer.view
    viewer.press("+", "+")
    assert (viewer.view[1] - viewer.view[0]) == pytest.approx(everything[1] / 4, abs=4)
    viewer.press("-")
    assert (viewer.view[1] - viewer.view[0]) == pytest.approx(everything[1] / 2, abs=4)
    viewer.press("0")
    assert viewer.view == everything
    viewer.driver.find_element("id", "zoom-in").click()
    viewer.settle()
    assert viewer.view[1] - viewer.view[0] == pytest.approx(everything[1] / 2, abs=4)
    viewer.driver.find_element("id", "show-all").click()
    viewer.settle()
    assert viewer.view == everything


def test_moving_pictures_end_where_the_still_ones_do(small: Viewer) -> None:
    moving = {"name": "prefers-reduced-motion", "value": "no-preference"}
    small.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [moving]})
    total = len(small.data["steps"]["step"])
    small.run("traceView.app.zoom(0.5); traceView.app.zoom(0.5);")
    assert small.view[1] - small.view[0] > total / 4  # still on its way
    small.settle()
    small.settle()
    assert small.view[1] - small.view[0] == pytest.approx(total / 4)
    small.run("traceView.app.zoom(4); traceView.app.setByTime(true);")
    small.settle()
    small.settle()
    assert small.view == pytest.approx((0, small.run("return traceView.model.duration")))


def test_the_wheel_zooms_at_the_pointer_and_a_drag_moves(small: Viewer) -> None:
    x, y = small.place("gantt", 40, 2)
    before = small.run("return traceView.app.scale.unit(arguments[0])", x - 172)
    for _ in range(4):
        small.mouse("mouseWheel", x, y, deltaX=0, deltaY=-120, modifiers=2)  # with Ctrl
    small.settle()
    assert small.view[1] - small.view[0] < 40
    after = small.run("return traceView.app.scale.unit(arguments[0])", x - 172)
    assert after == pytest.approx(before, abs=0.1)  # the pointer moves by whole pixels
    start = small.view
    small.drag((x, y), (x + 200, y))
    assert small.view[0] < start[0]
    assert small.view[1] - small.view[0] == pytest.approx(start[1] - start[0])
    assert not small.cursor["pinned"]  # a drag is no click


def test_shift_and_drag_zooms_to_the_range(small: Viewer) -> None:
    start, end = small.place("gantt", 10, 2), small.place("gantt", 29, 2)
    small.drag(start, end, modifiers=8)
    assert small.view == pytest.approx((10.5, 29.5), abs=0.2)


def test_the_overview_moves_and_draws_the_window(small: Viewer) -> None:
    box = small.run("return document.getElementById('overview').getBoundingClientRect()")
    y, total = box["top"] + 15, len(small.data["steps"]["step"])

    def x(share: float) -> float:
        return box["left"] + box["width"] * share

    small.drag((x(0.5), y), (x(0.75), y))
    assert small.view == pytest.approx((total / 2, total * 0.75), abs=0.5)
    small.drag((x(0.6), y), (x(0.4), y))
    assert small.view == pytest.approx((total * 0.3, total * 0.55), abs=0.5)


def test_time_instead_of_steps_keeps_the_cursor_and_shows_pauses(small: Viewer) -> None:
    small.press(Keys.HOME, "t")
    assert small.run("return traceView.app.scale.byTime")
    assert small.cursor["column"] == 0
    steps, x = small.data["steps"], None
    for column in range(0, len(steps["step"]), 7):
        small.hover(*small.place("gantt", column, 0))
        small.press(Keys.ESCAPE)
        small.hover(*small.place("gantt", column, 1))
        assert small.cursor["column"] == column
        x = small.place("gantt", column, 0)[0] if x is None else x
        assert small.place("gantt", column, 0)[0] >= x
    assert "ms" in small.text("details")
    small.press("t")
    assert not small.run("return traceView.app.scale.byTime")


def test_a_block_is_what_it_was_while_nothing_runs(driver: Any, pages: Any) -> None:
    viewer = Viewer(driver, *pages[100])
    viewer.press("t")
    holes = viewer.run(
        """const { app, model } = traceView, { map } = app, columns = app.scale.columns(app.ratio);
        const pauses = model.end.filter((end, c) => end < model.begin[c + 1]).length;
        const holes = [...map.shown.keys()].filter((row) => {
          map.raster.codes.fill(0);
          map._codes(row, columns);
          const codes = map.raster.codes, first = codes.findIndex((code) => code > 0);
          return codes.indexOf(0, first) >= 0;
        });
        return [pauses, map.group, holes];"""
    )
    assert holes[0] > 0
    assert holes[1:] == [1, []]


def test_rows_can_be_sorted(viewer: Viewer) -> None:
    sequences = viewer.data["sequences"]
    for key in ("end", "waiting", "preemptions"):
        viewer.press("s")
        assert viewer.run("return traceView.app.sort") == key
        order = viewer.run("return traceView.model.order(arguments[0])", key)
        assert sorted(order) == list(range(len(sequences)))
        if key == "end":
            ends = [sequences[i]["ended"] for i in order]
            assert [e for e in ends if e is not None] == sorted(e for e in ends if e is not None)
        if key == "preemptions":
            counts = [sequences[i]["preemptions"] for i in order]
            assert counts == sorted(counts, reverse=True)
    viewer.press("s")
    assert viewer.run("return traceView.app.sort") == "arrival"


def test_a_preemption_of_one_step_is_visible_when_all_is_shown(viewer: Viewer) -> None:
    missing = viewer.run(
        """const { app, model } = traceView, { gantt } = app, missing = [];
        app.scale.show(0, app.scale.extent);
        const columns = app.scale.columns(app.ratio);
        gantt.draw(columns);
        model.sequences.forEach((_, sequence) => {
          gantt.raster.codes.fill(0);
          gantt._codes(sequence, columns, false);
          // Only what is as rare, or rarer, may stand in its place.
          for (let b = model.barOffsets[sequence]; b < model.barOffsets[sequence + 1]; b++) {
            const shown = gantt.raster.codes[columns.begin[model.bars.first[b]]];
            if (model.bars.code[b] > 3 && shown < model.bars.code[b]) missing.push(sequence);
          }
        });
        return missing;"""
    )
    assert missing == []


def test_zooming_in_gives_many_rows_room(driver: Any, pages: Any) -> None:
    viewer = Viewer(driver, *pages[1000])
    assert viewer.run("return traceView.app.gantt.group") > 1
    viewer.run("traceView.app.show(2000, 2030)")
    viewer.settle()
    assert viewer.run("return traceView.app.gantt.group") == 1
    rows = viewer.run(
        "const g = traceView.app.gantt; return g.order.slice(g.firstRow, g.lastRow + 1)"
    )
    assert any(viewer.span(sequence, 2010) for sequence in rows)


def test_help_and_search_can_be_used_by_keyboard(small: Viewer) -> None:
    small.press("?")
    assert small.run("return document.getElementById('help').open")
    small.press(Keys.ESCAPE)
    assert not small.run("return document.getElementById('help').open")
    small.press("/", "nobody")
    assert small.text("found") == "none"
    small.press(*[Keys.BACKSPACE] * 6, "REQUEST-7")
    assert small.data["sequences"][small.cursor["sequence"]]["name"] == "request-7"
    assert small.text("found").startswith("1 of ")


def test_names_of_strangers_stay_text(driver: Any, pages: Any) -> None:
    viewer = Viewer(driver, *pages["hostile"])
    viewer.press(Keys.HOME)
    for _ in viewer.data["sequences"]:
        viewer.press(Keys.ARROW_DOWN)
        name = viewer.data["sequences"][viewer.cursor["sequence"]]["name"].replace("\n", "·")
        assert name in viewer.text("details")
    assert viewer.run("return window.broken") is None
    assert viewer.run("return document.querySelectorAll('img, #details script').length") == 0


def test_both_panels_are_seen_in_a_notebook(driver: Any, pages: Any) -> None:
    resize(driver, 966, 722)
    viewer = Viewer(driver, *pages[100])
    viewer.settle()
    bottom = "return document.getElementById(arguments[0]).getBoundingClientRect().bottom"
    assert viewer.run(bottom, "blocks-scroll") <= viewer.run(bottom, "plot") + 1


@pytest.mark.parametrize(("width", "ratio"), [(600, 1), (700, 2), (1400, 1.5), (2560, 1)])
def test_every_width_and_resolution_is_filled(width, ratio, driver, pages):
    resize(driver, width, 800, ratio)
    viewer = Viewer(driver, *pages["ranks"])
    viewer.settle()
    assert viewer.run("return document.documentElement.scrollWidth") <= width
    boxes = viewer.run(
        "return [...document.querySelectorAll('#plot canvas')].filter((c) => !c.closest('li'))"
        ".map((c) => [c.width / c.offsetWidth, c.getBoundingClientRect().right])"
    )
    for density, right in boxes:
        assert density == pytest.approx(ratio, abs=0.02)
        assert right <= width + 0.5


def test_dark_is_another_palette(small: Viewer) -> None:
    light = small.run("return getComputedStyle(document.body).backgroundColor")
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    small.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [dark]})
    small.settle()
    assert small.run("return traceView.app.theme.dark")
    assert small.run("return getComputedStyle(document.body).backgroundColor") != light


def test_two_widgets_live_on_one_page(driver: Any, pages: Any, tmp_path: Path) -> None:
    frames = "".join(widget(pages[size][1], title=str(size)).value for size in (10, 100))
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!DOCTYPE html><title>{html.escape('two')}</title>{frames}", "utf-8")
    driver.get(notebook.as_uri())
    for number, size in enumerate((10, 100)):
        driver.switch_to.frame(number)
        steps = len(pages[size][1]["steps"]["step"])
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(driver, 20).until(
            lambda _: driver.execute_script("return !!window.traceView")
        )
        assert driver.execute_script("return traceView.model.numColumns") == steps
        driver.switch_to.default_content()


def test_an_empty_trace_says_so(driver: Any, tmp_path: Path) -> None:
    write_page(data(0, 8), tmp_path / "empty.html")
    driver.get((tmp_path / "empty.html").as_uri())
    text = driver.execute_script("return document.getElementById('details').textContent")
    assert "This trace has no steps" in text


# ---- ranks ---------------------------------------------------------------------------------------


def colours(viewer: Viewer, column: int) -> list[list[str]]:
    """Of each lane, the colours in the middle of a column, from below, each once."""
    return viewer.run(
        """const { app } = traceView, { scale, ratio } = app, { height, ranks } = app.curves.lanes;
        const middle = (scale.left(arguments[0]) + scale.right(arguments[0])) / 2;
        const tall = Math.round(height * ratio), context = document.getElementById("ranks")
          .getContext("2d"), x = Math.round(scale.x(middle) * ratio);
        const { data } = context.getImageData(x, 0, 1, tall * ranks.length);
        return ranks.map((_, rank) => {
          const found = [];
          for (let y = (rank + 1) * tall - 1; y >= rank * tall; y--) {
            const [r, g, b, a] = data.slice(4 * y, 4 * y + 4), colour = `rgb(${r}, ${g}, ${b})`;
            if (a === 255 && found.at(-1) !== colour) found.push(colour);
          }
          return found;
        });""",
        column,
    )  # fmt: skip


def test_ranks_have_lanes(driver: Any, tmp_path: Path) -> None:
    drawing = timeline(with_ranks(simulate(10, 24), 3, slow=1))
    write_page(drawing, tmp_path / "ranks.html")
    viewer = Viewer(driver, tmp_path / "ranks.html", drawing)
    assert viewer.text("ranks-title") == "Ranks (3)"
    swatches = viewer.run(
        "return [...document.querySelectorAll('#ranks-legend i')].map((i) => i.style.background)"
    )
    for seen in colours(viewer, 5):
        assert [each for each in seen if each in swatches] == swatches, seen
    box = viewer.run("return document.getElementById('ranks').getBoundingClientRect().toJSON()")
    viewer.hover(box["x"] + 3, box["y"] + box["height"] / 2)
    assert viewer.text("tip").startswith("Rank 1: 9 ms + 1 ms")
    assert "rank 19 ms + 1 ms" in viewer.text("ranks-names")
    assert "rank 19 ms + 1 ms" in viewer.text("details")


def test_lanes_go_with_the_curves(driver: Any, pages: Any) -> None:
    """Without them there is more room for the rows, as in a notebook."""
    resize(driver, 966, 722)
    viewer = Viewer(driver, *pages["ranks"])
    tall = "return document.getElementById('ranks-lane').offsetHeight"
    assert viewer.run(tall) == 3 * 22 + 1
    viewer.press("c")
    assert viewer.run(tall) == 0
    viewer.press("c")
    assert viewer.run(tall) == 3 * 22 + 1


def test_one_rank_has_no_lane(small: Viewer) -> None:
    shown = "return ['ranks-lane', 'ranks-caption'].map((id) => document.getElementById(id).hidden)"
    assert small.run(shown) == [True, True]
    small.press("ArrowRight")
    assert "Ranks" not in small.text("details")
