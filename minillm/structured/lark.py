"""Constraints as parts of grammars in llguidance's Lark dialect, and the grammar of an assistant's
reply with a thought and tool calls.

    <think>...</think>   a thought, free text
    <tool_call>          free text until here; what follows is a call of a given tool
    {"name": "weather", "arguments": %json {schema of its arguments}}
    </tool_call>

A lazy rule ends as early as it can, so text with a tag in it is nothing but text before a call.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from minillm.api.structured_outputs import StructuredOutputsParams
from minillm.text.chat_tools import CALL, CALL_END

WHITESPACE = r"[ \n]?"  # between tokens of JSON: not for ever
SPECIAL = re.compile(r"([\\.+*?()|\[\]{}^$/&~#-])")  # characters of a pattern with a meaning
NAMED = re.compile(r"%json (\{.*\}) // (.+)$", re.MULTILINE)  # a schema in a grammar, and its name
THINK, THINK_END = "<think>", "</think>"
Thoughts = Literal["never", "may", "open"]
"""Whether a reply begins with a thought: it may do so, or the prompt has opened one."""


def pattern_of(given: StructuredOutputsParams) -> str:
    """The pattern of a regex or a choice."""
    return given.regex or "|".join(SPECIAL.sub(r"\\\1", text) for text in given.choice or ())


def schema_of(given: StructuredOutputsParams) -> dict[str, Any]:
    """The schema of a constraint by json or json_object, as `json_part` takes it."""
    schema = json.loads(str(given.json)) if given.json else {"type": "object"}
    blanks = {"whitespace_pattern": given.whitespace_pattern or WHITESPACE}
    return {**schema, "x-guidance": blanks}


def json_part(schema: Mapping[str, Any], name: str) -> str:
    """JSON that fits a schema, until the end of the line; errors call it `name`."""
    return f"%json {json.dumps(schema)} // {name}\n"


def part_of(given: StructuredOutputsParams) -> str:
    """A constraint as a part of a grammar, until the end of the line. Needs llguidance."""
    if given.kind in ("regex", "choice"):
        from llguidance import regex_to_lark

        return f"/{regex_to_lark(pattern_of(given), 'dws')}/\n"
    if given.kind == "grammar":
        return f"%lark {{\n{given.grammar}\n}}\n"
    return json_part(schema_of(given), f"structured_outputs[{given.kind!r}]")


@dataclass(frozen=True)
class Calls:
    """The tool calls that a reply may have.

    Attributes:
        tools: by name the schema of the arguments, and what errors call it.
        must: the reply is one call, or several.
        many: it may have more than one; plain JSON never has.
        tagged: calls are in ``<tool_call>`` tags.
    """

    tools: Mapping[str, tuple[Mapping[str, Any], str]]
    must: bool
    many: bool
    tagged: bool


def reply(thoughts: Thoughts, calls: Calls | None, content: str | None) -> str:
    """The grammar of a reply.

    Args:
        calls: None: it has no calls.
        content: what it is if it has no calls, as in `part_of`; None: free text, also beside calls.
    """
    rules = ["TEXT: /(.|\\n)*/", "UNTHOUGHT: TEXT & ~/[ \\t\\r\\n]*<think>(.|\\n)*/"]
    is_free = content is None and calls is not None and not calls.must
    if is_free:  # text can begin with line breaks itself
        start = {"never": "rest", "may": "thought rest | first", "open": "thought rest"}
    else:
        start = {"never": "rest", "may": "(thought GAP?)? rest", "open": "thought GAP? rest"}
        rules += ["GAP: /\\n\\n?/"]
    opening = "" if thoughts == "open" else '/\\n{0,2}/ "<think>" '
    rules += [f"start: {start[thoughts]}", f'thought[lazy]: {opening}TEXT "{THINK_END}"']
    if calls is None:
        rules += ["rest: content"]
    else:
        rules += rules_of(calls, is_free, content is not None)
    return "\n".join([*rules, f"content: {content}" if content is not None else ""])


def rules_of(calls: Calls, is_free: bool, has_content: bool) -> list[str]:
    """The rules of a reply behind its thought, and of calls."""
    again = " rest" if calls.many else ""
    if is_free and calls.tagged:
        rules = [f"rest: head inner{again} | TEXT", f"first: head_first inner{again} | UNTHOUGHT"]
        rules += [f'head[lazy]: TEXT "{CALL}"', f'head_first[lazy]: UNTHOUGHT "{CALL}"']
    elif is_free:
        rules = ["rest: call | TEXT", "first: call | UNTHOUGHT"]
    else:
        more = ' ("\\n" call)*' if calls.many and calls.tagged else ""
        rules = [f"rest: call{more}{' | content' if has_content and not calls.must else ''}"]
    if calls.tagged:
        rules += [f'call: "{CALL}" inner', f'inner: "\\n" body "\\n{CALL_END}"']
    else:
        rules += ["call: body"]
    blanks = "" if calls.tagged else "\\n{0,2}"
    rules += ["body: " + " | ".join(f"body_{i}" for i in range(len(calls.tools)))]
    for i, (name, (schema, where)) in enumerate(calls.tools.items()):
        begin = f'\\{{"name": "{re.escape(name)}", "(arguments|parameters)": '
        rules += [f'body_{i}: head_{i} arguments_{i} "}}"', f"head_{i}[lazy]: /{blanks}{begin}/"]
        rules += [f"arguments_{i}: {json_part(schema, where)}"]
    return rules
