"""Large bodies and long prompts: bounded work, and none of it in the event loop."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.serving import app, protocol
from minillm.serving.guard import MAX_BODY
from tests.serving.http_small import LIMIT, Served

C, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = "some words " * 10_000
TAIL = {"truncate_prompt_tokens": 8, "max_tokens": 1}


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} | fields


@pytest.mark.parametrize(("path", "body"), [
    (C, {"prompt": LONG} | TAIL),
    (CHAT, chat(LONG, **TAIL)),
    ("/tokenize", {"prompt": LONG}),
])  # fmt: skip
@pytest.mark.parametrize("place", ["parse", "encode"])
def test_others_are_served_while_a_large_body_is_read(server, monkeypatch, place, path, body):
    """Parsing, or tokenising, waits here until another request was answered."""
    entered, answered = threading.Event(), threading.Event()

    def held(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if any(len(each) > 10_000 for each in arguments if isinstance(each, str | bytes)):
                entered.set()
                assert answered.wait(LIMIT / 6), "the event loop was blocked"
            return function(*arguments)

        return run

    where: Any = app if place == "parse" else server.parts.tokenizer
    monkeypatch.setattr(where, place, held(getattr(where, place)))
    other = server.begin(path, body)
    assert entered.wait(LIMIT)
    assert server.send("/health").status == 200
    answered.set()
    assert other.result(LIMIT).status == 200


def test_a_small_body_is_parsed_in_the_event_loop(server, monkeypatch):
    """A thread costs more than parsing it."""
    threads = []

    def parse(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return protocol.parse(*arguments)

    monkeypatch.setattr(app, "parse", parse)
    server.complete("x", max_tokens=1)
    server.complete("x", max_tokens=1, user="u" * 2**16)
    assert [each is server.thread for each in threads] == [True, False]


values = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from(r'",:[{\a ')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from(r'",:[{\a ')), inner),
)


def separators(value: Any) -> int:
    """Commas, colons and opening brackets of compact JSON, outside of strings."""
    if isinstance(value, dict):
        return 1 + len(value) + max(len(value) - 1, 0) + sum(map(separators, value.values()))
    if isinstance(value, list):
        return 1 + max(len(value) - 1, 0) + sum(map(separators, value))
    return 0


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(value=values, chunk=st.integers(1, 50), most=st.integers(0, 40))
def test_values_are_counted_outside_of_strings(value: Any, chunk: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "CHUNK", chunk)
        patch.setattr(protocol, "MAX_VALUES", most)
        found = protocol.has_too_many_values(json.dumps(value).encode())
    assert found == (separators(value) > most)


def test_a_text_of_commas_is_one_value(server: Served) -> None:
    """Only its length is refused."""
    reply = server.send(C, {"prompt": ',:[{"\\' * 200_000})
    assert "maximum context length" in reply.message
    reply = server.send(C, b'{"prompt":"x","y":[' + b"[]," * 1_000_000 + b"[]]}")
    assert (reply.status, reply.message.split(";")[0]) == (
        400, "The body has more than 524,288 JSON values")  # fmt: skip


def test_truncation_keeps_the_last_tokens(server: Served) -> None:
    text = LONG[: -len("words ")] + "the end"
    got = server.complete(text, **TAIL, echo=True)
    assert got["usage"]["prompt_tokens"] == 8
    assert got["choices"][0]["text"].startswith(" the end")


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"add_special_tokens": False}])
@pytest.mark.parametrize(("path", "body"), [
    (C, {"prompt": "x" * (2**20 + 1)}),
    (C, {"prompt": ["x" * 2**19] * 3}),
    (CHAT, chat("x" * 2**20)),
])  # fmt: skip
def test_a_text_above_the_limit_is_not_tokenised(server, path, body, fields, monkeypatch):
    """All of a text would be tokenised, of which eight tokens are kept."""
    monkeypatch.setattr(server.parts.tokenizer, "encode", None)
    reply = server.send(path, body | fields | TAIL)
    assert reply.status == 400
    assert reply.message.startswith("truncate_prompt_tokens is for texts of at most 1,048,576 ")
    assert reply.data["error"]["param"] == "truncate_prompt_tokens"


def test_a_long_text_without_special_tokens_is_not_tokenised(server, monkeypatch):
    monkeypatch.setattr(server.parts.tokenizer, "encode", None)
    reply = server.send(C, {"prompt": "x" * (MAX_BODY - 100), "add_special_tokens": False})
    assert reply.data["error"]["code"] == "context_length_exceeded"
