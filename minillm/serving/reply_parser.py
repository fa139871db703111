"""Divides the text of an assistant into thoughts, content and tool calls, as it is generated.

    <think>Which city?</think>Let me see.<tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

    reasoning_content   "Which city?"
    content             "Let me see."
    tool_calls          weather, with the arguments '{"city": "Oslo"}', a slice of the text

Nothing of a call is parsed and written again, so a stream has the same arguments as a whole reply.
Text is held back only while it could still become a tag or the head of a call. What does not become
a call of a known tool is content, with its tags.
"""

import re
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from minillm.structured.lark import THINK, THINK_END, Thoughts
from minillm.text.chat_tools import CALL, CALL_END

BLANKS = " \t\r\n"
B = f"[{BLANKS}]*"
MAX_HEAD = 4096  # characters of blanks and the head of a call


class ReplyParser:
    """Reads the text of one completion.

    Args:
        thoughts: whether it may begin with a thought.
        names: of the tools that may be called; empty if none may be.
        tagged: calls are in ``<tool_call>`` tags; else a call is the whole text, as plain JSON.
    """

    def __init__(
        self, thoughts: Thoughts = "never", names: Sequence[str] = (), tagged: bool = True
    ):
        self._names, self._tagged = names, tagged
        either = "|".join(map(re.escape, names))
        self._head = re.compile(
            rf'{B}\{{{B}"name"{B}:{B}"({either})"{B}'
            rf'(?:,{B}"(?:arguments|parameters)"{B}:{B}(?=\{{)|(?=\}}))'
        )
        ends = '","arguments":{', '","parameters":{', '"}'
        self._heads = [f'{{"name":"{name}{end}' for name in names for end in ends]  # no blanks
        self._end = "}" + (CALL_END if tagged else "")
        self._closing = re.compile(B + r"\}" + (B + CALL_END if tagged else ""))
        self._step = {"never": self._begin, "may": self._undecided, "open": self._thought}[thoughts]
        self._held = ""  # text that is not passed on yet
        self._drops = thoughts == "open"  # blanks before the next text
        self._tag = ""  # the tag of the call that may begin, with the blanks before it
        self._depth, self._quoted, self._escaped = 0, False, False  # within arguments
        self._delta: dict[str, Any] = {}
        self.num_calls = 0

    def feed(self, text: str, ended: bool = False) -> dict[str, Any]:
        """OpenAI's delta of new text: `reasoning_content`, `content` and `tool_calls`, if any.
        `ended`: it is the last one."""
        self._held += text
        self._delta = {}
        while self._step(ended):
            pass
        return self._delta

    def message(self, text: str) -> dict[str, Any]:
        """OpenAI's message of a whole text."""
        delta = self.feed(text, ended=True)
        for call in delta.get("tool_calls", ()):
            del call["index"]
        content = None if "tool_calls" in delta else ""
        return {"role": "assistant", "content": content, "refusal": None, **delta}

    def finish_reason(self, given: str | None) -> str | None:
        """OpenAI's reason: "tool_calls" if the text has ended behind a complete call."""
        complete = self._step == self._closed or (self.num_calls and self._step != self._arguments)
        return "tool_calls" if given == "stop" and complete else given

    # ---- the parts of a text: each step passes text on, and returns whether another follows -----

    def _undecided(self, ended: bool) -> bool:
        bare = self._held.lstrip(BLANKS)
        if bare.startswith(THINK):
            self._held, self._drops, self._step = bare[len(THINK) :], True, self._thought
        elif THINK.startswith(bare) and not ended:
            return False
        else:
            self._step = self._begin
        return True

    def _thought(self, ended: bool) -> bool:
        if self._pass_until(THINK_END, "reasoning_content", ended) is None:
            return False
        self._drops, self._step = True, self._begin
        return True

    def _begin(self, ended: bool) -> bool:
        self._step = self._text if self._tagged or not self._names else self._call
        return True

    def _text(self, ended: bool) -> bool:
        tag = CALL if self._tagged and self._names else ""
        blanks = self._pass_until(tag, "content", ended)
        if blanks is None:
            return False
        self._tag, self._step = blanks + CALL, self._call
        return True

    def _call(self, ended: bool) -> bool:
        match = self._head.match(self._held)
        if match:
            self._held, self._step = self._held[match.end() :], self._arguments
            call = {"id": f"call_{uuid4().hex[:24]}", "type": "function"}
            self._add_call(**call, function={"name": match[1], "arguments": ""})
            if self._held.startswith("}"):  # without arguments
                self._add_arguments("{}")
                self._step = self._closed
        elif not ended and self._may_become(self._heads, self._held):
            return False
        else:
            self._add("content", self._tag.lstrip(BLANKS) if self._drops else self._tag)
            self._drops, self._tag = self._drops and not self._tag, ""
            self._go_on()
        return True

    def _arguments(self, ended: bool) -> bool:
        for place, char in enumerate(self._held, start=1):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = char == "\\", char != '"'
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self._add_arguments(self._held[:place])
                    self._held, self._step = self._held[place:], self._closed
                    return True
        self._add_arguments(self._held)
        self._held = ""
        return False

    def _closed(self, ended: bool) -> bool:
        match = self._closing.match(self._held)
        if not match and self._may_become([self._end], self._held):
            return False
        self._held = self._held[match.end() if match else 0 :]
        self.num_calls += 1
        self._drops = True
        self._go_on()
        return True

    # ---- helpers ---------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Text follows; plain JSON is the first part of it or none."""
        self._names, self._step = self._names if self._tagged else (), self._text

    def _pass_until(self, tag: str, name: str, ended: bool) -> str | None:
        """Pass text on until a tag, which is removed; returns the blanks before it, which are held
        back, too. None: the tag has not come."""
        text = self._held.lstrip(BLANKS) if self._drops else self._held
        at = text.find(tag) if tag else -1
        if at >= 0:
            passed, self._held = text[:at].rstrip(BLANKS), text[at + len(tag) :]
        else:
            kept = next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
            passed = text if ended or not tag else text[: len(text) - kept].rstrip(BLANKS)
            self._held = text[len(passed) :]
        self._add(name, passed)
        self._drops = self._drops and not passed
        return text[len(passed) : at] if at >= 0 else None

    def _may_become(self, wholes: Sequence[str], text: str) -> bool:
        """Whether a text, without its blanks, begins one of these."""
        bare = re.sub(B, "", text)
        return len(text) < MAX_HEAD and any(whole.startswith(bare) for whole in wholes)

    def _add(self, name: str, text: str) -> None:
        if text:
            self._delta[name] = self._delta.get(name, "") + text

    def _add_call(self, **fields: Any) -> None:
        self._delta.setdefault("tool_calls", []).append({"index": self.num_calls, **fields})

    def _add_arguments(self, text: str) -> None:
        calls = self._delta.get("tool_calls", [])
        if calls and calls[-1]["index"] == self.num_calls:
            calls[-1]["function"]["arguments"] += text
        elif text:
            self._add_call(function={"arguments": text})
