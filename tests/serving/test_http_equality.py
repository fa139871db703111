"""The text over HTTP is that of `LLM.generate`, whole and in a stream."""

from pathlib import Path
from typing import Any

import pytest

from minillm import LLM, SamplingParams
from tests.serving.http_small import Served, joined, served

TEXTS = ["def fib(n):", "a", "Once upon a time there was", "äöü € 😀 x"]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 7},
    "n=2": {"temperature": 0.9, "seed": 11, "n": 2},
    "top_k, top_p, min_p": {"temperature": 1.3, "seed": 3, "top_k": 40, "top_p": 0.9,
                            "min_p": 0.01},
    "penalties": {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5,
                  "repetition_penalty": 1.2},
    "logit_bias": {"temperature": 0.0, "logit_bias": {"70": 5.0, "71": -100.0}},
    "min_tokens": {"temperature": 0.0, "min_tokens": 10, "stop_token_ids": [80, 90, 100]},
}  # fmt: skip
# Drafts, so that an event has several tokens; `LLM.generate` has none.
ARGUMENTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
every_kind = pytest.mark.parametrize("kind", KINDS)


def params_of(fields: dict[str, Any], **more: Any) -> SamplingParams:
    """The same fields for `LLM.generate`."""
    bias = fields.get("logit_bias")
    fields = fields | ({"logit_bias": {int(k): v for k, v in bias.items()}} if bias else {})
    return SamplingParams(max_tokens=24, **(fields | more))


@pytest.fixture(scope="module")
def expected(llm: LLM) -> dict[str, list[list[tuple[str, str | None]]]]:
    """By kind and prompt: text and finish_reason of each completion."""
    found = {}
    for kind, fields in KINDS.items():
        outputs = llm.generate(TEXTS, params_of(fields))
        found[kind] = [[(c.text, c.finish_reason) for c in each.outputs] for each in outputs]
    return found


@every_kind
def test_the_text_is_that_of_generate(server: Served, kind: str, expected: Any) -> None:
    fields = KINDS[kind] | {"max_tokens": 24}
    many = server.complete(TEXTS, **fields)
    flat = [each for prompt in expected[kind] for each in prompt]
    assert [each["index"] for each in many["choices"]] == list(range(len(flat)))
    assert [(each["text"], each["finish_reason"]) for each in many["choices"]] == flat
    for text, right in zip(TEXTS, expected[kind], strict=True):
        one = server.complete(text, **fields)
        assert [(each["text"], each["finish_reason"]) for each in one["choices"]] == right


@every_kind
def test_the_frames_join_to_the_text_of_generate(server: Served, kind: str, expected: Any) -> None:
    frames = server.stream("/v1/completions", KINDS[kind] | {"prompt": TEXTS, "max_tokens": 24})
    flat = [each for prompt in expected[kind] for each in prompt]
    assert joined(frames) == dict(enumerate(text for text, _ in flat))
    ends = [c for each in frames for c in each["choices"] if c["finish_reason"]]
    assert {c["index"]: c["finish_reason"] for c in ends} == dict(
        enumerate(reason for _, reason in flat)
    )
    assert len(ends) == len(flat), "a choice ended twice"


def test_token_ids_are_a_prompt(server: Served, llm: LLM) -> None:
    ids = [list(b"def fib(n):"), [5, 60, 7, 99, 12]]
    right = llm.generate([{"prompt_token_ids": each} for each in ids],
                         SamplingParams(temperature=0, max_tokens=12))  # fmt: skip
    texts = [each.outputs[0].text for each in right]
    got = server.complete(ids, max_tokens=12, return_token_ids=True)
    assert [each["text"] for each in got["choices"]] == texts
    assert [each["token_ids"] for each in got["choices"]] == [
        list(each.outputs[0].token_ids) for each in right
    ]
    assert server.complete(ids[1], max_tokens=12)["choices"][0]["text"] == texts[1]


def test_a_chat_is_its_rendered_prompt(server: Served, llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    right = llm.chat(messages, SamplingParams(temperature=0, max_tokens=16))[0].outputs[0].text
    assert server.chat("Hello", max_tokens=16)["choices"][0]["message"]["content"] == right
    frames = server.stream("/v1/chat/completions", {"messages": messages, "max_tokens": 16})
    assert joined(frames, chat=True) == {0: right}
    for name in ("max_tokens", "max_completion_tokens"):
        got = server.chat("Hello", **{name: 3})
        assert got["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("included", [False, True])
def test_stop_strings_across_frames(server: Served, included: bool) -> None:
    """Each stop string is part of the text, and has up to four tokens."""
    whole = server.complete(TEXTS[0], max_tokens=40, ignore_eos=True)["choices"][0]["text"]
    readable = [i for i in range(len(whole) - 5) if "\ufffd" not in whole[i : i + 5]]
    for length in (1, 2, 4):
        for start in readable[2::9]:
            stop = [whole[start : start + length], "never \x00 there"]
            end = whole.index(stop[0])
            right = whole[: end + (length if included else 0)]
            fields = {"max_tokens": 40, "ignore_eos": True, "stop": stop,
                      "include_stop_str_in_output": included}  # fmt: skip
            got = server.complete(TEXTS[0], **fields)["choices"][0]
            assert (got["text"], got["finish_reason"]) == (right, "stop")
            assert got["stop_reason"] == stop[0]
            frames = server.stream("/v1/completions", fields | {"prompt": TEXTS[0]})
            assert joined(frames) == {0: right}


def test_logprobs_are_those_of_generate(server: Served, llm: LLM) -> None:
    right = llm.generate(TEXTS[0], SamplingParams(temperature=0, max_tokens=8, logprobs=3))[0]
    got = server.complete(TEXTS[0], max_tokens=8, logprobs=3)["choices"][0]["logprobs"]
    entries, ids = right.outputs[0].logprobs, right.outputs[0].token_ids
    assert got["token_logprobs"] == pytest.approx(
        [entry[i].logprob for entry, i in zip(entries, ids, strict=True)], abs=1e-5
    )
    names = ["\ufffd" if each.startswith("bytes:") else each for each in got["tokens"]]
    assert names == [entry[i].decoded_token for entry, i in zip(entries, ids, strict=True)]


def test_what_a_request_tells_the_template(folder: Path) -> None:
    template = (
        "{{ messages[-1].content }}|{{ effort_of }}{{ reasoning_effort }}{{ enable_thinking }}"
    )
    settings = {"chat_template": template, "trust_request_chat_template": True}
    messages = [{"role": "user", "content": [{"type": "text", "text": " a<eos>b "}]}]
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, " a<eos>b |"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, " a<eos>b |False"),
        ({"reasoning_effort": "low"}, " a<eos>b |low"),
        ({"continue_final_message": True}, " a<eos>b "),
        ({"chat_template": "{{ messages[0].content | trim }}!"}, "a<eos>b!"),
    ]
    with served(folder, settings) as server:
        for fields, right in cases:
            asked = {"messages": messages, **fields}
            ids = server.send("/tokenize", asked).data["tokens"]
            assert server.send("/detokenize", {"tokens": ids}).data["prompt"] == right
            body = asked | {"max_tokens": 1, "return_token_ids": True}
            got = server.send("/v1/chat/completions", body)
            assert got.data["prompt_token_ids"] == ids
            assert "x-minillm-ignored" not in got.headers
        for fields, why in (
            ({"enable_thinking": False}, "give it in chat_template_kwargs"),
            ({"chat_template": "", "chat_template_kwargs": {"x": 1}}, "'x' is not read"),
        ):
            refused = server.send("/v1/chat/completions", {"messages": messages, **fields})
            assert refused.status == 400
            assert why in refused.message
        refused = server.send("/tokenize", {"prompt": "x", "reasoning_effort": "low"})
        assert (
            refused.message
            == "reasoning_effort: it is for /v1/chat/completions and messages; leave it out."
        )
