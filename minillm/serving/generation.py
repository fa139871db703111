"""Runs the prompts of one HTTP request in the engine, and makes its reply or its events."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from minillm.api.outputs import CompletionOutput, Logprobs, RequestOutput
from minillm.serving.api_errors import ApiError, api_error, overloaded, owned
from minillm.serving.event_stream import DONE, frame, to_json
from minillm.serving.params import Job
from minillm.serving.protocol import StreamOptions
from minillm.serving.replies import (
    Echo,
    Header,
    Usage,
    chat_choice,
    chat_delta,
    count,
    first_delta,
    prompt_logprobs,
    text_choice,
)
from minillm.serving.reply_parser import ReplyParser
from minillm.serving.request_stream import RequestStream
from minillm.text.detokenizer import (
    REPLACEMENT,
    IncrementalDetokenizer,
    common_length,
    prompt_starts,
)
from minillm.text.tokenizer import Tokenizer

FIRST_WAIT = 1.0  # seconds

Events = tuple[asyncio.Future[bytes], AsyncGenerator[bytes, None]]  # the first one, the others


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


class Generation:
    """The prompts of one request, each with a stream of the engine's outputs."""

    def __init__(
        self,
        header: Header,
        job: Job,
        streams: Sequence[RequestStream],
        tokenizer: Tokenizer | None,
    ):
        self.header, self.job, self.streams, self.tokenizer = header, job, streams, tokenizer
        self.usage = Usage()
        self.outputs: list[RequestOutput | None] = [None] * len(streams)  # the latest of each
        self._unsent: dict[int, list[int]] = {}  # choices whose echo is held back: their tokens
        self._events: Events | None = None
        self._begun = False  # the status of a stream is sent, or will be
        self.when_closed: Callable[[], None] = lambda: None
        self.when_tokens: Callable[[int, int], None] = lambda choice, count: None

    async def close(self) -> None:
        """Abort what is unfinished. May be called twice."""
        if self._events is not None:
            first, others = self._events
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await others.aclose()
        await self._end()

    async def _end(self) -> None:
        try:
            for stream in self.streams:
                await stream.aclose()
        finally:
            self.when_closed()

    def headers(self) -> dict[str, str]:
        """Headers of a whole reply."""
        return {
            "x-minillm-cached-tokens": str(self.usage.cached_tokens),
            "x-minillm-queue-time-ms": f"{1000 * self.usage.queue_time:.3f}",
        }

    # ---- the whole reply -----------------------------------------------------------------

    async def reply(self) -> dict[str, Any]:
        """Run to the end, and return the body of the reply."""
        tasks = [asyncio.ensure_future(self._last(i)) for i in range(len(self.streams))]
        try:
            outputs = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.close()
        choices: list[dict[str, Any]] = []
        for output in outputs:
            count(self.usage, output)
            for completion in output.outputs:
                check(completion)
                choices.append(self._choice(len(choices), completion, output))
                self.usage.completion_tokens += len(completion.token_ids)
        if self.job.hides_completion:
            self.usage.completion_tokens = 0
        whole = self.header.whole(choices, self.usage)
        return whole | self._of_prompt(outputs[0]) if self.header.chat else whole

    async def _last(self, index: int) -> RequestOutput:
        async for output in self.streams[index]:
            self.outputs[index] = output
        last = self.outputs[index]
        if last is None:
            raise ApiError(500, "The request ended without an output.", "InternalServerError")
        return last

    def _choice(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> dict[str, Any]:
        if self.header.chat:
            return chat_choice(self.header, index, completion, self.job.parser())
        if self.job.hides_completion:
            kept: list[Logprobs] | None = None if completion.logprobs is None else []
            completion = CompletionOutput(index, "", [], logprobs=kept, finish_reason="length")
        echo, text = None, ""
        if self.job.echo:
            text = self._prompt_text(output, completion)
            echo = Echo(text, output.prompt_token_ids, output.prompt_logprobs)
        starts = []
        if (tokenizer := self.tokenizer) is not None and completion.logprobs is not None:
            if echo is not None:
                full = self._prompt_text(output)
                starts = prompt_starts(tokenizer, output.prompt_token_ids, full)
            own = self._texts(tokenizer, output).starts(completion.token_ids)
            starts += [len(text) + start for start in own]
        return text_choice(self.header, index, completion, starts, echo) | self._of_prompt(output)

    def _of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """What is shown of a prompt: in each choice of a completion, in the body of a chat."""
        shown: dict[str, Any] = {}
        if self.header.with_ids:
            shown["prompt_token_ids"] = output.prompt_token_ids
        if self.job.shows_prompt and output.prompt_logprobs is not None:
            shown["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return shown

    def _texts(self, tokenizer: Tokenizer, output: RequestOutput) -> IncrementalDetokenizer:
        skip = self.job.params.skip_special_tokens
        return IncrementalDetokenizer(tokenizer, output.prompt_token_ids, skip)

    def _prompt_text(
        self, output: RequestOutput, completion: CompletionOutput | None = None
    ) -> str:
        """The prompt of `echo`, without the start of a character that the completion ends."""
        tokenizer, skip = self.tokenizer, self.job.params.skip_special_tokens
        if output.prompt is not None or tokenizer is None:
            return output.prompt or ""
        ids = output.prompt_token_ids
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if completion is not None and completion.text and text.endswith(REPLACEMENT):
            own = [each for each in completion.token_ids if tokenizer.has_text(each, skip)]
            both = text
            for end in range(1, min(len(own), 4) + 1):  # until the character ends
                both = tokenizer.decode(ids + own[:end], skip_special_tokens=False)
                if not both.endswith(REPLACEMENT):
                    break
            text = text[: common_length(text, both)]
        return text

    # ---- the events of a stream ----------------------------------------------------------

    async def start(self, options: StreamOptions | None) -> Events:
        """The events of a stream, to be sent to the client; `close` ends them.

        Waits up to `FIRST_WAIT` for the first one, so that an invalid request gets an error status
        instead of a stream. A later error is an event, too. The last event is ``[DONE]``.
        """
        options = options or StreamOptions()
        running = self.usage if options.continuous_usage_stats else None
        others = self._all_events(running, bool(options.include_usage))
        first = asyncio.ensure_future(anext(others))
        self._events = first, others
        await asyncio.wait({first}, timeout=FIRST_WAIT)
        if first.done():
            first.result()
        self._begun = True
        return self._events

    async def _all_events(
        self, running: Usage | None, with_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        choices: dict[int, ChoiceEvents | None] = {}  # None: it has ended
        try:
            async with aclosing(merged(self.streams)) as outputs:
                async for index, output in outputs:
                    if event := self._new_events(index, output, choices, running):
                        yield event
                    for completion in output.outputs:
                        check(completion)
            if with_usage:
                yield frame(self.header.piece([], self.usage))
        except Exception as error:
            if not self._begun:
                raise
            yield frame(api_error(error).body)
        finally:
            await self._end()
        yield DONE

    def _new_events(
        self,
        index: int,
        output: RequestOutput,
        choices: dict[int, ChoiceEvents | None],
        running: Usage | None,
    ) -> bytes:
        """The events of what is new of one prompt's completions."""
        if self.outputs[index] is None:
            count(self.usage, output)
        self.outputs[index] = output
        made = []
        for new in output.outputs:
            place = index * self.job.params.n + new.index
            # A token whose text is held back has an event, too, as in vLLM: clients measure by
            # events.
            if not new.token_ids and not new.finish_reason:
                continue
            choice = choices.get(place)
            if choice is None and place in choices:
                continue
            self.usage.completion_tokens += len(new.token_ids)
            self.when_tokens(place, len(new.token_ids))
            if new.finish_reason in ("error", "abort"):  # no reasons of OpenAI; `check` raises
                choices[place] = None
                if not new.text:
                    continue
                new = replace(new, finish_reason=None)
            if choice is None:
                texts = None
                scored = self.job.params.logprobs is not None and not self.header.chat
                if scored and self.tokenizer is not None:
                    texts = self._texts(self.tokenizer, output)
                choice = choices[place] = ChoiceEvents(
                    self.header, place, running, texts, output.prompt_token_ids, self.job.parser()
                )
                made.append(choice.opening())
                if self.job.echo:
                    self._unsent[place] = []
            if new.finish_reason is not None:
                choices[place] = None
            if self.job.hides_completion:
                self.usage.completion_tokens = 0
                new = CompletionOutput(new.index, "", [], finish_reason="length")
            if (ids := self._unsent.get(place)) is not None:
                ids += new.token_ids
                text = self._prompt_text(output, replace(new, token_ids=ids))
                if new.text or new.finish_reason or not text.endswith(REPLACEMENT):
                    del self._unsent[place]
                    if text:
                        made.append(choice.event(CompletionOutput(new.index, text, [])))
            made.append(choice.event(new))
        return b"".join(made)


def check(completion: CompletionOutput) -> None:
    """Raise ApiError if a completion ended with an error, or was aborted by the server."""
    if completion.finish_reason == "error":
        raise owned(completion.error or "The request failed.", completion.error_owner or "model")
    if completion.finish_reason == "abort":
        raise overloaded("The server is shutting down and aborted the request.", 1)


async def merged(
    streams: Sequence[RequestStream],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of several streams as they come, each with the index of its stream."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    waiting = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                with suppress(StopAsyncIteration):
                    output = task.result()
                    waiting[asyncio.ensure_future(anext(streams[index]))] = index
                    yield index, output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
