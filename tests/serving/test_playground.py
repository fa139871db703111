"""The playground's page: what it contains, and in a real browser what it does.

The browser's tests need Chromium with its driver, and selenium; where they are missing they are
skipped. The server is scripted, so that every token comes when the test says so.
"""

import base64
import hashlib
import math
import re
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from minillm.serving import playground_page
from tests.serving.playground_server import PlaygroundServer, Script, frames

CHROME = shutil.which("chromium") or shutil.which("chromium-browser")
CHROME = CHROME or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
LOAD = {"server_load": 4, "running": 3, "waiting": 1, "kv_cache_usage": 0.25}
SENTENCE = frames(
    (" there", math.log(0.95), {" was": math.log(0.03)}),
    (" was", math.log(0.6), {" is": math.log(0.3), "\n": math.log(0.05)}),
    (" a", math.log(0.3), {" the": math.log(0.4)}),
    (" fox", math.log(0.1), {" dog": math.log(0.5)}),
    (".", math.log(0.01), {" who": math.log(0.9)}),
)
TRACE = {
    "id": "cmpl-1",
    "state": "finished",
    "queue_time": 0.012,
    "cached_tokens": 4,
    "prefix": {"cached": 4, "missed_because": "last token", "blocks": [1, 2]},
    "events": [
        {"step": 7, "time": 0.001, "kind": "waiting", "tokens": 0,
         "reason": "no blocks: needs 7, has 3"},
        {"step": 8, "time": 0.006, "kind": "waiting", "tokens": 0,
         "reason": "no blocks: needs 7, has 3"},
        {"step": 9, "time": 0.012, "kind": "prefill", "tokens": 12, "reason": None},
        *({"step": 10 + i, "time": 0.02 + i / 500, "kind": "decode", "tokens": 1, "reason": None}
          for i in range(4)),
        {"step": 14, "time": 0.03, "kind": "finished", "tokens": 0, "reason": None},
    ],
}  # fmt: skip


# ---- the page as a text --------------------------------------------------------------------------


def test_the_page_has_no_outside_address() -> None:
    page = playground_page.page()
    assert "{{" not in page
    assert re.findall(r"https?:|wss?:|[\"'(]//", page) == []
    links = re.findall(r"(?:src|href|action|srcset)\s*=\s*\"([^\"]*)\"|url\(([^)]*)\)", page)
    assert links == [("data:,", "")]
    assert "@import" not in page


def test_the_policy_allows_this_script_and_this_style_only() -> None:
    page, policy = playground_page.page(), playground_page.content_security_policy()
    allowed = dict(part.split(" ", 1) for part in policy.split("; "))
    assert allowed["default-src"] == "'none'"
    assert allowed["connect-src"] == "'self'"
    assert "unsafe" not in policy
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (found,) = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(found.encode()).digest()).decode()
        assert allowed[directive] == f"'sha256-{digest}'"
    assert playground_page.headers()["Content-Security-Policy"] == policy
    markup = re.sub(r"<(script|style)>.*?</\1>", "", page, flags=re.DOTALL)
    assert re.findall(r"\s(?:on\w+|style)\s*=", markup) == []


def test_no_script_makes_markup_of_text() -> None:
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|localStorage"
    assert re.findall(sinks, playground_page.script()) == []


# ---- in a browser --------------------------------------------------------------------------------


class Tab:
    """A browser with the page of a scripted server."""

    def __init__(self, driver: Any, server: PlaygroundServer, script: Script):
        self.driver, self.script = driver, script
        server.follow(script)
        driver.get(server.address)
        self.wait("return document.getElementById('model').options.length > 0")

    def run(self, code: str, *args: Any) -> Any:
        """Run JavaScript and return what it returns."""
        return self.driver.execute_script(code, *args)

    def wait(self, code: str, *args: Any) -> None:
        """Wait until JavaScript returns something true, 20 seconds at most."""
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 20, 0.02).until(lambda _: self.run(code, *args), code)

    def press(self, *keys: str, held: str | None = None) -> None:
        """Type keys, one after the other, wherever the focus is."""
        from selenium.webdriver import ActionChains

        actions = ActionChains(self.driver, duration=0)
        if held:
            actions.key_down(held)
        for key in keys:
            actions.send_keys(key)
        if held:
            actions.key_up(held)
        actions.perform()

    def send(self) -> None:
        self.press(Keys.ENTER, held=Keys.CONTROL)

    def finish(self) -> None:
        """Send and wait for the end of the reply."""
        self.send()
        self.wait("return /^(Finished|Stopped)/.test(document.getElementById('status').textContent)")
        self.wait("return !document.getElementById('last').hidden")

    def fail(self) -> str:
        """Send and wait for the error; its text."""
        self.send()
        self.wait("return !document.getElementById('error').hidden")
        return self.text("error")

    def text(self, name: str) -> str:
        return self.run("return document.getElementById(arguments[0]).textContent", name)

    def shown(self, name: str) -> bool:
        return self.run("return document.getElementById(arguments[0]).checkVisibility()", name)

    def fill(self, name: str, text: str) -> None:
        self.run("const e = document.getElementById(arguments[0]); e.focus(); e.select()", name)
        self.press(text)

    def focused(self) -> str:
        return self.run("const e = document.activeElement; return e.id || e.className || e.tagName")

    def tokens(self, box: str = "#output") -> list[str]:
        code = "return [...document.querySelectorAll(arguments[0] + ' .token')]"
        return self.run(code + ".map((e) => e.textContent)", box)


@pytest.fixture(scope="module")
def server() -> Iterator[PlaygroundServer]:
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
def tab(driver: Any, server: PlaygroundServer) -> Iterator[Any]:
    """Opens the page of a script; in the end no script may have failed, and nothing is blocked."""
    resize(driver, 1300, 1000)
    prefer(driver, "light")
    yield lambda script: Tab(driver, server, script)
    log = driver.get_log("browser")
    # A refused request is a line of the network, and a hint about forms is a line for its author.
    assert [e for e in log if e["source"] != "network" and e["level"] != "DEBUG"] == []
    driver.execute_script("sessionStorage.clear()")


def resize(driver: Any, width: int, height: int) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def prefer(driver: Any, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


class Keys:
    """The keys of selenium, which may be missing here."""

    TAB, ENTER, SHIFT, CONTROL, ESCAPE = "\ue004", "\ue007", "\ue008", "\ue009", "\ue00c"
    END, HOME, LEFT, UP, RIGHT, DOWN = "\ue010", "\ue011", "\ue012", "\ue013", "\ue014", "\ue015"


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def test_tokens_appear_one_by_one(tab: Any) -> None:
    gate = threading.Semaphore(0)
    page = tab(Script(SENTENCE, usage(16, 5, 4), gate))
    page.fill("prompt", "Once upon a time")
    page.send()
    for number in range(len(SENTENCE)):
        page.wait("return document.getElementById('status').textContent !== ''")
        assert page.tokens() == [text for text, _ in SENTENCE[:number]]
        gate.release()
        page.wait("return document.querySelectorAll('#output .token').length > arguments[0]", number)
    page.wait("return /^Finished: 5 tokens/.test(document.getElementById('status').textContent)")
    assert page.text("output") == " there was a fox."
    (body,) = page.script.asked("/v1/completions")
    assert body["prompt"] == "Once upon a time"
    assert body["logprobs"] == 5
    assert body["stream"] is True


def test_settings_are_sent_and_empty_ones_are_not(tab: Any) -> None:
    page = tab(Script(SENTENCE))
    page.fill("temperature", "0.5")
    page.fill("seed", "7")
    page.fill("max_tokens", "9")
    page.run("document.getElementById('stop').value = 'end\\n\\\\n\\\\n\\na\\\\\\\\n'")
    page.finish()
    (body,) = page.script.asked("/v1/completions")
    asked = {name: body[name] for name in ("temperature", "top_p", "max_tokens", "seed", "stop")}
    assert asked == {"temperature": 0.5, "top_p": 1, "max_tokens": 9, "seed": 7,
                     "stop": ["end", "\n\n", "a\\n"]}  # fmt: skip
    assert "top_k" not in body


def test_a_value_out_of_range_is_not_sent(tab: Any) -> None:
    page = tab(Script(SENTENCE))
    page.fill("top_p", "3")
    page.send()
    assert page.focused() == "top_p"
    assert page.script.asked("/v1/completions") == []


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
    place = (
        "const b = document.activeElement.getBoundingClientRect(); return [Math.round(b.left), b.top]"
    )
    start = page.run(place)
    page.press(Keys.DOWN)
    below = page.run(place)
    assert below[1] > start[1]
    assert abs(below[0] - start[0]) < 80
    page.press(Keys.UP)
    assert page.run(place)[1] == start[1]


@pytest.mark.parametrize("mode", ["completions", "chat"])
def test_escape_stops_and_the_server_sees_it(tab: Any, mode: str) -> None:
    gate = threading.Semaphore(2)
    page = tab(Script(SENTENCE, usage(16, 5, 4), gate))
    page.driver.find_element("id", f"{mode}-tab").click()
    page.fill("prompt" if mode == "completions" else "message", "Once")
    page.send()
    page.wait("return document.querySelectorAll('main .tokens .token').length === 2")
    page.press(Keys.ESCAPE)
    page.wait("return document.getElementById('status').textContent === 'Stopped after 2 tokens.'")
    assert page.script.gone.wait(10)
    assert not page.shown("error")
    assert "stopped by you" in page.text("result")
    page.script.gate = None
    page.fill("prompt" if mode == "completions" else "message", "again")
    page.finish()
    assert page.text("status") == "Finished: 5 tokens."


def test_everything_is_reached_by_keyboard(tab: Any) -> None:
    page = tab(Script(SENTENCE, usage(16, 5, 4), trace=TRACE, load=LOAD))
    page.finish()
    page.wait("return document.getElementById('trace-list').checkVisibility()")
    page.run("document.activeElement.blur()")
    order = []
    while not order or (order[-1] != "BODY" and len(order) < 40):
        page.press(Keys.TAB)
        order.append(page.focused())
    expected = ["model", "key", "completions-tab", "prompt", "temperature", "top_p", "top_k",
                "max_tokens", "seed", "stop", "send", "halt", "token level-0", "prefix-prompt",
                "trace-list"]  # fmt: skip
    assert order[: len(expected)] == expected


def test_a_request_by_keyboard_alone(tab: Any) -> None:
    gate = threading.Semaphore(1)
    page = tab(Script(SENTENCE, gate=gate))
    page.press(Keys.TAB, Keys.TAB, Keys.TAB, Keys.RIGHT)
    assert page.focused() == "chat-tab"
    page.press(Keys.TAB, "be brief", Keys.TAB, "hello")
    assert page.focused() == "message"
    page.press(*[Keys.TAB] * 7)
    assert page.focused() == "send"
    page.press(Keys.ENTER)
    page.wait("return document.querySelectorAll('#conversation .token').length === 1")
    assert page.focused() == "send"
    page.press(Keys.TAB, Keys.ENTER)  # the stop button
    page.wait("return /^Stopped/.test(document.getElementById('status').textContent)")
    assert page.focused() == "halt"
    (body,) = page.script.asked("/v1/chat/completions")
    assert body["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
    ]


def test_every_control_has_a_name(tab: Any) -> None:
    page = tab(Script(SENTENCE))
    nameless = page.run(
        "return [...document.querySelectorAll('input, select, textarea, button')].filter((e) =>"
        "!(e.labels?.length || e.textContent.trim() || e.getAttribute('aria-label')))"
        ".map((e) => e.id)"
    )
    assert nameless == []


def test_hostile_text_is_inert(tab: Any) -> None:
    hostile = "<script>window.broken=1</script><img src=x onerror='window.broken=1'>"
    tokens = frames((hostile, -0.1, {hostile + "2": -3.0}), ("\u202e", -2.0, {"__proto__": -3.0}))
    trace = {**TRACE, "state": hostile, "prefix": {hostile: hostile},
             "events": [{"step": 1, "time": 0.1, "kind": hostile, "tokens": 1,
                         "reason": hostile}]}  # fmt: skip
    page = tab(Script(tokens, usage(len(hostile), 2, 3), trace=trace, models=(hostile,)))
    for mode, box in (("completions", "prompt"), ("chat", "message")):
        page.driver.find_element("id", f"{mode}-tab").click()
        page.fill(box, hostile)
        page.finish()
        page.run("document.querySelector('main .tokens [tabindex=\"0\"]')?.focus()")
        assert hostile in page.run("return document.querySelector('main').textContent")
    assert page.run("return window.broken") is None
    inserted = "return document.querySelectorAll('main script, main img, #model script').length"
    assert page.run(inserted) == 0
    page.driver.find_element("id", "completions-tab").click()
    page.run("[...document.querySelectorAll('#output .token')].at(-1).focus()")
    assert '"\\u202e"' in page.text("token-text")
    assert '"__proto__"' in page.text("token-text")
    page.script.refusal = (400, {"error": {"message": hostile}}, {})
    assert page.fail() == hostile
    assert page.run("return window.broken") is None


def failure(message: str, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": "x", "param": None, "code": code}}


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        ((400, failure("temperature must be\n at least 0.", 400), {}), "temperature must be at least 0."),
        ((400, {"detail": []}, {}), "The server answered with status 400."),
        ((401, {"error": "Unauthorized"}, {}), "The API key is missing or wrong; enter the server's "
         "key in the field “API key”."),
        ((503, failure("The queue is full.", 503), {"Retry-After": "2"}), "The queue is full; try again "
         "in 2 seconds."),
        ((429, {}, {}), "The server accepts no requests now."),
        ((500, failure("x" * 5000, 500), {}), "x" * 399 + "…"),
    ],
)  # fmt: skip
def test_an_error_is_one_sentence(tab: Any, refusal: Any, expected: str) -> None:
    page = tab(Script(SENTENCE, refusal=refusal))
    assert page.fail() == expected
    assert page.text("status") == ""
    assert not page.shown("last")
    if refusal[0] == 401:
        assert page.focused() == "key"
    page.script.refusal = None
    page.finish()
    assert not page.shown("error")


def test_a_chat_error_gives_the_message_back(tab: Any) -> None:
    refusal = (400, failure("The model has no chat template.", 400), {})
    page = tab(Script(SENTENCE, refusal=refusal))
    page.driver.find_element("id", "chat-tab").click()
    page.fill("message", "hello")
    assert page.fail() == "The model has no chat template."
    assert page.run("return document.getElementById('message').value") == "hello"
    assert page.text("conversation") == ""


def test_a_reply_that_breaks_off_says_so(tab: Any) -> None:
    page = tab(Script(SENTENCE, broken_after=2))
    assert page.fail() == "The server ended the reply before it was complete."
    assert page.text("output") == " there was"
    page.script.broken_after = None
    page.script.error_frame = {"message": "The engine has stopped.", "code": 500}
    page.send()
    page.wait("return document.getElementById('error').textContent === 'The engine has stopped.'")
    assert page.text("output") == " there was a fox."


def test_the_key_is_sent_and_kept_in_this_tab_only(tab: Any) -> None:
    page = tab_without_models(tab, Script(SENTENCE, key="secret", load=LOAD))
    page.wait("return !document.getElementById('error').hidden")
    assert "API key" in page.text("error")
    page.fill("key", "secret")
    page.finish()
    assert page.run("return document.getElementById('model').value") == "tiny"
    assert page.script.seen[-1][2] == "Bearer secret"
    assert page.run("return [sessionStorage.length, localStorage.length, document.cookie]") == [
        1, 0, ""
    ]  # fmt: skip
    page.wait("return document.getElementById('load-running').textContent === '3'")
    page.driver.refresh()
    page.wait("return document.getElementById('model').options.length === 1")


def tab_without_models(tab: Any, script: Script) -> Tab:
    """The page where the list of models is refused at first."""
    key, script.key = script.key, None
    page = tab(script)
    script.key = key
    page.driver.refresh()
    return page


def test_chat_sends_the_conversation(tab: Any) -> None:
    page = tab(Script(SENTENCE, usage(16, 5, 4)))
    page.driver.find_element("id", "chat-tab").click()
    for question in ("hello", "and then?"):
        page.fill("message", question)
        page.finish()
    asked = page.script.asked("/v1/chat/completions")
    answer = {"role": "assistant", "content": " there was a fox."}
    first, second = ({"role": "user", "content": text} for text in ("hello", "and then?"))
    assert [body["messages"] for body in asked] == [[first], [first, answer, second]]
    assert asked[0]["logprobs"] is True
    assert asked[0]["top_logprobs"] == 5
    page.run("[...document.querySelectorAll('#conversation .token')].at(-1).focus()")
    assert '" who"' in page.text("token-text")
    page.driver.find_element("id", "forget").click()
    assert page.text("conversation") == ""
    page.fill("message", "anew")
    page.finish()
    assert len(page.script.asked("/v1/chat/completions")[-1]["messages"]) == 1


def test_chat_is_off_without_a_template(tab: Any) -> None:
    page = tab(Script(SENTENCE, chat=False))
    assert page.shown("chat-note")
    assert page.text("chat-note").count(".") == 1
    page.driver.find_element("id", "chat-tab").click()
    assert not page.shown("message")
    assert page.shown("prompt")


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
    page.fill("prompt", "another length")  # other tokens than usage says: no part is marked
    page.finish()
    assert page.shown("prefix-text")
    assert not page.shown("prefix-prompt")


def test_the_steps_of_the_request_are_shown(tab: Any) -> None:
    page = tab(Script(SENTENCE, usage(16, 5, 4), trace=TRACE))
    page.finish()
    page.wait("return document.getElementById('trace-list').checkVisibility()")
    rows = page.run("return [...document.querySelectorAll('#trace-list li')].map((e) => e.innerText)")
    assert [row.split() for row in rows] == [
        "waiting steps 7–8 at 1 ms, 11 ms no blocks: needs 7, has 3".split(),
        "prefill step 9 12 tokens at 12 ms, 8 ms".split(),
        "decode steps 10–13 4 tokens at 20 ms, 10 ms".split(),
        "finished step 14 at 30 ms".split(),
    ]
    assert "missed because last token" in page.text("trace-note")
    widths = page.run("return [...document.querySelectorAll('#trace-bar i')].map((e) => e.offsetWidth)")
    assert widths[1] > widths[3] > widths[2] > widths[0]
    assert "12 ms" in page.text("result")  # the queue time


def test_steps_that_are_off_are_one_sentence(tab: Any) -> None:
    page = tab(Script(SENTENCE))
    page.finish()
    page.wait("return document.getElementById('trace').checkVisibility()")
    assert "--enable-request-trace" in page.text("trace-note")
    assert not page.shown("trace-list")
    assert not page.shown("trace-bar")


def test_the_load_is_read_every_second(tab: Any) -> None:
    script = Script(SENTENCE, load=dict(LOAD), generated=[100, 200, 300, 400, 500, 600])
    page = tab(script)
    page.wait("return document.getElementById('load-generated').textContent !== '–'")
    assert page.text("load-running") == "3"
    assert page.text("load-waiting") == "1"
    assert page.text("load-cache") == "25.0%"
    assert 30 < float(page.text("load-generated")) < 110  # 100 tokens in a second or somewhat more
    assert page.text("load-prompts") == "0"
    script.load = {**LOAD, "running": 12}
    page.wait("return document.getElementById('load-running').textContent === '12'")


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
        # A character of four tokens, whose text comes with the last one.
        ([("", [token("\ufffd")]), ("", [token("\ufffd")]), ("🦊 a", [token("\ufffd"), token(" a")])],
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
