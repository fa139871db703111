"""The shapes of replies and frames, on which clients stand."""

import json
import math
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from minillm import LLM
from minillm.api.outputs import CompletionOutput
from minillm.serving import event_stream
from minillm.serving.event_stream import frame
from minillm.serving.generation import ChoiceEvents
from minillm.serving.replies import Header, Usage, chat_delta, text_choice
from tests.serving.http_small import Served, joined

KEYS = {"text_completion": "/v1/completions", "chat.completion.chunk": "/v1/chat/completions"}
TEXT = "def fib(n):"
MESSAGES = [{"role": "user", "content": "Hello"}]


def body_of(kind: str, **fields: Any) -> dict[str, Any]:
    """The body of a request of one kind."""
    prompt = {"prompt": TEXT} if kind == "text_completion" else {"messages": MESSAGES}
    return prompt | {"max_tokens": 12, "ignore_eos": True} | fields


@pytest.mark.parametrize("kind", KEYS)
def test_constant_fields_and_one_end_per_choice(server: Served, kind: str) -> None:
    fields = {"n": 3, "temperature": 0.8, "seed": 5}
    frames = server.stream(KEYS[kind], body_of(kind, **fields))
    assert {each["object"] for each in frames} == {kind}
    for name in ("id", "created", "model"):
        assert len({each[name] for each in frames}) == 1
    assert frames[0]["model"] == "small"
    assert abs(frames[0]["created"] - time.time()) < 60
    assert all(len(each["choices"]) == 1 for each in frames)
    ended: list[int] = []
    for each in frames:
        choice = each["choices"][0]
        assert choice["index"] not in ended, "a frame after finish_reason"
        if choice["finish_reason"] is not None:
            assert choice["finish_reason"] == "length"
            ended.append(choice["index"])
    assert sorted(ended) == [0, 1, 2]


def test_usage_is_one_frame_without_choices(server: Served) -> None:
    for kind, path in KEYS.items():
        plain = server.stream(path, body_of(kind))
        assert all(each["choices"] for each in plain)
        assert all(each.get("usage") is None for each in plain)
        options = {"stream_options": {"include_usage": True}}
        frames = server.stream(path, body_of(kind, n=2, temperature=0.5, **options))
        assert [i for i, each in enumerate(frames) if not each["choices"]] == [len(frames) - 1]
        assert all(each.get("usage") is None for each in frames[:-1])
        usage = frames[-1]["usage"]
        assert usage["completion_tokens"] == 24
        assert usage["total_tokens"] == usage["prompt_tokens"] + 24
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 0


def test_usage_of_several_prompts_counts_each_once(server: Served) -> None:
    body = {"prompt": ["ab", "cde"], "n": 2, "temperature": 0.7, "max_tokens": 5,
            "ignore_eos": True}  # fmt: skip
    whole = server.send("/v1/completions", body).data["usage"]
    assert (whole["prompt_tokens"], whole["completion_tokens"]) == (5, 20)
    frames = server.stream("/v1/completions", body | {"stream_options": {"include_usage": True}})
    usage = frames[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 20)


def test_continuous_usage_grows(server: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    frames = server.stream("/v1/completions", body_of("text_completion", stream_options=options))
    counts = [each["usage"]["completion_tokens"] for each in frames]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert counts[0] >= 1


def test_the_role_comes_with_the_first_token(server: Served) -> None:
    """Also for a request that waits: its client would take the role for the first token."""
    release = hold(server)
    body = body_of("chat.completion.chunk", stream=True)
    with server.post("/v1/chat/completions", body) as wire:
        wire.settimeout(2.5)  # longer than the server waits before it sends headers
        time.sleep(1.2)
        got = wire.recv(4096)
        assert b"200 OK" in got
        assert b"data:" not in got
        release()
        wire.settimeout(30)
        while b"[DONE]" not in got:
            got += wire.recv(4096)
    events = got.split(b"data: ")[1:]
    assert b'"role":"assistant"' in events[0]
    assert sum(b'"role"' in each for each in events) == 1


def hold(server: Served) -> Any:
    """Stop the step thread until the returned function is called."""
    go, inside = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        go.wait(60)

    server.engine._steps.call(wait)
    assert inside.wait(30)
    return go.set


@pytest.mark.slow
def test_comments_keep_a_silent_stream_open(server, monkeypatch):
    monkeypatch.setattr(event_stream, "PING_SECONDS", 0.1)
    release = hold(server)
    with server.post("/v1/completions", body_of("text_completion", stream=True)) as wire:
        got = b""
        while got.count(b": keep-alive\n\n") < 3:
            got += wire.recv(4096)
        release()
        while b"[DONE]" not in got:
            got += wire.recv(4096)
    release()


def test_a_token_whose_text_is_held_back_has_a_frame(server: Served) -> None:
    # Clients take the first frame with a choice as the time to the first token.
    body = body_of("text_completion", max_tokens=24, stop=["a stop string " * 15])
    texts = [each["choices"][0]["text"] for each in server.stream(KEYS["text_completion"], body)]
    assert len(texts) > 1
    assert texts[0] == ""
    assert "".join(texts)


def test_the_slice_of_lm_eval(server: Served, llm: LLM) -> None:
    """`echo`, `max_tokens` 1 and `logprobs`: the harness drops the last entry, and compares floats
    for is_greedy."""
    context, text = "def fib", "def fib(n): x"
    got = server.complete(text, max_tokens=1, echo=True, logprobs=2)["choices"][0]["logprobs"]
    assert {len(got[name]) for name in got} == {len(text) + 1}
    assert got["token_logprobs"][0] is None
    assert got["top_logprobs"][0] is None
    values = got["token_logprobs"][len(context) : -1]
    scored = llm.score(text)[0]
    assert len(values) == len(text) - len(context)
    assert sum(got["token_logprobs"][1:-1]) == pytest.approx(scored.log_likelihood, abs=1e-3)
    for value, top in zip(got["token_logprobs"][1:], got["top_logprobs"][1:], strict=True):
        assert 2 <= len(top) <= 3
        assert value in top.values(), "not the same float"


def test_echo_without_a_completion(server: Served) -> None:
    got = server.complete("plain", max_tokens=0, echo=True, logprobs=1)
    assert got["choices"][0]["text"] == "plain"
    assert len(got["choices"][0]["logprobs"]["tokens"]) == 5
    assert got["usage"]["completion_tokens"] == 0
    frames = server.stream("/v1/completions", {"prompt": "plain", "max_tokens": 0, "echo": True})
    assert joined(frames) == {0: "plain"}
    whole = server.complete(["ab", "cd"], max_tokens=4, echo=True, n=1)
    frames = server.stream(
        "/v1/completions", {"prompt": ["ab", "cd"], "max_tokens": 4, "echo": True}
    )
    assert joined(frames) == {i: c["text"] for i, c in enumerate(whole["choices"])}


def test_impossible_tokens_have_a_finite_logprob(server: Served) -> None:
    got = server.complete("a", max_tokens=1, logprobs=5, allowed_token_ids=[70, 71])["choices"][0]
    values = list(got["logprobs"]["top_logprobs"][0].values())
    assert all(math.isfinite(each) for each in values)
    assert min(values) >= -9999.0


@pytest.mark.parametrize("top", [None, 0, 1, 5, 20])
def test_chat_logprobs(server: Served, top: int | None) -> None:
    more = {} if top is None else {"top_logprobs": top}
    choice = server.chat("Hello", max_tokens=6, logprobs=True, ignore_eos=True, **more)["choices"][
        0
    ]
    content = choice["logprobs"]["content"]
    assert len(content) == 6
    for each in content:
        assert set(each) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(each["top_logprobs"]) == (top or 0)
        best = [one["logprob"] for one in each["top_logprobs"]]
        assert best == sorted(best, reverse=True)
        assert not best or best[0] == each["logprob"], "greedy"
    body = body_of("chat.completion.chunk", max_tokens=6, logprobs=True, **more)
    frames = server.stream("/v1/chat/completions", body)
    parts = [c["logprobs"] for f in frames for c in f["choices"] if c.get("logprobs")]
    assert [one for part in parts for one in part["content"]] == content


def test_prompt_logprobs(server: Served) -> None:
    got = server.complete("abc", max_tokens=1, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    assert got[0] is None
    assert len(got) == 3
    for position, character in enumerate("bc", 1):
        own = got[position][str(byte_id(server, character))]
        assert set(own) == {"logprob", "rank", "decoded_token"}
        assert own["decoded_token"] == character


def byte_id(server: Served, text: str) -> int:
    """The id of a one-token text."""
    [found] = server.send("/tokenize", {"prompt": text}).data["tokens"]
    return found


# ---- events whose constant JSON was written before --------------------------------------------

PIECES = ("", " a", '"text":""', 'quote " and \\ and \n', "é, \u2028, 漢字, 🙂", '","content":"')
COMMON = Header(id='cmpl-"text":""\\', created=5, model='m"content":""', chat=False)


def whole(header: Header, new: CompletionOutput, usage: Usage | None) -> bytes:
    """The event, written at once."""
    choice = chat_delta(header, 3, new) if header.chat else text_choice(header, 3, new)
    return frame(header.piece([choice], usage))


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("usage", [None, Usage(prompt_tokens=7)])
def test_events_equal_those_written_at_once(chat, with_ids, usage):
    header = replace(COMMON, chat=chat, with_ids=with_ids)
    events = ChoiceEvents(header, 3, usage)
    for number, text in enumerate(PIECES):
        if usage is not None:
            usage.completion_tokens = number
        new = CompletionOutput(3, text, [number])
        made = events.event(new)
        assert made == whole(header, new, usage)
        assert (made[-2:], made.count(b"\n")) == (b"\n\n", 2)
        choice = json.loads(made.removeprefix(b"data: "))["choices"][0]
        assert (choice["delta"]["content"] if chat else choice["text"]) == text
