"""What the playground shows in a real browser: tokens, prompt, steps, load, and every width."""

import re
import threading
from typing import Any

import pytest

from tests.serving.playground_server import Script, frames
from tests.serving.playground_tab import LOAD, SENTENCE, TRACE, Keys, prefer, resize, usage

pytest_plugins = ("tests.serving.playground_fixtures",)
pytestmark = pytest.mark.slow


def test_underlines_tell_probabilities_without_colour(tab: Any) -> None:
    page = tab(Script(SENTENCE))
    page.finish()
    lines = page.run(
        "return [...document.querySelectorAll('#output .token')].map((e) => {"
        "const s = getComputedStyle(e); return s.borderBottomStyle + s.borderBottomWidth })"
    )
    assert len(set(lines)) == 5
    legend = page.run(
        "return [...document.querySelectorAll('#legend .token')].map((e) => {"
        "const s = getComputedStyle(e); return s.borderBottomStyle + s.borderBottomWidth })"
    )
    assert lines == legend


def test_focus_and_pointer_show_alternatives(tab: Any) -> None:
    from selenium.webdriver import ActionChains

    page = tab(Script(SENTENCE))
    page.finish()
    page.run("document.querySelector('#output [tabindex=\"0\"]').focus()")
    page.press(Keys.RIGHT)
    rows = "return [...document.querySelectorAll('#token-text li')].map((e) => e.innerText.trim())"
    expected = ['" was"\nchosen\n60.0%', '" is"\n30.0%', '"\\n"\n5.00%', "all other tokens 5.00%"]
    assert page.run(rows) == expected
    label = "return document.activeElement.getAttribute('aria-label')"
    assert page.run(label) == '" was", 60.0%'
    for key, token in ((Keys.END, "."), (Keys.LEFT, " fox"), (Keys.HOME, " there")):
        page.press(key)
        assert page.run("return document.activeElement.textContent") == token
    assert page.run("return document.querySelectorAll('#output [tabindex=\"0\"]').length") == 1
    fox = page.driver.find_elements("css selector", "#output .token")[3]
    ActionChains(page.driver, duration=0).move_to_element(fox).perform()
    assert page.run(rows)[:2] == ['" dog"\n50.0%', '" fox"\nchosen\n10.0%']


def test_arrows_move_between_lines(tab: Any) -> None:
    page = tab(Script(frames(*((f" word{i}", -0.1, {}) for i in range(120)))))
    page.finish()
    page.run("document.querySelector('#output [tabindex=\"0\"]').focus()")
    place = "const b = document.activeElement.getBoundingClientRect(); return [b.left, b.top]"
    start = page.run(place)
    page.press(Keys.DOWN)
    below = page.run(place)
    assert below[1] > start[1]
    assert abs(below[0] - start[0]) < 80
    page.press(Keys.UP)
    assert page.run(place)[1] == start[1]


def test_counts_and_times_of_the_reply(tab: Any) -> None:
    page = tab(Script(SENTENCE, usage(16, 5, 4), queue_header="2.5"))
    page.finish()
    result = page.run(
        "return Object.fromEntries([...document.querySelectorAll('#result div')]"
        ".map((e) => [e.querySelector('dt').textContent, e.querySelector('dd').textContent]))"
    )
    assert result["tokens (length)"] == "5"
    assert result["prompt tokens cached"] == "4 of 16"
    assert result["in the queue"] == "2.5 ms"
    assert re.fullmatch(r"[\d.]+ (µs|ms|s)", result["to the first token (TTFT)"])


def test_the_cached_part_of_the_prompt_is_marked(tab: Any) -> None:
    page = tab(Script(SENTENCE, usage(16, 5, 4)))
    page.fill("prompt", "Once upon a time")
    page.finish()
    page.wait("return document.getElementById('prefix-prompt').checkVisibility()")
    assert page.run("return document.querySelector('#prefix mark').textContent") == "Once"
    assert page.text("prefix-prompt") == "Once upon a time"
    assert page.text("prefix-text").startswith("4 of 16 tokens came from the prefix cache")
    page.driver.find_element("id", "chat-tab").click()
    page.fill("message", "Once upon a chat")
    page.finish()
    page.wait("return document.getElementById('prefix-prompt').checkVisibility()")
    assert page.text("prefix-prompt") == "Once upon a chat"
    page.driver.find_element("id", "completions-tab").click()
    page.fill("prompt", "another length")  # other tokens than usage says: no part is marked
    page.finish()
    page.wait("return document.getElementById('trace').checkVisibility()")  # it comes last
    assert page.shown("prefix-text")
    assert not page.shown("prefix-prompt")


def test_the_steps_of_the_request_are_shown(tab: Any) -> None:
    page = tab(Script(SENTENCE, usage(16, 5, 4), trace=TRACE))
    page.finish()
    page.wait("return document.getElementById('trace-list').checkVisibility()")
    rows = page.run(
        "return [...document.querySelectorAll('#trace-list li')].map((e) => e.innerText)"
    )
    assert [" ".join(row.split()) for row in rows] == [
        "waiting steps 6–7 at 1 ms, for 8 ms no blocks: needs 7, has 3",
        "waiting step 8 at 9 ms, for 3 ms no blocks: needs 7, has 5",
        "prefill step 9 12 tokens at 12 ms, for 8 ms",
        "decode steps 10–13 4 tokens at 20 ms, for 10 ms",
        "finished step 14 at 30 ms",
    ]
    assert "missed because last token" in page.text("trace-note")
    widths = page.run(
        "return [...document.querySelectorAll('#trace-bar i')].map((e) => e.offsetWidth)"
    )
    inner = "return document.getElementById('trace-bar').clientWidth"
    assert widths[4] > widths[1] > widths[2] > widths[0]
    assert sum(widths) == pytest.approx(page.run(inner), abs=10)  # there are gaps between them
    page.wait("return document.getElementById('result').textContent.includes('in the queue12 ms')")


@pytest.mark.parametrize("mode", ["completions", "chat"])
def test_a_request_that_waits_says_why(tab: Any, mode: str) -> None:
    gate = threading.Semaphore(0)
    waiting = {**TRACE, "state": "waiting", "events": TRACE["events"][:1]}  # type: ignore[index]
    page = tab(Script(SENTENCE, gate=gate, late_headers=True, trace=waiting, load=LOAD))
    page.driver.find_element("id", f"{mode}-tab").click()
    page.fill("prompt" if mode == "completions" else "message", "Once")
    page.send()
    page.wait("return document.getElementById('trace-list').checkVisibility()")
    assert "no blocks: needs 7, has 3" in page.text("trace-list")
    assert page.text("trace-note").startswith("The request is waiting")
    kind = "cmpl" if mode == "completions" else "chatcmpl"
    assert page.script.asked(f"/debug/requests/{kind}-{page.script.names[-1]}")
    page.press(Keys.ESCAPE)
    page.wait("return document.getElementById('status').textContent === 'Stopped after 0 tokens.'")
    assert page.script.gone.wait(10)


def test_steps_that_are_off_are_one_sentence(tab: Any) -> None:
    page = tab(Script(SENTENCE))
    page.finish()
    page.wait("return document.getElementById('trace').checkVisibility()")
    assert "--enable-request-trace" in page.text("trace-note")
    assert not page.shown("trace-list")
    assert not page.shown("trace-bar")


def test_the_load_is_read_every_second(tab: Any) -> None:
    script = Script(SENTENCE, load=dict(LOAD), speed=100)
    page = tab(script)
    page.wait("return document.getElementById('load-generated').textContent !== '–'")
    assert page.text("load-running") == "3"
    assert page.text("load-waiting") == "1"
    assert page.text("load-cache") == "25.0%"
    assert 50 < float(page.text("load-generated")) < 200  # a busy machine reads its clock late
    assert page.text("load-prompts") == "0"
    script.load = {**LOAD, "running": 12}
    page.wait("return document.getElementById('load-running').textContent === '12'")


def test_a_server_without_metrics_shows_its_load(tab: Any) -> None:
    page = tab(Script(SENTENCE, load=LOAD))
    page.wait("return document.getElementById('load-note').checkVisibility()")
    page.wait("return document.getElementById('load-running').textContent === '3'")
    page.script.load = {**LOAD, "running": 12}
    page.wait("return document.getElementById('load-running').textContent === '12'")
    assert page.shown("load-note")
    assert len(page.script.asked("/metrics")) == 1


def test_a_server_without_load_is_not_asked_again(tab: Any) -> None:
    page = tab(Script(SENTENCE))
    page.wait("return document.getElementById('load-note').checkVisibility()")
    page.driver.execute_async_script("setTimeout(arguments[0], 2300)")
    assert len(page.script.asked("/load")) == 1


def token(text: str) -> Any:
    return (text, -0.5, {})


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        # A character of three tokens, whose text comes with the last one.
        ([("", [token("\ufffd")]), ("", [token("\ufffd")]),
          ("🦊 a", [token("\ufffd"), token(" a")])],
         ["", "", "🦊", " a"]),
        # Text is held back, because a stop string may begin there.
        ([("", [token("Hello")]), ("He", [token(" you")]), ("llo yo", [token("<end>")])],
         ["Hello", " yo", ""]),
        # A special token has no text.
        ([("", [token("<s>")]), ("a b", [token("a"), token(" b")])], ["", "a", " b"]),
        # The strings of these tokens lack the spaces.
        ([("a b c", [token("a"), token("b"), token("c")])], ["a", " b ", "c"]),
        ([("a", [token("a")]), ("\n\n", [token("\n\n")])], ["a", "\n\n"]),
    ],
)  # fmt: skip
def test_all_text_is_shown_whatever_its_tokens_are(tab: Any, reply: Any, expected: Any) -> None:
    page = tab(Script(reply))
    page.finish()
    assert page.tokens() == expected
    assert page.text("output") == "".join(text for text, _ in reply)


@pytest.mark.parametrize("width", [360, 768, 901, 1600])
def test_every_width_is_enough(tab: Any, driver: Any, width: int) -> None:
    resize(driver, width, 740)
    long = frames(("x" * 400, -1.0, {"y" * 400: -2.0}))
    reason = {**TRACE["events"][0], "reason": "z" * 300}  # type: ignore[index]
    trace = {**TRACE, "events": [reason]}
    page = tab(Script(long, usage(3, 1, 1), trace=trace, load=LOAD, models=("m" * 90,), chat=False))
    page.fill("prompt", "abc")
    page.finish()
    page.wait("return document.getElementById('trace-list').checkVisibility()")
    page.run("document.querySelector('#output .token').focus()")
    assert page.run("return document.documentElement.scrollWidth") <= width
    right = (
        "return [...document.querySelectorAll('body *')].filter((e) => e.checkVisibility() &&"
        "!e.closest('.for-readers')).map((e) => e.getBoundingClientRect().right)"
    )
    assert max(page.run(right)) <= width
    assert page.shown("token-text")


def test_dark_is_another_palette(tab: Any, driver: Any) -> None:
    page = tab(Script(SENTENCE))
    back = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(back)
    prefer(driver, "dark")
    assert page.run(back) != light


def test_a_narrow_page_does_not_cover_the_token_it_explains(tab: Any, driver: Any) -> None:
    resize(driver, 360, 740)
    page = tab(Script(SENTENCE))
    page.finish()
    assert not page.shown("token")
    page.run("scrollBy(0, document.getElementById('output').getBoundingClientRect().top - 660)")
    page.run("document.querySelector('#output [tabindex=\"0\"]').focus()")
    for _ in SENTENCE:
        bottom, top = page.run(
            "return [document.activeElement.getBoundingClientRect().bottom,"
            "document.getElementById('token').getBoundingClientRect().top]"
        )
        assert bottom <= top
        page.press(Keys.RIGHT)
    page.run("document.activeElement.blur()")
    assert not page.shown("token")
