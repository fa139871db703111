"""Names that clients give, whose error an error is, and pages of other sites."""

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from minillm import LLM, SamplingParams, TextPrompt, TokensPrompt
from minillm.engine.completion import Completion
from minillm.errors import UnknownArgumentError, UnsupportedFeatureError
from minillm.execution import collect
from minillm.sampling.logprobs import NOT_FINITE
from minillm.serving.settings import Settings
from tests.engine.small import EOS
from tests.serving.http_small import Reply, Served, frames_of, served, serving, write_chat_model
from tests.serving.test_http_frames import hold

SETTINGS = {"request_trace": True}
C, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "x"}]
REASONS = {None, "stop", "length"}  # values of OpenAI's enumeration that this server uses


# ---- names -------------------------------------------------------------------------------------

Call = tuple[str, dict[str, Any], dict[str, str]]  # path, fields, headers
X = {"X-Request-Id": "trace 1, a"}
AT_ONCE: dict[str, list[Call]] = {
    "a header": [(C, {}, X)] * 3,
    "a header, several routes": [(C, {}, X), (CHAT, {}, X), (C, {"stream": True}, X)],
    "a field": [(C, {"request_id": "x"}, {})] * 3,
    "a field, several prompts": [(C, {"request_id": "x", "prompt": ["a", "b"]}, {})] * 2,
    "a number after a name": [(C, {"request_id": "x", "prompt": ["a", "b"]}, {}),
                              (C, {"request_id": "x-1"}, {}), (C, {"request_id": "x-0"}, {})],
    "the engine's own suffix": [(C, {"request_id": f"x~{i}"}, {}) for i in (0, 1, 2, 3)] * 2,
    "a user": [(CHAT, {"user": "u"}, {})] * 3,
    "a salt": [(C, {"cache_salt": "s"}, {})] * 3,
    "a model": [(C, {"model": "small"}, {})] * 3,
}  # fmt: skip


def send(server: Served, call: Call) -> Reply:
    path, fields, headers = call
    own = {"prompt": "x"} if path == C else {"messages": MESSAGES}
    return server.send(path, own | {"max_tokens": 4, "ignore_eos": True} | fields, headers=headers)


@pytest.mark.parametrize("name", AT_ONCE)
def test_names_at_once(server: Served, name: str) -> None:
    calls = AT_ONCE[name]
    release = hold(server)
    with ThreadPoolExecutor(len(calls)) as pool:
        jobs = [pool.submit(send, server, call) for call in calls]
        count = sum(len(fields.get("prompt", "x")) for _, fields, _ in calls)
        server.wait_for(lambda: server.parts.gate.num_open == count)
        release()
        replies = [each.result() for each in jobs]
    for (path, fields, headers), reply in zip(calls, replies, strict=True):
        assert reply.status == 200, reply.body
        sent = headers.get("X-Request-Id") or fields.get("request_id")
        first = frames_of(reply.body)[0] if fields.get("stream") else reply.data
        assert reply.headers["x-request-id"] == (sent or first["id"])
        if sent is not None:
            assert first["id"] == ("cmpl-" if path == C else "chatcmpl-") + sent


def test_a_retry_after_a_client_has_left(server: Served) -> None:
    """A proxy's: the same request with the same header, at once."""
    body = {"prompt": "x", "stream": True, "max_tokens": 60, "ignore_eos": True}
    for _ in range(10):
        with server.post(C, body, "X-Request-Id: same\r\n") as wire:
            assert b" 200 " in wire.recv(65536)
        assert send(server, (C, {}, {"X-Request-Id": "same"})).status == 200


def test_the_debug_route_knows_every_name(server: Served) -> None:
    for number in range(2):
        reply = send(server, (C, {"request_id": "told", "max_tokens": 2 + number}, {}))
    found = [server.send(f"/debug/requests/{quote(name)}").data for name in ("told", "cmpl-told")]
    assert found[0] == found[1]
    assert found[0]["events"][-1]["tokens"] == reply.data["usage"]["completion_tokens"] == 3
    assert server.send(f"/debug/requests/{found[0]['id']}").data == found[0]
    send(server, (C, {"request_id": "two", "prompt": ["a", "b"]}, {}))
    assert server.send("/debug/requests/two-1").status == 200
    assert server.send("/debug/requests/two-2").status == 404


def test_an_error_has_the_header_too(server: Served) -> None:
    reply = send(server, (C, {"temperature": -1}, {"X-Request-Id": "mine"}))
    assert (reply.status, reply.headers["x-request-id"]) == (400, "mine")


# ---- owners ------------------------------------------------------------------------------------


def not_finite(patch: pytest.MonkeyPatch, server: Served, after: int) -> None:
    left = [after]

    def isfinite(value: float) -> bool:
        left[0] -= 1
        return left[0] >= 0

    patch.setattr(collect, "isfinite", isfinite)
    patch.setattr(collect, "failure_of", lambda value: NOT_FINITE)


def no_text(patch: pytest.MonkeyPatch, server: Served, after: int) -> None:
    detokenize = Completion._detokenize

    def failing(self: Completion, *args: Any) -> None:
        if len(self.token_ids) > after:
            raise RuntimeError("planted")
        detokenize(self, *args)

    patch.setattr(Completion, "_detokenize", failing)


def shut_down(patch: pytest.MonkeyPatch, server: Served, after: int) -> None:
    append, abort = Completion.append, server.engine.abort_all

    def aborting(self: Completion, *args: Any) -> None:
        append(self, *args)
        if len(self.token_ids) == after + 1:
            asyncio.run_coroutine_threadsafe(abort(), server.loop)  # type: ignore[arg-type]

    patch.setattr(Completion, "append", aborting)


Cause = Callable[[pytest.MonkeyPatch, Served, int], None] | None
OWNERS: dict[str, tuple[int, str, dict[str, Any], Cause]] = {
    "only the end, which may not come": (
        400, "No token is left", {"allowed_token_ids": [EOS], "min_tokens": 1,
                                  "ignore_eos": False}, None),
    "allowed and forbidden": (
        400, "No token is left", {"allowed_token_ids": [87], "bad_words": ["x"]}, None),
    "NaN": (500, "NaN or infinity", {}, not_finite),
    "a detokenizer": (500, "The text of this completion failed", {}, no_text),
    "an end of the server": (503, "is shutting down", {"max_tokens": 100}, shut_down),
}  # fmt: skip
TYPES = {400: "BadRequestError", 500: "InternalServerError", 503: "ServiceUnavailableError"}


@pytest.mark.parametrize("path", [C, CHAT])
@pytest.mark.parametrize("name", OWNERS)
def test_owners(server: Served, monkeypatch: pytest.MonkeyPatch, name: str, path: str) -> None:
    """A whole reply has the owner's status, and so has a stream without a token yet. Later the last
    event is the error, and no reason comes before it."""
    status, text, fields, plant = OWNERS[name]
    fields = {"temperature": 0, "max_tokens": 8} | fields
    assert server.complete("x", allowed_token_ids=[87], max_tokens=2)["choices"], "87 is not x"
    for stream, after in ((False, 0), (True, 0), (True, 3)):
        with monkeypatch.context() as patch:
            if plant is not None:
                plant(patch, server, after)
            reply = send(server, (path, fields | {"stream": stream}, {}))
        if reply.status == 200:
            assert stream
            assert after or plant in (shut_down, no_text), "the status was sent too early"
            *others, last = frames_of(reply.body)
            choices = [choice for each in others for choice in each["choices"]]
            assert {each["finish_reason"] for each in choices} <= REASONS
        else:
            assert not (after and plant), reply.body
            assert reply.status == status
            last = reply.data
        assert (last["error"]["code"], last["error"]["type"]) == (status, TYPES[status])
        assert text in last["error"]["message"]
        assert server.send("/health").status == 200


# ---- pages of other sites ----------------------------------------------------------------------

PREFLIGHT = {"Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
ORIGINS: list[tuple[dict[str, Any], str, str | None]] = [
    ({}, "http://localhost:3000", "http://localhost:3000"),
    ({}, "http://127.0.0.1", "http://127.0.0.1"),
    ({}, "https://evil.example", None),
    ({}, "http://localhost.evil.example", None),
    ({"allowed_origins": ("*",)}, "https://any.example", "*"),
    ({"allowed_origins": ("https://a.example",)}, "https://a.example", "https://a.example"),
    ({"allowed_origins": ("https://a.example",)}, "http://localhost:3000", None),
    ({"allowed_origins": ()}, "http://localhost:3000", None),
]


@pytest.mark.parametrize(("given", "origin", "allowed"), ORIGINS)
def test_pages_of_other_sites(server, given, origin, allowed):
    header = "access-control-allow-origin"
    with serving(server.engine, api_keys=("key",), **given) as server:
        before = server.send(C, method="OPTIONS", headers={"Origin": origin, **PREFLIGHT})
        assert (before.status, before.headers.get(header)) == (200 if allowed else 400, allowed)
        if allowed:
            assert "POST" in before.headers["access-control-allow-methods"]
            assert "authorization" in before.headers["access-control-allow-headers"]
        for headers, status in (({}, 401), ({"Authorization": "Bearer key"}, 200)):
            body = {"prompt": "x", "max_tokens": 1}
            reply = server.send(C, body, headers={"Origin": origin, **headers})
            assert (reply.status, reply.headers.get(header)) == (status, allowed)


def test_options_of_the_command(settings_of: Callable[..., Settings]) -> None:
    seen = [settings_of(*options) for options in (
        [], ["--allowed-origins", "*"], ["--allowed-origins", '["http://a", "http://b"]'],
        ["--allowed-origins", "http://a", "http://b", "--allow-credentials"],
        ["--allowed-origins", "--allowed-methods", "GET"],
    )]  # fmt: skip
    both = ("http://a", "http://b")
    assert [each.allowed_origins for each in seen] == [None, ("*",), both, both, ()]
    assert [each.allow_credentials for each in seen] == [False, False, False, True, False]
    assert seen[-1].allowed_methods == ("GET",)
    with pytest.raises(SystemExit, match="2"):
        settings_of("--allowed-origins", "[1]")


# ---- small fields ------------------------------------------------------------------------------

ENTRIES: dict[str, tuple[str, Mapping[str, Any], str, str]] = {
    "null in a list": (C, {"stop": [None]}, "stop[0] is null: ", "stop"),
    "a later entry": (C, {"stop": ["a", 5]}, "stop[1] is 5: ", "stop"),
    "null in a dict": (C, {"logit_bias": {"5": None}}, "logit_bias['5'] is null: ", "logit_bias"),
    "ids": (C, {"stop_token_ids": [1, "a"]}, "stop_token_ids[1] is 'a': ", "stop_token_ids"),
    "bad words": (C, {"bad_words": [None]}, "bad_words[0] is null: ", "bad_words"),
    "a message": (CHAT, {"messages": [None]}, "messages[0] is null: ", "messages"),
    "an option": (C, {"stream": True, "stream_options": {"include_usage": 5}},
                  "stream_options['include_usage'] is 5: ", "stream_options"),
    "no entry": (C, {"stop": 5}, "stop is 5: ", "stop"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENTRIES)
def test_a_wrong_entry_is_named(server: Served, name: str) -> None:
    path, fields, begin, param = ENTRIES[name]
    reply = send(server, (path, dict(fields), {}))
    assert reply.status == 400
    assert reply.message.startswith(begin), reply.message
    assert reply.data["error"]["param"] == param


def test_the_models_own_limit(tmp_path: Path) -> None:
    """max_new_tokens of generation_config.json, wherever a request has none."""
    write_chat_model(tmp_path)
    config = tmp_path / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_new_tokens": 5}))
    free: dict[str, Any] = {"ignore_eos": True, "temperature": 0}
    with served(tmp_path) as server:
        for path, own in ((C, {"prompt": "x"}), (CHAT, {"messages": MESSAGES})):
            for fields, count in (({}, 5), ({"max_tokens": None}, 5), ({"max_tokens": 7}, 7)):
                usage = server.send(path, own | free | fields).data["usage"]
                assert usage["completion_tokens"] == count, (path, fields)


def test_vllms_names(llm: LLM) -> None:
    own = llm.get_tokenizer()
    text = own.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == llm.chat_prompt(MESSAGES)["prompt"]
    ids = own.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert ids == llm.chat_prompt(MESSAGES)["prompt_token_ids"]
    assert own.decode(own.apply_chat_template(MESSAGES)) != text
    params = SamplingParams(temperature=0, max_tokens=3, logit_bias={5: 1.0})
    copy = params.clone()
    assert (copy, copy is params) == (params, False)
    prompts = [TokensPrompt(prompt_token_ids=ids), TextPrompt(prompt=text)]
    first, second = llm.generate(prompts, copy, lora_request=None, use_tqdm=False)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    with pytest.raises(UnsupportedFeatureError, match=r"lora_request of generate: .*merge"):
        llm.generate("x", lora_request="adapter")
    with pytest.raises(UnknownArgumentError, match="generate has no argument 'lora'"):
        llm.generate("x", lora=None)
    with pytest.raises(UnsupportedFeatureError, match=r"return_tensors of .*torch\.tensor"):
        own.apply_chat_template(MESSAGES, return_tensors="pt")
