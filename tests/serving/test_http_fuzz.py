"""Random requests to every route: no 5xx but 503, no hang, bounded replies, and a healthy
generation after every hundred."""

import json
import random
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from minillm.serving.protocol import (
    CONSTRAINTS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tests.serving.http_small import Served

BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest,
}  # fmt: skip
GETS = ("/v1/models", "/v1/models/small", "/v1/models/..%2f..%2fetc", "/health", "/ping",
        "/version", "/load", "/tokenizer_info", "/openapi.json", "/", "/nothing",
        "/debug/requests/x", "/debug/trace", "/metrics")  # fmt: skip
SETTINGS = {"max_waiting": 64}
HEALTHY = {"prompt": "def fib(n):", "max_tokens": 8, "temperature": 0}
LARGEST_REPLY = 400_000  # bytes; 64 prompts with n=16, 20 log-probabilities and 64 tokens is less
TEXTS = ("", "x", "def f", "äöü€😀", "\x00", "a" * 300, "<eos>", "{{ 7*7 }}", "\u202e", "\ufffd")
NUMBERS = (0, 1, -1, 2, 0.5, -0.5, 1e-300, 1e300, 2**31, 2**63, 2**64, 10**30)


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = rng.randrange(7 if depth < 3 else 4)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind == 1:
        return rng.choice(NUMBERS)
    if kind in (2, 3):
        return rng.choice(TEXTS)
    if kind == 4:
        return [value(rng, depth + 1) for _ in range(rng.randrange(5))]
    if kind == 5:
        return [rng.randrange(264) for _ in range(rng.randrange(1, 9))]
    return {rng.choice((*TEXTS[1:5], "type", "role", "content", "5")): value(rng, depth + 1)
            for _ in range(rng.randrange(4))}  # fmt: skip


def typed(rng: random.Random, schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """A value that fits a JSON schema."""
    if "$ref" in schema:
        return typed(rng, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return typed(rng, rng.choice(schema["anyOf"]), root)
    kind = schema.get("type")
    if kind == "string":
        return rng.choice(TEXTS)
    if kind == "integer":
        return rng.choice((0, 1, 2, 3, 5, 16, 20, -1, 2**31, 2**64))
    if kind == "number":
        return rng.choice((0, 1, 0.7, -2, 2, 1e-9, 1e300))
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "array":
        items = schema.get("items", {})
        return [typed(rng, items, root) for _ in range(rng.randrange(4))]
    if kind == "object" and "properties" in schema:
        names = [each for each in schema["properties"] if rng.random() < 0.5]
        return {each: typed(rng, schema["properties"][each], root) for each in names}
    if kind == "object":
        inner = schema.get("additionalProperties")
        inner = inner if isinstance(inner, dict) else {}
        if rng.random() < 0.7:
            return {"role": rng.choice(("user", "system", "x")), "content": rng.choice(TEXTS)}
        return {str(rng.choice((5, 70, 264, "x"))): typed(rng, inner, root) for _ in range(3)}
    return None if kind == "null" else value(rng)


SCHEMAS = {path: model.model_json_schema() for path, model in BODIES.items()}


def body_of(rng: random.Random, path: str) -> dict[str, Any]:
    """A body near the schema: right types, then some mutations."""
    schema = SCHEMAS[path]
    names = list(schema["properties"])
    chosen = rng.sample(names, rng.randrange(min(len(names), 5) + 1))
    needed = set(schema.get("required", ()))
    if rng.random() < 0.95:
        chosen += [each for each in needed if each not in chosen]
    made = {each: typed(rng, schema["properties"][each], schema) for each in chosen}
    if "model" in made:
        made["model"] = rng.choice(("small", None, "other", ""))
    if path == "/v1/completions" and rng.random() < 0.5:
        made["prompt"] = rng.choice(TEXTS[1:5])
    for _ in range(rng.choice((0, 0, 1, 2))):
        made[rng.choice((*names, *CONSTRAINTS, "unknown", ""))] = value(rng)
    return made


def damaged(rng: random.Random, raw: bytes) -> bytes:
    """Bytes with some changed, removed or repeated."""
    data = bytearray(raw)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(4)
        if kind == 0 and data:
            data[at - 1] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.randrange(8)]
        elif kind == 2:
            data[at:at] = data[at : at + 20]
        else:
            data[at:at] = rng.randbytes(rng.randrange(4))
    return bytes(data)


def one_request(server: Served, number: int, seed: int) -> None:
    """Send request `number` and check its reply."""
    rng = random.Random(f"{seed} {number}")
    path = rng.choice(list(BODIES))
    kind = rng.randrange(10)
    if kind == 0:
        path, method = rng.choice(GETS), rng.choice(("GET", "HEAD", "POST", "PUT", "DELETE"))
        raw = None if method == "GET" else rng.randbytes(rng.randrange(40))
        reply = server.send(path, raw, method)
        body: Any = raw
    else:
        body = body_of(rng, path)
        raw = json.dumps(body).encode()
        if kind <= 3:
            raw = damaged(rng, raw)
        reply = server.send(path, raw)
    shown = (number, path, raw, reply.status, reply.body[:300])
    assert reply.status < 500 or reply.status == 503, shown
    assert len(reply.body) <= LARGEST_REPLY + 100 * len(raw or b""), shown
    if reply.status >= 400 and kind:
        assert len(reply.body) < 4_000, shown
        assert set(reply.data["error"]) == {"message", "type", "param", "code"}, shown
        assert reply.message.endswith("."), shown
        assert "\n" not in reply.message, shown


def one_wire(server: Served, number: int, seed: int) -> None:
    """Damaged bytes of a whole HTTP request; the reply may be anything but a 500 or a hang."""
    rng = random.Random(f"wire {seed} {number}")
    body = json.dumps(body_of(rng, "/v1/completions") | {"max_tokens": 2}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Content-Type: {rng.choice(('application/json', 'text/plain', ''))}\r\n"
        f"Content-Length: {len(body) + rng.choice((0, 0, 0, -1, 1))}\r\n\r\n"
    ).encode()
    whole = head + body
    with server.connect() as wire:
        wire.sendall(damaged(rng, whole) if rng.random() < 0.8 else whole)
        wire.shutdown(socket.SHUT_WR)
        got = b""
        while part := receive(wire):
            got += part
    assert not got.startswith(b"HTTP/1.1 5") or got.startswith(b"HTTP/1.1 503"), (number, got)


def receive(wire: socket.socket) -> bytes:
    """What comes next; nothing after a reset. A hang is a timeout, which is an error."""
    try:
        return wire.recv(65536)
    except ConnectionError:
        return b""


KEYWORDS: dict[str, tuple[Any, ...]] = {  # of each type, with values right and wrong
    "string": (("minLength", 3), ("maxLength", 5), ("pattern", "^a+(b|c)$"), ("pattern", "(("),
               ("format", "date"), ("format", "?"), ("maxLength", -1)),
    "integer": (("minimum", -3), ("maximum", 12), ("multipleOf", 3), ("exclusiveMaximum", "x")),
    "number": (("minimum", 0.5), ("maximum", 1e300), ("multipleOf", 0.25)),
    "array": (("minItems", 1), ("maxItems", 2), ("uniqueItems", True), ("prefixItems", [{}])),
    "object": (("additionalProperties", False), ("minProperties", 9), ("patternProperties", {})),
    "boolean": (), "null": (),
}  # fmt: skip
REFERENCES = ("#/$defs/a", "#", "#/$defs/none", "http://x.test/schema", "")


def schema_of(rng: random.Random, depth: int = 0) -> Any:
    """A JSON schema, more often right than wrong."""
    kind = rng.choice((*KEYWORDS, *KEYWORDS, "choice", "any", "$ref", "wrong"))
    if kind == "wrong":
        return value(rng)
    if kind == "choice":
        return rng.choice(({"enum": ["a", 1, None]}, {"const": {"b": [2]}}, {"enum": []}))
    if kind == "$ref":
        return {"$ref": rng.choice(REFERENCES), "$defs": {"a": {"type": "boolean"}}}
    some = [schema_of(rng, depth + 1) for _ in range(rng.randrange(3))] if depth < 4 else []
    if kind == "any":
        return {rng.choice(("anyOf", "oneOf", "allOf")): some}
    made: dict[str, Any] = {
        "type": kind,
        **dict(rng.sample(KEYWORDS[kind], len(KEYWORDS[kind]) // 3)),
    }
    if kind == "object":
        made |= {
            "properties": dict(zip("xyz", some, strict=False)),
            "required": list("xyw")[: len(some)],
        }
    elif kind == "array" and some:
        made["items"] = some[0]
    return made | (
        {rng.choice(("$defs", "not", "if", "x")): value(rng)} if rng.random() < 0.1 else {}
    )


def one_schema(server: Served, number: int, seed: int) -> None:
    """A text under a random schema: valid if it is finished, or the schema is refused."""
    rng = random.Random(f"schema {seed} {number}")
    schema = schema_of(rng)
    given = {"prompt": "x", "max_tokens": 24, "seed": 1, "structured_outputs": {"json": schema}}
    reply = server.send("/v1/completions", given)
    shown = (number, schema, reply.status, reply.body[:300])
    assert reply.status in (200, 400), shown
    if reply.status == 400:
        assert reply.message.endswith("."), shown
        assert "\n" not in reply.message, shown
    elif reply.data["choices"][0]["finish_reason"] == "stop":
        text = reply.data["choices"][0]["text"]
        with suppress(RecursionError):  # jsonschema's, where a schema refers to itself at once
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))


WORKS = (one_request, one_request, one_wire)


def fuzz(
    server: Served,
    count: int,
    seed: int,
    works: Sequence[Callable[[Served, int, int], None]] = WORKS,
) -> None:
    """`count` requests in hundreds, four at a time, each hundred followed by a healthy one."""
    right = server.send("/v1/completions", HEALTHY).data["choices"][0]["text"]
    with ThreadPoolExecutor(4) as pool:
        for begin in range(0, count, 100):
            tasks = [
                pool.submit(works[i % len(works)], server, i, seed)
                for i in range(begin, begin + 100)
            ]
            for each in tasks:
                each.result(120)
            healthy = server.send("/v1/completions", HEALTHY)
            assert healthy.status == 200, healthy.body
            assert healthy.data["choices"][0]["text"] == right
            server.assert_idle()


def test_two_hundred_requests(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    fuzz(server, 200, seed=0)
    assert not [each for each in caplog.records if "failed" in each.getMessage()], caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_ten_thousand_requests(server: Served, seed: int) -> None:
    fuzz(server, 1_000, seed)


def test_a_hundred_schemas(server: Served) -> None:
    fuzz(server, 100, 0, [one_schema])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_ten_thousand_schemas(server: Served, seed: int) -> None:
    fuzz(server, 1_000, seed, [one_schema])
