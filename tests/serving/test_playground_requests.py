"""The playground in a real browser: requests, keys and errors.

The server is scripted, so that every token comes when the test says so.
"""

import threading
from typing import Any

import pytest

from tests.serving.playground_server import Script, frames
from tests.serving.playground_tab import LOAD, SENTENCE, TRACE, Keys, Tab, usage

pytest_plugins = ("tests.serving.playground_fixtures",)
pytestmark = pytest.mark.slow


def test_tokens_appear_one_by_one(tab: Any) -> None:
    gate = threading.Semaphore(0)
    page = tab(Script(SENTENCE, usage(16, 5, 4), gate))
    page.fill("prompt", "Once upon a time")
    page.send()
    for number in range(len(SENTENCE)):
        page.wait("return document.getElementById('status').textContent !== ''")
        assert page.tokens() == [text for text, _ in SENTENCE[:number]]
        gate.release()
        page.wait(
            "return document.querySelectorAll('#output .token').length > arguments[0]", number
        )
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
        ((400, failure("temperature must be\n at least 0.", 400), {}),
         "temperature must be at least 0."),
        ((400, {"detail": []}, {}), "The server answered with status 400."),
        ((401, {"error": "Unauthorized"}, {}),
         "The API key is missing or wrong; enter the server's key in the field “API key”."),
        ((503, failure("The queue is full.", 503), {"Retry-After": "2"}),
         "The queue is full; try again in 2 seconds."),
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
    page.script.refusal = None
    page.finish()
    (message,) = page.script.asked("/v1/chat/completions")[-1]["messages"]
    assert message == {"role": "user", "content": "hello"}


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


@pytest.mark.parametrize("chat", [True, False, None])
def test_a_model_with_a_template_opens_in_chat(tab: Any, chat: bool | None) -> None:
    page = tab(Script(SENTENCE, chat=chat))
    assert page.run("return document.getElementById('chat-panel').hidden") == (chat is not True)
    if chat:
        page.fill("message", "Hello")
        page.finish()
        assert page.script.asked("/v1/chat/completions")
