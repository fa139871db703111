"""The events of one choice of a stream."""

from minillm.api.outputs import CompletionOutput
from minillm.serving.event_stream import frame, to_json
from minillm.serving.replies import Header, Usage, chat_delta, first_delta, text_choice


class ChoiceEvents:
    """Writes the events of one choice.

    Most events differ only in their text: the JSON before and after it is written once.

    Args:
        header: the fields that are equal in all events.
        index: number of the choice.
        usage: if given, its current values are in each event.
    """

    __slots__ = ("_after", "_before", "_header", "_index", "_is_plain", "_offset", "_usage")

    def __init__(self, header: Header, index: int, usage: Usage | None):
        self._header, self._index, self._usage = header, index, usage
        self._is_plain = usage is None and not header.with_ids
        self._offset = 0  # characters sent
        # A quote inside a string is escaped, so this key with an empty text occurs only once.
        key = b'"content":' if header.chat else b'"text":'
        whole = self._event(CompletionOutput(index, "", []))
        self._before, _, self._after = whole.partition(key + b'""')
        self._before += key

    def opening(self, echo: str | None) -> bytes:
        """What precedes the first token: the role of a chat's answer, or the prompt in `echo`."""
        if self._header.chat:
            return frame(self._header.piece([first_delta(self._index)], self._usage))
        return b"" if echo is None else self.event(CompletionOutput(self._index, echo, []))

    def event(self, new: CompletionOutput) -> bytes:
        """The event of new tokens, or of the end."""
        if self._is_plain and new.logprobs is None and new.finish_reason is None:
            made = b"%s%s%s" % (self._before, to_json(new.text), self._after)
        else:
            made = self._event(new)
        self._offset += len(new.text)
        return made

    def _event(self, new: CompletionOutput) -> bytes:
        header = self._header
        if header.chat:
            choice = chat_delta(header, self._index, new)
        else:
            choice = text_choice(header, self._index, new, self._offset)
        return frame(header.piece([choice], self._usage))
