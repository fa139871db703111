"""The shapes of replies: which fields they have, and of which types, compared between two servers.

By hand, with both servers running: ``python -m tests.clients.shapes OURS THEIRS`` prints every
difference.
"""

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

PROMPT = "def fib(n):"
COMMON: Mapping[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0.0}
REQUESTS: Mapping[str, tuple[str, Mapping[str, Any] | None]] = {
    "models": ("/v1/models", None),
    "completion": ("/v1/completions", COMMON),
    "several": ("/v1/completions", {**COMMON, "n": 2, "temperature": 1.0}),
    "prompts": ("/v1/completions", {**COMMON, "prompt": ["a", "b"]}),
    "ids": ("/v1/completions", {**COMMON, "prompt": [5, 6, 7], "return_token_ids": True}),
    "logprobs": ("/v1/completions", {**COMMON, "logprobs": 2}),
    "echo": ("/v1/completions", {**COMMON, "logprobs": 1, "echo": True, "max_tokens": 1}),
    "prompt logprobs": ("/v1/completions", {**COMMON, "prompt_logprobs": 1}),
    "stream": ("/v1/completions", {**COMMON, "stream": True}),
    "stream usage": (
        "/v1/completions",
        {**COMMON, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "stream logprobs": ("/v1/completions", {**COMMON, "stream": True, "logprobs": 2}),
    "tokenize": ("/tokenize", {"model": "tiny", "prompt": PROMPT, "return_token_strs": True}),
    "detokenize": ("/detokenize", {"model": "tiny", "tokens": [5, 6, 7]}),
    "version": ("/version", None),
    "bad temperature": ("/v1/completions", {**COMMON, "temperature": -1.0}),
    "bad type": ("/v1/completions", {**COMMON, "max_tokens": "many"}),
    "too long": ("/v1/completions", {**COMMON, "prompt": [5] * 100_000}),
    "no model": ("/v1/completions", {**COMMON, "model": "gpt-9"}),
    "no template": (
        "/v1/chat/completions",
        {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    ),
}


def call(address: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, Any]:
    """The status and the body of a reply; a stream is the list of its events."""
    data = None if body is None else json.dumps(dict(body)).encode()
    headers = {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address + path, data, headers), timeout=120
        ) as reply:
            status, text = reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    if text.startswith("data: "):
        lines = [each.removeprefix("data: ") for each in text.split("\n\n") if each]
        return status, [each if each == "[DONE]" else json.loads(each) for each in lines]
    return status, json.loads(text)


def fields(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Paths of all fields with their types; keys that are tokens or ids are left out."""
    if isinstance(value, dict):
        named = value if not path.endswith(("top_logprobs[]", "prompt_logprobs[]")) else {}
        for name, each in named.items():
            yield from fields(each, f"{path}.{name}")
    elif isinstance(value, list):
        for each in value:
            yield from fields(each, f"{path}[]")
    else:
        kind = {bool: "bool", int: "number", float: "number", str: "text"}
        yield path, kind.get(type(value), "null")


def differences(ours: str, theirs: str) -> list[str]:
    """What differs between two servers, a line for each field."""
    found = []
    for name, (path, body) in REQUESTS.items():
        (status, mine), (other_status, other) = (call(each, path, body) for each in (ours, theirs))
        if status != other_status:
            found.append(f"{name}: status {status} and {other_status}")
        left, right = set(fields(mine)), set(fields(other))
        found += [f"{name}: only ours{field} ({kind})" for field, kind in sorted(left - right)]
        found += [f"{name}: only theirs{field} ({kind})" for field, kind in sorted(right - left)]
    return found


if __name__ == "__main__":
    print("\n".join(differences(*sys.argv[1:])))
