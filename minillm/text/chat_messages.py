"""The messages of a conversation, checked: what a chat template gets is plain JSON.

A content is text or a list of text parts. `filled`, `joined` and `parted` change its kind.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from minillm.errors import InvalidRequestError
from minillm.text.chat_tools import plain_calls

Message = Mapping[str, Any]
"""One turn: ``{"role": str, "content": str | [{"type": "text", "text": str}, ...]}``; that of an
assistant may have ``tool_calls``, and one of the role "tool" has a ``tool_call_id``."""

REASONING: Final = ("reasoning_content", "thinking", "reasoning")  # names of the same field


def validate_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as plain dictionaries of strings and, for contents in parts, lists of parts.

    A field that is null or empty counts as absent, as in transformers and vLLM; so does the content
    of an assistant that is null. The names of the reasoning field are those of transformers.

    Raises:
        InvalidRequestError: messages is not a list or empty, or a field of a message is not text.
    """
    if not isinstance(messages, list | tuple):
        raise InvalidRequestError(
            "messages must be a list of {'role': ..., 'content': ...} dictionaries, "
            f"not {type(messages).__name__}."
        )
    if not messages:
        raise InvalidRequestError("messages is empty; a chat needs at least one message.")
    return [_plain_message(index, message) for index, message in enumerate(messages)]


def _plain_message(index: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"messages[{index}] must be a dictionary with 'role' and 'content', "
            f"not {type(message).__name__}."
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(
            f"messages[{index}]['role'] must be a string such as 'user', not {role!r:.80}."
        )
    plain: dict[str, Any] = {}
    if message.get("content") is None and role != "assistant":
        _plain_content(index, None)  # raises the error
    for key, value in message.items():
        if key == "content" and value is not None:
            plain[key] = _plain_content(index, value)
            continue
        if value is None or (isinstance(value, list | tuple | dict) and not value):
            continue  # clients send "tool_calls": null or []; templates test for absence
        if key == "tool_calls" and isinstance(value, list | tuple):
            plain[key] = plain_calls(index, plain_json(value, f"messages[{index}].tool_calls"))
            continue
        if not isinstance(key, str) or not isinstance(value, str) or key == "tool_calls":
            raise InvalidRequestError(
                f"messages[{index}] has {key!r:.80} of type {type(value).__name__}; besides 'role' "
                "and 'content' only string fields and tool_calls are supported."
            )
        plain[key] = str.__str__(value)  # a subclass could carry methods into the sandbox
    thought = next((plain[name] for name in REASONING if name in plain), None)
    if thought is None:
        return plain
    return {"thinking": thought, **plain, "reasoning_content": thought}


def _plain_content(index: int, content: object) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return str.__str__(content)
    if not isinstance(content, list | tuple) or not content:
        raise InvalidRequestError(
            f"messages[{index}]['content'] must be a string or a non-empty list of text parts, "
            f"not {'an empty list' if content in ([], ()) else type(content).__name__}."
        )
    return [_plain_part(index, part) for part in content]


def _plain_part(index: int, part: object) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind != "text" or not isinstance(text, str):
        raise InvalidRequestError(
            f"messages[{index}]['content'] has a part of type {kind!r:.80}; only "
            "{'type': 'text', 'text': '...'} parts are supported."
        )
    made: dict[str, Any] = plain_json(dict(part), f"A part of messages[{index}]['content']")
    return made


def plain_json(value: Any, name: str) -> Any:
    """A copy of JSON's types, which carry no methods of their own into the sandbox.

    Raises:
        InvalidRequestError: the value has another type, or contains itself.
    """
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} must be JSON values: {error}.") from None


def filled(message: dict[str, Any]) -> dict[str, Any]:
    """The message with text for an absent content."""
    return {"content": "", **message}


def joined(message: dict[str, Any]) -> dict[str, Any]:
    """The message with text in place of parts."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    return message | {"content": "\n".join(part["text"] for part in parts)}


def parted(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a part in place of text."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return message | {"content": [{"type": "text", "text": content}]}


def other_kind(message: dict[str, Any]) -> dict[str, Any]:
    """The message with parts in place of text, or text in place of parts."""
    return (joined if isinstance(message.get("content"), list) else parted)(message)
