"""Tool calls and thoughts over HTTP: whole and streamed, the loop of a client, refusals."""

import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers

from minillm.serving import tool_calls
from tests.pairs import one_in
from tests.serving.http_small import TEMPLATE, Served, served, write_chat_model
from tests.text.test_chat_tools import LLAMA, QWEN

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")
CHAT = "/v1/chat/completions"
CALL, CALL_END, THINK, THINK_END = range(257, 261)  # ids of the tags, which are text, as Qwen's
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Tromsø"]}, "days": {"enum": [1, 2]}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
ASK = [{"role": "user", "content": "Is it warm?"}]
NAMED = {"type": "function", "function": {"name": "weather"}}
TEMPLATES = {"qwen": QWEN, "llama": LLAMA, "none": TEMPLATE, "thinking": QWEN + "<think>\n"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model of bytes and tags, to which requests bring the template."""
    folder = write_chat_model(tmp_path_factory.mktemp("tools"))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tags = "<tool_call>", "</tool_call>", "<think>", "</think>"
    tokenizer.add_tokens([tokenizers.AddedToken(each, normalized=False) for each in tags])
    assert tokenizer.token_to_id("<tool_call>") == CALL
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"trust_request_chat_template": True}
    with served(folder, settings, num_gpu_blocks_override=1024, max_model_len=2048) as made:
        yield made


def asked(template: str, **fields: Any) -> dict[str, Any]:
    common = {"messages": ASK, "tools": TOOLS, "chat_template": TEMPLATES[template]}
    return {**common, "temperature": 1, "seed": 1, "max_tokens": 200, **fields}


def added(frames: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices of a stream, added up as the client `openai` does: text to text, entries of lists
    by their index."""
    choices: dict[int, dict[str, Any]] = {}
    for choice in (each for frame in frames for each in frame["choices"]):
        message = choices.setdefault(choice["index"], {"finish_reason": None})
        assert message["finish_reason"] is None, "after the end"
        message["finish_reason"] = choice["finish_reason"]
        for name, value in choice["delta"].items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
                continue
            for call in value:
                calls = message.setdefault("tool_calls", [])
                assert call["index"] in (len(calls) - 1, len(calls))
                if call["index"] == len(calls):
                    calls.append({k: v for k, v in call.items() if k != "index"})
                else:
                    assert call.keys() == {"index", "function"}
                    assert call["function"].keys() == {"arguments"}
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return choices


def both(server: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a reply with their reasons, equal whole and streamed but for ids of calls."""
    whole = server.send(CHAT, body)
    assert whole.status == 200, whole.body
    assert "x-minillm-ignored" not in whole.headers
    streamed, found = added(server.stream(CHAT, body)), []
    for choice in whole.data["choices"]:
        message = choice["message"] | {"finish_reason": choice["finish_reason"]}
        other = streamed[choice["index"]]
        for name in ("content", "reasoning_content", "finish_reason", "role"):
            assert (message.get(name) or "") == (other.get(name) or ""), name
        pairs = zip(message.get("tool_calls", []), other.get("tool_calls", []), strict=True)
        for one, two in pairs:
            assert one["id"].startswith("call_")
            assert one["id"] != two["id"]
            assert one | {"id": ""} == two | {"id": ""}
            assert one["type"] == "function"
        found.append(message)
    return found


def check_call(call: dict[str, Any]) -> None:
    schemas = {"weather": SCHEMA, "now": {"maxProperties": 0}}
    function = call["function"]
    jsonschema.validate(json.loads(function["arguments"]), schemas[function["name"]])


@pytest.mark.parametrize(
    ("template", "name"), one_in(3, product(TEMPLATES, ["required", "named", "one", "auto"]))
)
def test_calls(server: Served, template: str, name: str) -> None:
    """Enforced if required or named; in tags also if the model opens one by itself."""
    given: dict[str, Any] = {
        "required": {"tool_choice": "required", "n": 2},
        "named": {"tool_choice": NAMED},
        "one": {"tool_choice": "required", "parallel_tool_calls": False, "n": 2},
        "auto": {"tool_choice": "auto", "parallel_tool_calls": False},
    }[name]
    bias = {THINK_END: 12, 256: 12}
    if name == "auto":
        bias = {THINK_END: 12, CALL: 0 if template == "llama" else 12}
    given["logit_bias"] = {str(token): value for token, value in bias.items()}
    for message in both(server, asked(template, **given)):
        calls = message.get("tool_calls", [])
        assert ("reasoning_content" in message) <= (template in ("qwen", "thinking"))
        if name == "auto" and template == "llama":
            assert not calls  # it has written something else
            continue
        assert message["finish_reason"] == "tool_calls", message
        assert message["content"] is None or name == "auto"
        assert len(calls) >= 1
        assert len(calls) == 1 or name == "required"
        for call in calls:
            check_call(call)
            assert name != "named" or call["function"]["name"] == "weather"


def test_a_cut_call_is_not_called_complete(server: Served) -> None:
    (message,) = both(server, asked("none", tool_choice=NAMED, max_tokens=50))
    assert message["finish_reason"] == "length"
    (call,) = message["tool_calls"]
    assert call["function"]["arguments"].startswith("{")


def test_usage_logprobs_and_ids_beside_calls(server: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = asked("none", tool_choice=NAMED, logprobs=True, return_token_ids=True)
    whole = server.send(CHAT, body).data
    frames = server.stream(CHAT, body | {"stream_options": options})
    (choice,) = whole["choices"]
    pieces = [each for frame in frames for each in frame["choices"]]
    ids = [token for each in pieces for token in each.get("token_ids", ())]
    scores = [e for each in pieces if each["logprobs"] for e in each["logprobs"]["content"]]
    assert ids == choice["token_ids"]
    assert [each["token"] for each in scores] == [
        each["token"] for each in choice["logprobs"]["content"]
    ]
    assert frames[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


# ---- thoughts ------------------------------------------------------------------------------


def test_a_thought_is_told_apart(server: Served) -> None:
    body = asked("thinking", logit_bias={str(THINK_END): 5}, max_tokens=60, tools=None, n=8)
    messages = both(server, body)
    assert any(each.get("reasoning_content") and each["content"] for each in messages)
    assert all("</think>" not in each.get("reasoning_content", "") for each in messages)


@pytest.mark.parametrize("given", [
    {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    {"response_format": {"type": "json_object"}, "tools": TOOLS},
    {"structured_outputs": {"regex": '\\{"city": "Oslo"\\}'}},
], ids=["schema", "object", "regex"])  # fmt: skip
def test_a_constraint_begins_behind_the_thought(server: Served, given: dict[str, Any]) -> None:
    bias = {str(THINK_END): 4, str(ord("}")): 9, "256": 9, str(CALL): -100, str(ord("<")): -100}
    body = asked("thinking", **({"tools": None, "logit_bias": bias} | given))
    messages = [each for each in both(server, body | {"n": 8}) if each["finish_reason"] == "stop"]
    assert any("reasoning_content" in each for each in messages)
    for message in messages:
        content = json.loads(message["content"])
        assert isinstance(content, dict)
        if "tools" not in given:
            jsonschema.validate(content, SCHEMA)


def test_no_thought_where_the_prompt_has_closed_it_or_no_tags(server: Served) -> None:
    bias = {str(THINK): 9, str(THINK_END): 9}
    closed = asked("qwen", chat_template_kwargs={"enable_thinking": False}, tools=None)
    for body in (closed, asked("llama", tools=None)):
        (message,) = both(server, body | {"logit_bias": bias, "max_tokens": 20})
        assert "reasoning_content" not in message
        assert "<think>" in message["content"]


def test_a_thought_that_is_continued(server: Served) -> None:
    last = {"role": "assistant", "content": "<think>Hm"}
    body = asked("qwen", messages=[*ASK, last], continue_final_message=True, tools=None)
    (message,) = both(server, body | {"max_tokens": 30, "logit_bias": {str(THINK_END): 4}})
    assert message["reasoning_content"]


# ---- the loop of a client --------------------------------------------------------------------


@pytest.mark.parametrize("template", one_in(2, TEMPLATES))
def test_the_loop_of_a_client(server: Served, template: str) -> None:
    """The messages come back as they were sent, with results; then the model answers."""
    messages: list[dict[str, Any]] = list(ASK)
    bias = {str(THINK_END): 9, "256": 9}
    for choice in ("required", NAMED, "none"):
        body = asked(template, messages=messages, tool_choice=choice, logit_bias=bias)
        (message,) = both(server, body)
        del message["finish_reason"]
        messages.append(message)
        for call in message.get("tool_calls", ()):
            check_call(call)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "4 degrees"})
    assert isinstance(messages[-1]["content"], str)
    assert "tool_calls" not in messages[-1]
    assert sum(each["role"] == "tool" for each in messages) >= 2
    # The model has seen all of it: the prompt differs without one result.
    counts = [
        server.send("/tokenize", {"messages": each, "chat_template": TEMPLATES[template],
                                  "tools": TOOLS}).data["count"]
        for each in (messages, messages[:-2], messages[:1])
    ]  # fmt: skip
    assert counts[0] > counts[1] > counts[2]


class Got(dict):
    """An object of a reply, whose fields are attributes."""

    __getattr__ = dict.get


def test_the_example_of_the_guide(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package `openai` (tests/clients has the real one), which sends a
    message with all the fields that it got."""
    bias = {str(256): 9}

    def create(messages: list[Any], **fields: Any) -> Any:
        fields |= {"model": None, "messages": messages, "seed": 1, "logit_bias": bias}
        reply = server.send(CHAT, fields | {"chat_template": TEMPLATE})
        assert reply.status == 200, reply.body
        return json.loads(reply.body, object_hook=Got)

    def client(base_url: str, api_key: str) -> Any:
        return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))

    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(OpenAI=client))
    page = Path(__file__).parents[2] / "minillm" / "GUIDE.md"
    names: dict[str, Any] = {}
    exec(page.read_text("utf-8").partition("```py\n")[2].partition("```")[0], names)
    _, message, result, answer = names["messages"]
    given = json.loads(message.tool_calls[0].function.arguments)
    assert result["content"] == str(given["a"] + given["b"])
    assert answer.content == names["message"].content


def test_no_tools_are_told_of_if_none_may_be_called(server: Served) -> None:
    bias = {str(CALL): 9}
    for template in TEMPLATES:
        found = [
            server.send(CHAT, asked(template, **more) | {"max_tokens": 9, "logit_bias": bias}).data
            for more in ({"tool_choice": "none"}, {"tools": None}, {"tools": []})
        ]
        prompts = [each["usage"]["prompt_tokens"] for each in found]
        assert prompts == prompts[:1] * 3
        one, two, three = (each["choices"][0]["message"] for each in found)
        assert one == two == three


# ---- refusals --------------------------------------------------------------------------------


def tool(parameters: Any = None, name: Any = "f") -> list[dict[str, Any]]:
    return [TOOLS[0], {"type": "function", "function": {"name": name, "parameters": parameters}}]


def deep(levels: int) -> dict[str, Any]:
    return {"properties": {"a": deep(levels - 1)}} if levels else {}


RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "4"}
WHERE = "tools[1].function.parameters"
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    # fields, the beginning of the sentence, words of it
    "an unsupported keyword": (
        {"tools": tool({"properties": {"a": {"items": {"not": {}}}}})}, WHERE,
        "cannot be used: at $.properties.a.items: Unimplemented keys"),
    "CVE-2025-48944 type": ({"tools": tool({"type": "nothing", "pattern": "("})}, WHERE,
                            "it must be a JSON schema of type 'object'"),
    "CVE-2025-48944 pattern": (
        {"tools": tool({"properties": {"a": {"type": "string", "pattern": "("}}})}, WHERE,
        "at $.properties.a"),
    "CVE-2025-48944 an unknown type": (
        {"tools": tool({"properties": {"a": {"type": "nothing"}}})}, WHERE, "at $.properties.a"),
    "a contradiction": (
        {"tools": tool({"properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}},
                        "required": ["a"]})}, WHERE, "cannot be used: at $"),
    "a deep schema": ({"tools": tool(deep(17))}, WHERE, "nested deeper than 32 levels at $.prop"),
    "a large schema": ({"tools": tool({"title": "x" * 2**16})}, WHERE, "at most 65,536"),
    "large schemas": (
        {"tools": [{"type": "function", "function": {
            "name": f"f{i}", "parameters": {"title": "x" * 2**15}}} for i in range(3)]},
        "tools", "at most 65,536"),
    "a remote reference": ({"tools": tool({"properties": {"a": {"$ref": "http://x/"}}})}, WHERE,
                           "only references within the schema"),
    "a reference to nothing": ({"tools": tool({"properties": {"a": {"$ref": "#/no"}}})}, WHERE,
                               "cannot be used: at $"),
    "no schema": ({"tools": tool([])}, WHERE, "it must be a JSON schema"),
    "two of a name": ({"tools": tool(None, "weather")}, "tools[1].function.name is 'weather'",
                      "names must differ"),
    "no name": ({"tools": tool(None, None)}, "tools[1].function.name is None", "1 to 64 letters"),
    "a name with blanks": ({"tools": tool(None, "a b")}, "tools[1].function.name is 'a b'", ""),
    "a long name": ({"tools": tool(None, "a" * 65)}, "tools[1].function.name is 'aaa", ""),
    "no function": ({"tools": [{"type": "function"}]}, "tools[0] must be", ""),
    "another kind": ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0] must be", "custom"),
    "many tools": ({"tools": TOOLS[1:] * 129}, "tools has 129 entries; at most 128", ""),
    "tools of another type": ({"tools": {"a": 1}}, "tools is a dict", ""),
    "an unknown choice": ({"tool_choice": "always"}, "tool_choice is 'always'; it must be 'none'",
                          "'auto', 'required'"),
    "another choice": ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice is {", "'auto'"),
    "a choice of another type": ({"tool_choice": 5}, "tool_choice", ""),
    "a name that is no tool": (
        {"tool_choice": {"type": "function", "function": {"name": "wether"}}},
        "tool_choice names the function 'wether'", "Did you mean 'weather'?"),
    "a name of another type": (
        {"tool_choice": {"type": "function", "function": {"name": [1]}}},
        "tool_choice names the function [1]", "not among the tools"),
    "required without tools": ({"tool_choice": "required", "tools": None},
                               "tool_choice is 'required', but there are no tools", ""),
    "a result without its call": ({"messages": [*ASK, RESULT]}, "messages[1].tool_call_id",
                                  "it must be the id of an entry of tool_calls"),
    "a result of another call": (
        {"messages": [*ASK, {"role": "assistant", "tool_calls": [
            {"id": "call_2", "type": "function", "function": {"name": "f"}}]}, RESULT]},
        "messages[2].tool_call_id is 'call_1'", ""),
    "a result whose id is a list": ({"messages": [*ASK, RESULT | {"tool_call_id": [1]}]},
                                    "messages[1].tool_call_id is [1]", ""),
    "a call without JSON": (
        {"messages": [*ASK, {"role": "assistant", "tool_calls": [
            {"id": "call_1", "function": {"name": "f", "arguments": "{"}}]}, RESULT]},
        "messages[1].tool_calls[0].function.arguments is '{'", "JSON object"),
    "calls of another type": (
        {"messages": [*ASK, {"role": "assistant", "tool_calls": "f"}]}, "messages[1]", ""),
    "functions": ({"functions": [{"name": "f"}]}, "functions:", "tools and tool_choice"),
    "without an end": ({"ignore_eos": True}, "ignore_eos is True", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_has_status_400_and_one_sentence(server: Served, name: str) -> None:
    given, begin, words = REFUSED[name]
    for stream in (False, True):
        body = asked("none") | {"max_tokens": 4, "stream": stream} | given
        reply = server.send(CHAT, body)
        assert reply.status == 400, reply.body
        assert reply.message.startswith(begin), reply.message
        assert words in reply.message
        assert reply.message.endswith((".", "?"))
        assert "\n" not in reply.message
        assert len(reply.message) < 500


def test_completions_take_no_tools(server: Served) -> None:
    reply = server.send("/v1/completions", {"prompt": "x", "tools": TOOLS})
    assert reply.status == 400
    assert reply.message.startswith("tools: it is for /v1/chat/completions")


def test_without_the_library_calls_are_read_but_not_required(server, monkeypatch):
    monkeypatch.setattr(tool_calls, "find_spec", lambda name: None)
    reply = server.send(CHAT, asked("none", tool_choice="required"))
    assert reply.status == 400
    assert "pip install 'minillm-course[structured]'" in reply.message
    both(server, asked("none", max_tokens=9))
