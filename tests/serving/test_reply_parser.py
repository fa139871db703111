"""Replies divided into thoughts, content and calls: any division of the text gives the same.

The grammar of `structured/lark.py` is the other side: whatever random logits write under it, the
parser reads as the calls that were asked for.
"""

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minillm.api.structured_outputs import StructuredOutputsParams
from minillm.serving.reply_parser import BLANKS, ReplyParser
from minillm.serving.tool_calls import checked_schema
from minillm.structured.lark import Calls, Thoughts, part_of, reply
from minillm.structured.matcher import Guidance
from minillm.structured.vocabulary import Vocabulary

NAMES = ["f", "get.x", "f2"]
HEAD = '{"name": "f", "arguments": '
THOUGHTS: tuple[Thoughts, ...] = ("never", "may", "open")


def read(parts: list[str], *options: Any) -> tuple[dict[str, Any], str | None]:
    """What the deltas of a text in parts add up to, as a client adds them; and the reason."""
    parser, found = ReplyParser(*options), {}
    calls: list[list[str]] = []
    for place, part in enumerate(parts, start=1):
        for name, value in parser.feed(part, ended=place == len(parts)).items():
            if name != "tool_calls":
                assert value
                found[name] = found.get(name, "") + value
                continue
            for call in value:
                if call["index"] == len(calls):  # a new one
                    assert call["id"].startswith("call_")
                    assert call["type"] == "function"
                    calls.append([call["function"]["name"], ""])
                assert call["index"] == len(calls) - 1
                calls[-1][1] += call["function"]["arguments"]
    return found | ({"calls": calls} if calls else {}), parser.finish_reason("stop")


WHOLE = "a <tool_call>\n" + HEAD + '{"a": ["}\\"", {}]}}'
PIECES = [WHOLE, "<think>", "</think>", "<tool_call>", "\n", " ", "</tool_call>", HEAD, "{}", "}",
          '{"name": "get.x"}', '{"a": ["}\\"", {}]}', '"parameters" :', "<tool", "\\", "_call>",
          '{"name":"f2","parameters":', "<", "</th", "\xa0", "]", "é", ",", "a", "{",
          '"']  # fmt: skip


@given(
    st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    st.sampled_from(THOUGHTS),
    st.sampled_from([(), NAMES]),
    st.booleans(),
    st.lists(st.integers(0, 200), max_size=5),
)
@example(WHOLE, "never", NAMES, True, [])
def test_any_division_gives_the_same(text, thoughts, names, tagged, cuts):
    whole = read([text], thoughts, names, tagged)
    assert read([*text, ""], thoughts, names, tagged) == whole
    borders = sorted(cut % (len(text) + 1) for cut in cuts)
    parts = [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True)]
    assert read(parts, thoughts, names, tagged) == whole
    if thoughts == "never" and not names:
        assert whole[0].get("content", "") == text


texts = st.text(st.sampled_from('ab{}<>/"\\\n é'), max_size=12)
values = st.recursive(
    st.none() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@given(
    st.none() | texts,
    texts,
    st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.dictionaries(texts, values, max_size=3),
            st.sampled_from([None, 1]),
        ),
        max_size=3,
    ),
)
@example("a", "b ", [("f", {"a": '"}{\\'}, None), ("f2", {}, 1)])
def test_what_was_written_is_read(thought, content, calls):
    written = [(name, json.dumps(given, indent=indent)) for name, given, indent in calls]
    text = "" if thought is None else f"<think>{thought}</think>"
    text += content
    for name, arguments in written:
        text += f'\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    found, reason = read([text], "may", NAMES, True)
    assert found.get("calls", []) == [list(each) for each in written]
    assert reason == ("tool_calls" if calls else "stop")
    assert found.get("reasoning_content", "") == (thought or "").strip(BLANKS)
    if thought is None and not content.strip(BLANKS) and not calls:
        assert found.get("content", "") == content
    else:
        kept = content.lstrip(BLANKS) if thought is not None else content
        assert found.get("content", "") == (kept.rstrip(BLANKS) if calls else kept)


def call(arguments: str, name: str = "f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


# Text, whether calls are tagged, content, calls, reason.
CASES: dict[str, tuple[str, bool, str | None, list[list[str]], str]] = {
    "vLLM#10395 no arguments": (call("{}"), True, None, [["f", "{}"]], "tool_calls"),
    "vLLM#11392 nested objects": (
        call('{"a": {"b": {}}, "c": "}"}'), True, None, [["f", '{"a": {"b": {}}, "c": "}"}']],
        "tool_calls"),
    "vLLM#19056 repeated arguments": (
        call('{"a": "a"}') + "\n" + call('{"a": "a"}'), True, None,
        [["f", '{"a": "a"}'], ["f", '{"a": "a"}']], "tool_calls"),
    "vLLM#20824 not written again": (
        call('{"a":1e3,  "b" :"\\u00e9", "a":01}'), True, None,
        [["f", '{"a":1e3,  "b" :"\\u00e9", "a":01}']], "tool_calls"),
    "vLLM#21360 quotes": (
        call('{"a": "\\"}\\\\"}'), True, None, [["f", '{"a": "\\"}\\\\"}']], "tool_calls"),
    "no arguments at all": (
        '<tool_call>{"name":"f2"}</tool_call>', True, None, [["f2", "{}"]], "tool_calls"),
    "an unknown tool": (call("{}", "g"), True, call("{}", "g"), [], "stop"),
    "no head": ("x <tool_call>{}</tool_call>", True, "x <tool_call>{}</tool_call>", [], "stop"),
    "cut within arguments": ("x " + call('{"a": 1}')[:46], True, "x", [["f", '{"a": 1']], "stop"),
    "cut by its own tag": (call("{}")[:-12], True, None, [["f", "{}"]], "tool_calls"),
    "no end": (call("{}")[:-13] + "} x", True, "}} x", [["f", "{}"]], "tool_calls"),
    "text behind": (call("{}") + "\n\nDone. ", True, "Done. ", [["f", "{}"]], "tool_calls"),
    "plain": ('\n{"name": "f", "parameters": {"a": 1}}', False, None, [["f", '{"a": 1}']],
              "tool_calls"),
    "plain within text": ("x " + HEAD + "{}}", False, "x " + HEAD + "{}}", [], "stop"),
    "another object": (' {"name": "x"}', False, ' {"name": "x"}', [], "stop"),
    "blanks for ever": ("<tool_call>" + " " * 5000, True, "<tool_call>" + " " * 5000, [], "stop"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    text, tagged, content, calls, reason = CASES[name]
    found, ended = read([text], "never", NAMES, tagged)
    assert (found.get("content"), found.get("calls", []), ended) == (content, calls, reason)
    message = ReplyParser("never", NAMES, tagged).message(text)
    assert message["content"] == (content or (None if calls else ""))


SCHEMAS: dict[str, dict[str, Any]] = {
    "f": {"properties": {"a": {"enum": ["x", "</tool_call>"]}, "b": {"type": "boolean"}},
          "required": ["a"]},
    "get.x": {},
    "f2": {"$defs": {"n": {"type": "array", "items": {"type": "null"}, "maxItems": 2}},
           "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]},
}  # fmt: skip
TAGS = [b"<tool_call>", b"</tool_call>", b"<think>", b"</think>"]
TOKENS = [
    *(bytes([each]) for each in range(256)), *TAGS, b'{"', b'": ', b"\n\n", b"}}\n", b"</", b"",
]  # fmt: skip
CONTENT = {"json": {"const": [7]}}


@pytest.fixture(scope="module")
def guidance() -> Guidance:
    pytest.importorskip("llguidance")
    return Guidance(Vocabulary(TOKENS))


def written(guidance: Guidance, grammar: str, dice: random.Random) -> str:
    """A text that random logits write, which like tags, and JSON more than other text."""
    matcher = guidance.compile(grammar)
    assert not isinstance(matcher, str), matcher
    bits, text = np.zeros(len(TOKENS) // 8 + 1, dtype=np.uint8), b""
    weights = [200 if each in TAGS else 20 if each[:1] in b'{"n}:' else 1 for each in TOKENS]
    for _ in range(600):
        matcher.fill(bits)
        ids = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        if matcher.is_accepting and (not len(ids) or dice.random() < 0.1):
            return text.decode(errors="replace")
        assert len(ids), text
        (token,) = dice.choices(ids, [weights[each] for each in ids])
        assert matcher.accept(int(token))
        text += TOKENS[token]
    return ""  # it does not end


def check_agreement(
    guidance: Guidance, thoughts: Thoughts, must: bool, tagged: bool, content: Any
) -> int:
    """The number of texts with calls."""
    jsonschema = pytest.importorskip("jsonschema")
    tools = {name: (checked_schema(each, "tools"), "tools") for name, each in SCHEMAS.items()}
    part = None if content is None else part_of(StructuredOutputsParams.of(content))
    dice, with_calls = random.Random(3), 0
    for many in (True, False) * 6:
        grammar = reply(thoughts, Calls(tools, must, many, tagged), part)
        text = written(guidance, grammar, dice)
        found, reason = read([text], thoughts, NAMES, tagged)
        calls = found.get("calls", [])
        if text.lstrip(BLANKS).startswith("<think>") and thoughts == "may":
            assert "</think>" in text, text
        if not text or text.lstrip(BLANKS).startswith("<think>") != ("reasoning_content" in found):
            continue  # unfinished, or an empty thought
        with_calls += bool(calls)
        assert reason == ("tool_calls" if calls else "stop"), text
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), tools[name][0])
            assert json.loads(arguments).keys() <= SCHEMAS[name].get("properties", {}).keys()
        assert many or len(calls) <= 1, text
        assert "<tool_call>" not in found.get("content", "") or not tagged, text
        if must:
            assert calls, text
        if must or (content and calls):
            assert "content" not in found, text
        if content and not calls:
            assert json.loads(found["content"]) == [7]
    return with_calls


@pytest.mark.parametrize("content", [None, CONTENT], ids=["free", "json"])
@pytest.mark.parametrize("tagged", [True, False], ids=["tagged", "plain"])
@pytest.mark.parametrize("must", [True, False], ids=["required", "auto"])
@pytest.mark.parametrize("thoughts", THOUGHTS)
def test_the_parser_reads_what_the_grammar_allows(guidance, thoughts, must, tagged, content):
    assert check_agreement(guidance, thoughts, must, tagged, content) or not (must or tagged)


@pytest.mark.parametrize("given", [{"regex": "a+"}, {"choice": ["a"]}, {"json": {"const": 1}},
                                   {"grammar": 'start: "}" | "a" start'}], ids=str)  # fmt: skip
def test_a_constraint_begins_behind_the_thought(guidance: Guidance, given: dict) -> None:
    dice, part = random.Random(0), part_of(StructuredOutputsParams.of(given))
    texts = [written(guidance, reply("open", None, part), dice) for _ in range(8)]
    for text in filter(None, texts):
        _, _, content = text.partition("</think>")
        assert content.strip("\n").strip("a") in ("", "}", "1"), text
    assert any(texts)
