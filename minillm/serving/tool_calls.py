"""Tools and thoughts of a chat request: what is checked, and what the reply may be."""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from minillm.api.sampling_params import shown
from minillm.api.structured_outputs import MAX_BYTES, StructuredOutputsParams
from minillm.errors import InvalidRequestError, UnsupportedFeatureError, did_you_mean
from minillm.serving.protocol import ChatRequest
from minillm.serving.reply_parser import ReplyParser
from minillm.structured import lark
from minillm.structured.lark import THINK, THINK_END, WHITESPACE, Calls, Thoughts
from minillm.text.chat_template import ChatTemplate
from minillm.text.chat_tools import CALL, text_of

MAX_TOOLS = 128  # OpenAI's limit
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
KNOWN = "'none', 'auto', 'required', or {'type': 'function', 'function': {'name': '...'}}"
# Keywords of a schema that need not be extended to say which arguments there are.
CLOSED = frozenset({"type", "properties", "required", "title", "description", "$defs",
                    "definitions", "$schema"})  # fmt: skip


def calls_of(request: ChatRequest, template: ChatTemplate) -> Calls | None:
    """The calls that a reply may have; None if it may have none.

    Raises:
        InvalidRequestError: names the field with its path.
    """
    check_results(request.messages)
    tools = checked_tools(request.tools or [])
    choice = request.tool_choice or "auto"
    function = choice.get("function") if isinstance(choice, dict) else None
    if isinstance(choice, dict) and isinstance(function, dict) and choice.get("type") == "function":
        name = function.get("name")
        if not isinstance(name, str) or name not in tools:
            raise InvalidRequestError(
                f"tool_choice names the function {shown(name)}, which is not among the tools."
                f"{did_you_mean(str(name), tools)}"
            )
        tools = {name: tools[name]}
    elif choice not in ("none", "auto", "required"):
        raise InvalidRequestError(f"tool_choice is {shown(choice)}; it must be {KNOWN}.")
    elif choice == "required" and not tools:
        raise InvalidRequestError("tool_choice is 'required', but there are no tools; give some.")
    if choice == "none" or not tools:
        return None
    # A template without tools is told of tags, as most models with tools know them.
    tagged = CALL in template.source or "tools" not in template.variables
    many = request.parallel_tool_calls is not False and not isinstance(choice, dict)
    return Calls(tools, choice != "auto", many, tagged)


def checked_tools(tools: list[dict[str, Any]]) -> dict[str, tuple[Mapping[str, Any], str]]:
    """By name the schema of a tool's arguments, and its path in the request."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools has {len(tools)} entries; at most {MAX_TOOLS} may be.")
    made: dict[str, tuple[Mapping[str, Any], str]] = {}
    for place, tool in enumerate(tools):
        path, function = f"tools[{place}]", tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise InvalidRequestError(
                f"{path} must be {{'type': 'function', 'function': {{...}}}}, not {shown(tool)}."
            )
        name = function.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise InvalidRequestError(
                f"{path}.function.name is {shown(name)}; it must have 1 to 64 letters, digits, "
                "'_', '-' and '.'."
            )
        if name in made:
            raise InvalidRequestError(
                f"{path}.function.name is {shown(name)}, which another tool has, too; names must "
                "differ."
            )
        path += ".function.parameters"
        made[name] = checked_schema(function.get("parameters"), path), path
    return made


def checked_schema(given: object, path: str) -> dict[str, Any]:
    """The schema of a tool's arguments; without others than those that it names, if it is a plain
    list of them."""
    schema = {} if given is None else given
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise InvalidRequestError(
            f"{path} is {shown(given)}; it must be a JSON schema of type 'object'."
        )
    try:
        StructuredOutputsParams(json=schema)  # its limits
    except InvalidRequestError as error:
        message = str(error).replace("structured_outputs['json']", path)
        raise InvalidRequestError(message) from None
    closed = {"additionalProperties": False} if schema.keys() <= CLOSED else {}
    blanks = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    return {"type": "object", **schema, **closed, **blanks}


def check_results(messages: list[dict[str, Any]]) -> None:
    """Each message of a tool answers a call before it."""
    called: set[str] = set()
    for place, message in enumerate(messages):
        answered, calls = message.get("tool_call_id"), message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            called.add(str(call.get("id")) if isinstance(call, dict) else "")
        known = isinstance(answered, str) and answered in called
        if message.get("role") == "tool" and not known:
            raise InvalidRequestError(
                f"messages[{place}].tool_call_id is {shown(answered)}; it must be the id of an "
                "entry of tool_calls in an earlier message."
            )


def thoughts_of(request: ChatRequest, template: ChatTemplate, prompt: str) -> Thoughts:
    """Whether the reply to a rendered prompt begins with a thought. Only a template that knows the
    tags says that the model does."""
    if THINK_END not in template.source:
        return "never"
    if request.continue_final_message:
        last = text_of(request.messages[-1])
        return "open" if last.rfind(THINK) > last.rfind(THINK_END) else "never"
    end = prompt.rstrip()
    if end.endswith(THINK):
        return "open"
    return "never" if end.endswith(THINK_END) else "may"


def constrained(
    given: Mapping[str, Any], thoughts: Thoughts, calls: Calls | None
) -> Mapping[str, Any] | None:
    """`structured_outputs` of a reply: the `given` ones behind a thought and beside calls."""
    content = given.get("structured_outputs")
    if calls is None and (content is None or thoughts == "never"):
        return content
    if find_spec("llguidance") is None:
        if calls is not None and calls.must:
            raise UnsupportedFeatureError(
                "tool_choice that requires a call needs llguidance 1.9, which is not installed; "
                "run pip install 'minillm-course[structured]', or use 'auto'."
            )
        return content
    part = None if content is None else lark.part_of(StructuredOutputsParams.of(content))
    grammar = lark.reply(thoughts, calls, part)
    if calls is not None and len(grammar) > MAX_BYTES:
        raise InvalidRequestError(
            f"tools need a grammar of {len(grammar):,} bytes; at most {MAX_BYTES:,} are allowed; "
            "give fewer or shorter tools."
        )
    return {"grammar": grammar}


def parser_of(thoughts: Thoughts, calls: Calls | None) -> ReplyParser | None:
    """What divides the reply; None if it is content alone."""
    if thoughts == "never" and calls is None:
        return None
    return ReplyParser(thoughts, list(calls.tools) if calls else (), calls is None or calls.tagged)
