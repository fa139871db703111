"""An event whose constant JSON was written before is the event that would be written as a whole."""

import json
from dataclasses import replace

import pytest

from minillm.api.outputs import CompletionOutput, Logprob
from minillm.serving.event_stream import frame
from minillm.serving.generation import ChoiceEvents
from minillm.serving.replies import Header, Usage, chat_delta, text_choice

TEXTS = ("", " a", '"text":""', 'quote " and \\ and \n', "é, \u2028, 漢字, 🙂", '","content":"')
HEADER = Header(id='cmpl-"text":""\\', created=5, model='m"content":""', chat=False)


def whole(header: Header, new: CompletionOutput, usage: Usage | None) -> bytes:
    """The event, written at once."""
    choice = chat_delta(header, 3, new) if header.chat else text_choice(header, 3, new)
    return frame(header.piece([choice], usage))


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("usage", [None, Usage(prompt_tokens=7)])
def test_events_equal_those_written_at_once(chat, with_ids, usage):
    header = replace(HEADER, chat=chat, with_ids=with_ids)
    events = ChoiceEvents(header, 3, usage)
    for number, text in enumerate(TEXTS):
        if usage is not None:
            usage.completion_tokens = number
        new = CompletionOutput(3, text, [number])
        made = events.event(new)
        assert made == whole(header, new, usage)
        choice = json.loads(made.removeprefix(b"data: "))["choices"][0]
        assert (choice["delta"]["content"] if chat else choice["text"]) == text


@pytest.mark.parametrize("chat", [False, True])
def test_an_event_with_logprobs_or_an_end_has_them(chat: bool) -> None:
    header, usage = replace(HEADER, chat=chat, num_top=1), None
    events = ChoiceEvents(header, 3, usage)
    first = CompletionOutput(3, "ab", [1])
    events.event(first)
    scored = CompletionOutput(3, "c", [2], logprobs=[{2: Logprob(-0.5, 1, "c")}])
    assert events.event(scored) == whole(header, scored, usage)
    assert b"-0.5" in whole(header, scored, usage)
    last = CompletionOutput(3, "", [4], finish_reason="stop", stop_reason="x")
    made = events.event(last)
    assert made == whole(header, last, usage)
    assert json.loads(made[6:])["choices"][0]["finish_reason"] == "stop"


def test_an_event_ends_with_an_empty_line_and_is_one_line() -> None:
    made = ChoiceEvents(HEADER, 0, None).event(CompletionOutput(0, "a\n\nb", [1]))
    assert made.startswith(b"data: {")
    assert made.endswith(b"}\n\n")
    assert made.count(b"\n") == 2
