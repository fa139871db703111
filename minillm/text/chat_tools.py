"""Tools in the messages of a conversation: calls that an assistant made, and results of tools.

A chat template that reads `tools` writes tools, calls and results in its model's own format. For
any other template they become text of ordinary messages in the format of Hermes and Qwen, as in
llama.cpp: tools in the system's message, calls in ``<tool_call>`` tags, results in the user's.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from minillm.errors import InvalidRequestError

CALL, CALL_END = "<tool_call>", "</tool_call>"
INSTRUCTION = f"""\
# Tools

These functions may be called. Each line between the tags describes one, with a JSON schema of its
arguments:
<tools>
%s
</tools>

To call a function, write its name and its arguments as a JSON object between tags, like this:
{CALL}
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
{CALL_END}
The next message then has the result between the tags <tool_response> and </tool_response>."""


def plain_calls(index: int, calls: list[Any]) -> list[dict[str, Any]]:
    """The `tool_calls` of messages[index], JSON already, with arguments as objects: OpenAI's
    clients send the text that the model wrote, and templates print JSON of them.

    Raises:
        InvalidRequestError: a call has no name, or its arguments are no JSON object.
    """
    made = []
    for place, call in enumerate(calls):
        path = f"messages[{index}].tool_calls[{place}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(f"{path} has no function.name; give the call as it came.")
        arguments = function.get("arguments") or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise InvalidRequestError(
                f"{path}.function.arguments is {str(function['arguments'])[:60]!r}; it must be a "
                "JSON object, as text or as it is."
            )
        made.append({**call, "function": {**function, "arguments": arguments}})
    return made


def as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> Iterator[list[dict[str, Any]]]:
    """The conversation for a template without tools: with a message of the system, then for one
    that does not take those, too. `messages` are those of `validate_messages`."""
    plain: list[dict[str, Any]] = []
    role = ""  # of the message before
    for message in messages:
        content, before, role = text_of(message), role, message["role"]
        if role == "tool":
            text = f"<tool_response>\n{content}\n</tool_response>"
            if before == "tool":  # one message of the user has the results of all calls
                plain[-1]["content"] += f"\n{text}"
            else:
                plain.append({"role": "user", "content": text})
        elif calls := message.get("tool_calls"):
            functions = [call["function"] for call in calls]
            named = [{"name": f["name"], "arguments": f["arguments"]} for f in functions]
            texts = [f"{CALL}\n{json.dumps(f, ensure_ascii=False)}\n{CALL_END}" for f in named]
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            plain.append({**kept, "content": "\n".join(filter(None, [content, *texts]))})
        else:
            plain.append(dict(message))
    if not tools:
        yield plain
        return
    told = INSTRUCTION % "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    has_system = plain[0]["role"] in ("system", "developer")
    start = "\n\n".join(filter(None, [text_of(plain[0]) if has_system else "", told]))
    others = plain[has_system:]
    yield [{"role": "system", "content": start}, *others]
    first = next((i for i, turn in enumerate(others) if turn["role"] == "user"), None)
    if first is not None:
        others[first] = {**others[first], "content": f"{start}\n\n{text_of(others[first])}"}
        yield others


def text_of(message: Mapping[str, Any]) -> str:
    """The content as text."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)
