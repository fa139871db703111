"""Published attacks on serving engines, replayed: each is a 4xx with one sentence, and a healthy
generation beside it is not changed. The names are those of the published bugs."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from minillm.serving.guard import MAX_BODY
from tests.serving.http_small import Reply, Served

SETTINGS = {"max_waiting": 32}
C, CHAT = "/v1/completions", "/v1/chat/completions"
HEALTHY = {"prompt": "def fib(n):", "max_tokens": 12, "ignore_eos": True, "temperature": 0,
           "logprobs": 2}  # fmt: skip
MESSAGES = [{"role": "user", "content": "x"}]
BIG = 2**63


def filled(before: bytes, item: bytes, after: bytes) -> bytes:
    """A body of the largest size, with many items."""
    count = (MAX_BODY - len(before) - len(after) - 1) // len(item)
    return before + item * (count - 1) + item.rstrip(b",") + after


def p(**fields: Any) -> dict[str, Any]:
    """A completion of a short prompt."""
    return {"prompt": "x", "max_tokens": 4} | fields


ATTACKS: dict[str, tuple[str, Any]] = {
    # a client's value reaches the engine
    "CVE-2026-54235 temperature NaN": (C, b'{"prompt":"x","temperature":NaN}'),
    "CVE-2026-54235 temperature Infinity": (C, b'{"prompt":"x","temperature":Infinity}'),
    "CVE-2026-54235 temperature 1e999": (C, b'{"prompt":"x","temperature":1e999}'),
    "CVE-2026-54235 logit_bias 1e999": (C, b'{"prompt":"x","logit_bias":{"1":1e999}}'),
    "CVE-2026-114051 min_tokens above max_tokens": (C, p(min_tokens=9)),
    "CVE-2026-116173 logprobs": (C, p(logprobs=10**6)),
    "CVE-2026-116173 prompt_logprobs": (C, p(prompt_logprobs=10**6)),
    "CVE-2026-116173 top_logprobs": (CHAT, {"messages": MESSAGES, "logprobs": True,
                                            "top_logprobs": 10**6}),
    "negative logprobs": (C, p(logprobs=-1)),
    "CVE-2026-105922 penalty": (C, p(presence_penalty=1e30)),
    "CVE-2026-44223 repetition penalty 0": (C, p(repetition_penalty=0)),
    "CVE-2026-105756 cache_salt of another type": (C, p(cache_salt={"a": 1})),
    "CVE-2026-105756 empty cache_salt": (C, p(cache_salt="")),
    "CVE-2026-105756 long cache_salt": (C, p(cache_salt="s" * 10_000)),
    "0.5.4 empty prompt": (C, p(prompt="")),
    "0.5.4 empty list": (C, p(prompt=[])),
    "0.5.4 empty ids": (C, p(prompt=[[]])),
    "0.5.4 one empty prompt among others": (C, p(prompt=["a", "", "b"])),
    "negative token id": (C, p(prompt=[5, -1])),
    "token id of the vocabulary's size": (C, p(prompt=[264])),
    "token id above 64 bits": (C, p(prompt=[BIG])),
    "boolean token ids": (C, p(prompt=[True, False])),
    "float token ids": (C, p(prompt=[1.0, 2.0])),
    "CVE-2026-93989 bad_words": (C, p(bad_words=[""])),
    "CVE-2026-93989 logit_bias outside": (C, p(logit_bias={"264": 1})),
    "CVE-2026-93989 logit_bias negative": (C, p(logit_bias={"-1": 1})),
    "CVE-2026-93989 logit_bias text": (C, p(logit_bias={"x": 1})),
    "CVE-2026-93989 logit_bias digits of another script": (C, p(logit_bias={"١": 1})),
    "CVE-2026-93989 allowed_token_ids outside": (C, p(allowed_token_ids=[264])),
    "CVE-2026-93989 allowed_token_ids empty": (C, p(allowed_token_ids=[])),
    "CVE-2026-93989 stop_token_ids outside": (C, p(stop_token_ids=[BIG])),
    "seed above 64 bits": (C, p(seed=2**70)),
    "seed of 4,000 digits": (C, b'{"prompt":"x","seed":' + b"9" * 4000 + b"}"),
    "max_tokens negative": (C, p(max_tokens=-1)),
    "max_tokens above 32 bits": (C, p(max_tokens=BIG)),
    "priority above 64 bits": (C, p(priority=2**70)),
    "top_k above 64 bits": (C, p(top_k=2**70)),
    "top_p 0": (C, p(top_p=0)),
    "truncate_prompt_tokens 0": (C, p(truncate_prompt_tokens=0)),
    "lone surrogate": (C, b'{"prompt":"\\ud800"}'),
    "bytes that are no UTF-8": (C, b'{"prompt":"\xff\xfe"}'),
    # unbounded fan-out
    "CVE-2026-34756 n of a million": (C, p(n=10**6, temperature=1)),
    "CVE-2026-34756 n above 64 bits": (C, p(n=BIG)),
    "CVE-2026-34756 n negative": (C, p(n=-1)),
    "best_of": (C, p(best_of=10**6)),
    "CVE-2026-73559 prompts": (C, p(prompt=["x"] * 100_000)),
    "prompts times n above the capacity": (C, p(prompt=["x"] * 64, n=16, temperature=1)),
    "stop strings": (C, p(stop=["x"] * 100_000)),
    "long stop string": (C, p(stop=["x" * 100_000])),
    "empty stop string": (C, p(stop=[""])),
    "bad words": (C, p(bad_words=["x"] * 100_000)),
    "logit_bias of all ids": (C, p(logit_bias={str(i): 1 for i in range(100_000)})),
    "stop_token_ids of all ids": (C, p(stop_token_ids=list(range(100_000)))),
    # constraints: compiled in a thread, with limits
    "CVE-2026-55574 regex": (C, p(guided_regex="(a+)+b")),
    "PYSEC-2026-3933 structured_outputs": (C, p(structured_outputs={"regex": "(a+)+\\1"})),
    "vLLM#17313 a bad regex": (C, p(structured_outputs={"regex": "[a-"})),
    "SGLang#7639 groups in groups": (C, p(structured_outputs={"regex": "(" * 30_000})),
    "CVE-2026-105757 grammar": (C, p(structured_outputs={"grammar": "root ::= ("})),
    "llama.cpp#26600 a deep grammar": (C, p(structured_outputs={
        "grammar": "start: " + "(" * 60_000})),
    "CVE-2025-48944 type and pattern": (CHAT, {"messages": MESSAGES, "response_format": {
        "type": "json_schema", "json_schema": {"name": "x", "schema": {
            "type": "nothing", "pattern": "("}}}}),
    "a schema on another host": (C, p(structured_outputs={"json": {"$ref": "http://127.0.0.1:1"}})),
    "a deep schema": (C, b'{"prompt":"x","structured_outputs":{"json":' + b'{"not":' * 50_000),
    "a schema of 1 MiB": (C, p(structured_outputs={"json": {"enum": ["x" * 2**20]}})),
    "CVE-2025-48944 tools": (CHAT, {"messages": MESSAGES, "tools": [{"type": "function",
        "function": {"name": "f", "parameters": {"type": "nothing", "pattern": "("}}}]}),
    # templates
    "PYSEC-2026-2013 chat_template": (CHAT, {"messages": MESSAGES,
        "chat_template": "{% for i in range(10**9) %}{{ i }}{% endfor %}"}),
    "a template that is not trusted": (CHAT, {
        "messages": MESSAGES, "chat_template": "{{ messages[0].content }}"}),
    "arguments of apply_chat_template": (CHAT, {
        "messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}}),
    "messages as a variable": (CHAT, {
        "messages": MESSAGES, "chat_template_kwargs": {"messages": "y"}}),
    "roles of another type": (CHAT, {"messages": [{"role": ["a"], "content": "x"}]}),
    "no messages": (CHAT, {"messages": []}),
    "messages without content": (CHAT, {"messages": [{}]}),
    "content of another type": (CHAT, {"messages": [{"role": "user", "content": 5}]}),
    # not offered
    "CVE-2025-62164 prompt_embeds": (C, p(prompt_embeds="AAAA")),
    "CVE-2025-6242 image_url": (CHAT, {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}]}]}),
    "CVE-2026-34753 file_url": (CHAT, {"messages": [{"role": "user", "content": [
        {"type": "file", "file": {"url": "file:///etc/passwd"}}]}]}),
    # amplification, and time of the event loop
    "many wrong entries": (C, filled(b'{"prompt":[', b"null,", b"]}")),
    "many wrong objects": (C, filled(b'{"prompt":[', b"{},", b"]}")),
    "many wrong lists": (C, filled(b'{"prompt":[', b"[null],", b"]}")),
    "many wrong stops": (C, filled(b'{"prompt":"x","stop":[', b"1,", b"]}")),
    "many wrong messages": (CHAT, filled(b'{"messages":[', b"1,", b"]}")),
    "many wrong tokens": ("/detokenize", filled(b'{"tokens":[', b'"",', b"]}")),
    "many tokens": ("/detokenize", filled(b'{"tokens":[', b"1,", b"]}")),
    "many fields": (C, json.dumps(p() | {f"f{i}": 1 for i in range(300_000)}).encode()),
    "many unknown fields": (C, json.dumps({f"pronpt{i}": 1 for i in range(300_000)}).encode()),
    "a text of 8 MiB": (C, filled(b'{"prompt":"', b"x", b'"}')),
    "a message of 8 MiB": (CHAT, filled(b'{"messages":[{"role":"user","content":"', b"x", b'"}]}')),
    "a text of 8 MiB to tokenise": ("/tokenize", filled(b'{"prompt":"', b"x", b'"}')),
    "4 million token ids": (C, filled(b'{"prompt":[', b"1,", b"]}")),
    "nested lists": (C, b'{"prompt":' + b"[" * 1_000_000),
    "nested objects": (C, b'{"x":' * 500_000),
    "an error that repeats the input": (C, p(model="m" * 1_000_000)),
    "an error that repeats a field": (C, {"prompt": 5, "y" * 1_000_000: 1}),
    "context length": (C, p(prompt="x" * 500)),
    "context length in ids": (C, p(prompt=[5] * 500)),
}  # fmt: skip


@pytest.fixture(scope="module")
def healthy(server: Served) -> dict[str, Any]:
    """The choice of a generation that nothing disturbs."""
    reply = server.send(C, HEALTHY)
    assert reply.status == 200
    return reply.data["choices"][0]


def check_refusal(reply: Reply, folder: Path) -> None:
    """A 4xx whose message is one short sentence that reveals nothing."""
    assert 400 <= reply.status < 500, (reply.status, reply.body[:300])
    assert len(reply.body) < 2_000, "amplified"
    error = reply.data["error"]
    assert set(error) == {"message", "type", "param", "code"}
    message = error["message"]
    assert message == message.strip()
    assert message.endswith("."), message
    assert "\n" not in message
    for leak in ("Traceback", "0x7f", "site-packages", 'File "', str(folder), "pydantic", "Error("):
        assert leak not in message


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_and_hurts_no_one(server, folder, healthy, name):
    path, body = ATTACKS[name]
    beside = server.begin(C, HEALTHY)
    begin = time.monotonic()
    reply = server.send(path, body)
    assert time.monotonic() - begin < 20, "the server took too long to refuse"
    undisturbed = beside.result(60)
    check_refusal(reply, folder)
    if path in (C, CHAT) and isinstance(body, dict):  # a stream is refused in the same way
        check_refusal(server.send(path, body | {"stream": True}), folder)
    assert undisturbed.status == 200
    choice = undisturbed.data["choices"][0]
    for key in ("text", "finish_reason"):
        assert choice[key] == healthy[key]
    assert choice["logprobs"]["tokens"] == healthy["logprobs"]["tokens"]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(
        healthy["logprobs"]["token_logprobs"], abs=1e-4
    )
    assert server.parts.gate.num_open == 0
    assert server.engine.is_running


ALLOWED: dict[str, tuple[str, Any]] = {
    "CVE-2025-29770 any schema": (CHAT, {"messages": MESSAGES, "max_tokens": 4, "response_format": {
        "type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}),
    "a regex that backtracks elsewhere": (C, p(structured_outputs={"regex": "(a+)+b"})),
    "large bounds": (C, p(structured_outputs={"json": {"type": "string", "maxLength": 10**5}})),
    "max_tokens above the room": (C, p(max_tokens=2**31 - 1)),
    "a field that the server does not know": (C, p(**{"x-unknown": 1, "a\r\nset-cookie: b": 2})),
    "a request id with line ends": (C, p(request_id="a\r\nx: y")),
    "logit_bias that excludes the likely": (C, p(logit_bias={str(i): -100 for i in range(263)})),
    "the same prompt 64 times": (C, p(prompt=["x"] * 32)),
}  # fmt: skip


@pytest.mark.parametrize("name", ALLOWED)
def test_what_looks_like_an_attack_and_is_served(server: Served, name: str) -> None:
    path, body = ALLOWED[name]
    reply = server.send(path, body)
    assert reply.status == 200, reply.body
    assert "set-cookie" not in reply.headers
    assert "x" not in reply.headers


def test_ignored_fields_are_named(server: Served) -> None:
    reply = server.send(C, p(nonsense=1))
    assert reply.headers["x-minillm-ignored"] == "nonsense"
    reply = server.send(C, p(**{"n" * 500_000: 1}))
    assert reply.headers["x-minillm-ignored"] == "n" * 80


def test_one_salt_does_not_see_anothers_cache(server: Served) -> None:
    text = "a prompt of several blocks, which is cached"
    body = {"prompt": text, "max_tokens": 1}

    def cached(**fields: Any) -> int:
        usage = server.complete(**(body | fields))["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached(cache_salt="alice") == 0
    assert cached(cache_salt="alice") > 0
    assert cached(cache_salt="bob") == 0
