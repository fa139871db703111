"""The events of one choice of a stream."""

from typing import Any

from minillm.api.outputs import CompletionOutput
from minillm.serving.event_stream import frame, to_json
from minillm.serving.replies import Header, Usage, chat_delta, first_delta, text_choice
from minillm.serving.reply_parser import ReplyParser
from minillm.text.detokenizer import IncrementalDetokenizer


class ChoiceEvents:
    """Writes the events of one choice.

    Most events differ only in their text: the JSON before and after it is written once.

    Args:
        header: the fields that are equal in all events.
        index: number of the choice.
        usage: if given, its current values are in each event.
        texts: for the offsets of tokens, in a completion with log-probabilities.
        prompt: token ids of the prompt, for the first event.
        parser: divides a chat's text into thoughts, content and tool calls.
    """

    __slots__ = (
        "_after", "_before", "_header", "_index", "_is_plain", "_parser", "_prompt", "_texts",
        "_usage",
    )  # fmt: skip

    def __init__(
        self,
        header: Header,
        index: int,
        usage: Usage | None,
        texts: IncrementalDetokenizer | None = None,
        prompt: list[int] | None = None,
        parser: ReplyParser | None = None,
    ):
        self._header, self._index, self._usage = header, index, usage
        self._is_plain = usage is None and not header.with_ids and parser is None
        self._texts, self._prompt, self._parser = texts, None, parser
        # A quote inside a string is escaped, so this key with an empty text occurs only once.
        key = b'"content":' if header.chat else b'"text":'
        whole = self._event(CompletionOutput(index, "", []))
        self._before, _, self._after = whole.partition(key + b'""')
        self._before += key
        self._prompt = prompt if header.with_ids else None

    def opening(self) -> bytes:
        """What precedes the first token: the role of a chat's answer."""
        return self._frame(first_delta(self._index)) if self._header.chat else b""

    def event(self, new: CompletionOutput) -> bytes:
        """The event of new tokens, or of the end."""
        if self._is_plain and new.logprobs is None and new.finish_reason is None:
            return b"%s%s%s" % (self._before, to_json(new.text), self._after)
        return self._event(new)

    def _event(self, new: CompletionOutput) -> bytes:
        if self._header.chat:
            return self._frame(chat_delta(self._header, self._index, new, self._parser))
        starts = () if self._texts is None else self._texts.starts(new.token_ids)
        return self._frame(text_choice(self._header, self._index, new, starts))

    def _frame(self, choice: dict[str, Any]) -> bytes:
        made = self._header.piece([choice], self._usage)
        if self._prompt is not None:  # at vLLM's places
            (made if self._header.chat else choice)["prompt_token_ids"] = self._prompt
            self._prompt = None
        return frame(made)
