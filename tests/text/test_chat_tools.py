"""Tools, calls and results in prompts: those of transformers, or text for a template without."""

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from minillm.errors import InvalidRequestError
from minillm.text.chat_prompt import chat_prompt
from minillm.text.tokenizer import Tokenizer
from tests.text import build
from tests.text.test_chat_template import CHATML, MISTRAL

NAMES = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
# Written for these tests, in the manner of Qwen 3 and Llama 3.1.
QWEN = """{% if tools %}<|im_start|>system
{{ messages[0].content ~ '\\n' if messages[0].role == 'system' }}{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
<tool_call>?</tool_call><|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}
{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>{{ m.content }}</tool_response>
{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>{% endif %}
{% elif m.role != 'system' or not tools %}<|im_start|>{{ m.role }}
{{ '<think>\\n' ~ m.reasoning_content ~ '\\n</think>' if m.reasoning_content }}{{ m.content or '' }}
{% for call in m.tool_calls or [] %}{% set f = call.function or call %}<tool_call>
{"name": "{{ f.name }}", "arguments": {{ f.arguments if f.arguments is string else f.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""  # noqa: E501
LLAMA = """{% if tools is not none %}{% for t in tools %}{{ t | tojson(indent=1) }}{% endfor %}
{% endif %}{% for m in messages %}{% if 'tool_calls' in m %}
{% if m.tool_calls | length != 1 %}{{ raise_exception('One call at a time.') }}{% endif %}
{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments
 | tojson }}}<|im_end|>{% elif m.role == 'tool' %}<|im_start|>ipython {{ m.content | tojson }}
{% else %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endif %}{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"""

TOOLS = [
    {"type": "function", "function": {
        "name": "weather", "description": "Of a city, é <|im_end|>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip


def called(*arguments: Any, **more: Any) -> dict[str, Any]:
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "weather", "arguments": each}}
        for i, each in enumerate(arguments)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


def result(text: str, i: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{i}", "content": text}


ASKED = {"role": "user", "content": "Is it warm?"}
# What a client sends, with arguments as text, and the same for transformers.
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "asked": [ASKED],
    "system": [{"role": "system", "content": "Be brief."}, ASKED],
    "called": [ASKED, called('{"city": "Troms\u00f8"}'), result("4 <|im_end|>")],
    "thought": [ASKED, called('{"city":"a"}', reasoning_content="Hm."), result("4"), ASKED],
    "empty": [ASKED, called(""), result("")],
}


def for_transformers(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arguments as objects, as its documentation says, and text for an absent content."""
    made = json.loads(json.dumps(messages))
    for message in made:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        if message["content"] is None:
            message["content"] = ""
    return made


def both(template: str) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    backend = build.byte_level()
    backend.normalizer = None
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, **NAMES, chat_template=template)
    return Tokenizer(backend, "it", NAMES, template), theirs


@pytest.mark.parametrize("with_tools", [True, False])
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("template", [QWEN, LLAMA], ids=["qwen", "llama"])
def test_a_template_with_tools_gets_what_transformers_gives(template, name, with_tools):
    ours, theirs = both(template)
    messages, tools = CONVERSATIONS[name], TOOLS if with_tools else None
    prompt = chat_prompt(ours, messages, tools=tools)
    options: Any = {"tools": tools, "tokenize": False, "add_generation_prompt": True}
    assert prompt.text == theirs.apply_chat_template(for_transformers(messages), **options)
    # A special token in a result or a description is text.
    end = ours.encode("<|im_end|>", False)[0]
    written = prompt.text.count("<|im_end|>") - with_tools - (name == "called")
    assert prompt.ids().count(end) == written


def told(template: str, messages: list[dict[str, Any]], tools: Any) -> str:
    return chat_prompt(both(template)[0], messages, tools=tools).text


def test_a_template_without_tools_gets_them_as_text() -> None:
    """In the system's message, or in the user's for a template that takes no other."""
    several = [ASKED, called('{"city": "A"}', "{}", content="So."), result("1"), result("2", 1)]
    text = told(CHATML, [CONVERSATIONS["system"][0], *several], TOOLS)
    begin = "<|im_start|>system\nBe brief.\n\n# Tools\n"
    assert text.startswith(begin)
    assert all(json.dumps(each, ensure_ascii=False) in text for each in TOOLS)
    assert text.endswith(
        "<|im_start|>user\nIs it warm?<|im_end|>\n<|im_start|>assistant\nSo.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "A"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert told(CHATML, [ASKED], TOOLS).startswith("<|im_start|>system\n# Tools\n")
    text = told(MISTRAL, several, TOOLS)
    assert text.startswith("<|endoftext|>[INST] # Tools\n")
    assert "\n\nIs it warm? [/INST]" in text
    assert text.endswith("<tool_response>\n2\n</tool_response> [/INST]")
    # Without tools, calls and results of an earlier turn stay.
    text = told(MISTRAL, several, None)
    assert "# Tools" not in text
    assert '"arguments": {"city": "A"}' in text


@pytest.mark.parametrize(("call", "problem"), [
    (5, "has no function.name"),
    ({"function": {"name": 5}}, "has no function.name"),
    ({"function": {"name": "f", "arguments": "{"}}, r"arguments is '{'; it must be a JSON object"),
    ({"function": {"name": "f", "arguments": "[1]"}}, "it must be a JSON object"),
    ({"function": {"name": "f", "arguments": "[" * 10**5}}, "it must be a JSON object"),
    ({"function": {"name": "f", "arguments": 5}}, "it must be a JSON object"),
    ({"function": object()}, "must be JSON values"),
], ids=range(7))  # fmt: skip
def test_calls_that_are_refused(call: Any, problem: str) -> None:
    messages = [ASKED, {"role": "assistant", "tool_calls": [called("")["tool_calls"][0], call]}]
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        told(QWEN, messages, TOOLS)
    assert str(caught.value).startswith(
        ("messages[1].tool_calls[1]", "messages[1].tool_calls must")
    )
    assert len(str(caught.value)) < 300
