"""Constraints over HTTP: what is asked for, whole and in a stream; waiting; limits."""

import re
import threading
from typing import Any

import pytest

from minillm.structured.grammars import Grammars
from tests.serving.http_small import Served, joined

pytest.importorskip("llguidance")
SETTINGS = {"max_waiting": 32, "request_trace": True}
C, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22]}},
    "required": ["ok", "n"], "additionalProperties": False,
}  # fmt: skip
STRICT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
SHORT = {"type": "json_schema", "json_schema": {"schema": {"const": [True, None]}}}
# What is given, and a pattern of the text.
GIVEN: dict[str, tuple[dict[str, Any], str]] = {
    "schema": ({"response_format": STRICT},
               r'\{\s?"ok"\s?:\s?(true|false)\s?,\s?"n"[\s\S]*(1|22)\s?\}'),
    "a schema alone": ({"response_format": SHORT}, r"\[\s?true\s?,\s?null\s?\]"),
    "a schema of vLLM": ({"structured_outputs": {"json": {"const": 7}}}, "7"),
    "a schema as text": ({"structured_outputs": {"json": '{"const": 7}'}}, "7"),
    "pattern": ({"structured_outputs": {"regex": r"\d{3}-[ab]{2}"}}, r"\d{3}-[ab]{2}"),
    "choice": ({"structured_outputs": {"choice": ["yes", "no?", "né"]}}, r"yes|no\?|né"),
    "grammar": ({"structured_outputs": {"grammar": 'start: "<" /[a-c]{2}/ ">"'}}, "<[a-c]{2}>"),
    "no blanks": ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": r"\t?"}},
                  r'\{\t?"ok"\t?:[^ \n]*\}'),
    "nothing": ({"response_format": {"type": "text"}}, r"[\s\S]*"),
}  # fmt: skip


@pytest.mark.parametrize("path", [C, CHAT])
@pytest.mark.parametrize("name", GIVEN)
def test_a_text_is_what_was_asked_for(server: Served, path: str, name: str) -> None:
    given, pattern = GIVEN[name]
    chat = path == CHAT
    asked = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    body = {**asked, "temperature": 1, "seed": 4, "n": 2, "max_tokens": 60, **given}
    whole = server.send(path, body)
    assert whole.status == 200, whole.body
    assert "x-minillm-ignored" not in whole.headers
    texts = {
        each["index"]: each["message"]["content"] if chat else each["text"]
        for each in whole.data["choices"]
    }
    assert joined(server.stream(path, body), chat) == texts
    for text in texts.values():
        assert re.fullmatch(pattern, text), text
    assert name == "nothing" or {x["finish_reason"] for x in whole.data["choices"]} == {"stop"}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two constraints": ({"response_format": STRICT, "structured_outputs": {"regex": "a"}},
                        "structured_outputs and response_format are given"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "no object json_schema.schema"),
    "another type": ({"response_format": {"type": "xml"}}, "of type 'xml': it must be text"),
    "no type": ({"response_format": {"type": ["text"]}}, "of type ['text']: it must be"),
    "guided_json": ({"guided_json": SCHEMA}, "give it in structured_outputs"),
    "regex": ({"regex": "a"}, "give it in structured_outputs"),
    "an unsupported schema": ({"response_format": {"type": "json_schema", "json_schema": {
        "schema": {"items": {"not": {}}}}}}, "at $.items: Unimplemented keys"),
    "a text for the object": ({"structured_outputs": "json"}, "structured_outputs is 'json'"),
    "without an end": ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_has_status_400_and_one_sentence(server: Served, name: str) -> None:
    given, words = REFUSED[name]
    for stream in (False, True):
        reply = server.send(C, {"prompt": "x", "stream": stream, **given})
        assert reply.status == 400, reply.body
        assert words in reply.message
        assert reply.message.endswith(".")
        assert "\n" not in reply.message


def compiling_waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No constraint is compiled before this event."""
    go_on, compile = threading.Event(), Grammars._compile

    def waiting(self: Grammars, given: Any) -> Any:
        assert go_on.wait(60)
        return compile(self, given)

    monkeypatch.setattr(Grammars, "_compile", waiting)
    return go_on


def test_a_request_waits_for_its_constraint_and_others_do_not(server, monkeypatch):
    """Its state says so; when it is compiled, it has its place in the queue."""
    go_on = compiling_waits(monkeypatch)
    body = {"prompt": "x", "structured_outputs": {"regex": "waits"}, "request_id": "slow"}
    slow = server.begin(C, body)
    server.wait_for(lambda: server.engine.num_unfinished)
    server.complete("others", max_tokens=8)  # before it, though it came later
    told = server.send("/debug/requests/slow").data
    assert told["state"] == "waiting"
    assert told["events"][0]["reason"] == "its structured_outputs are not compiled yet"
    go_on.set()
    assert slow.result(60).data["choices"][0]["text"] == "waits"
    server.assert_idle()


def test_a_client_that_leaves_while_its_constraint_is_compiled(server, monkeypatch):
    go_on = compiling_waits(monkeypatch)
    with server.post(C, {"prompt": "x", "structured_outputs": {"regex": "leaves"}}):
        server.wait_for(lambda: server.engine.num_unfinished)
    server.wait_for(lambda: not server.engine.num_unfinished)
    go_on.set()
    server.complete("others", max_tokens=4)
    server.assert_idle()


def test_a_grammar_that_exceeds_a_limit_ends_its_request_alone(server: Served) -> None:
    """It is compiled, but its states are too many; the error is the request's."""
    other = {"prompt": "beside", "max_tokens": 30, "temperature": 0}
    healthy = server.send(C, other).data["choices"][0]["text"]
    beside = server.begin(C, other)
    grammar = 'start: ("a"~1..9999)~1..9999'
    body = {"prompt": "x", "structured_outputs": {"grammar": grammar}}
    body |= {"max_tokens": 90, "min_tokens": 90}
    reply = server.send(C, body)
    assert reply.status == 400
    assert "No token is left to choose from: structured_outputs" in reply.message
    assert beside.result(60).data["choices"][0]["text"] == healthy
    server.assert_idle()
