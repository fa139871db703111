"""The JSON of replies, for completions and chat completions, whole and in pieces."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minillm.api.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput
from minillm.serving.reply_parser import ReplyParser
from minillm.serving.settings import VERSION
from minillm.text.detokenizer import bytes_of
from minillm.text.tokenizer import Tokenizer

FINGERPRINT = f"minillm-{VERSION}"
LEAST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass
class Usage:
    """Tokens of a request over all its prompts; a prompt counts once, however large n is."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    queue_time: float = 0.0  # seconds until the first step, of the prompt that waited longest

    def body(self) -> dict[str, Any]:
        """OpenAI's object `usage`, with the time in the queue."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "queue_time_ms": round(1000 * self.queue_time, 3),
        }


@dataclass(frozen=True)
class Header:
    """The fields that are equal in all pieces of a reply."""

    id: str
    created: int
    model: str
    chat: bool
    as_ids: bool = False  # tokens of logprobs as "token_id:5"
    with_ids: bool = False  # return_token_ids
    num_top: int = 0  # chat: top_logprobs
    tokenizer: Tokenizer | None = None
    acceptance: str | None = None  # the rule, if it changes the distribution of the text

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """A reply that is not streamed."""
        return self._with("chat.completion" if self.chat else "text_completion", choices) | {
            "usage": usage.body()
        }

    def piece(self, choices: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        """One frame of a stream."""
        made = self._with("chat.completion.chunk" if self.chat else "text_completion", choices)
        return made if usage is None else made | {"usage": usage.body()}

    def _with(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT + f"-{self.acceptance}" * bool(self.acceptance),
            "choices": choices,
        }


def text_choice(
    header: Header,
    index: int,
    output: CompletionOutput,
    starts: Sequence[int] = (),
    extra: "Echo | None" = None,
) -> dict[str, Any]:
    """One choice of a completion; `extra` is the prompt that is repeated before it, and `starts`
    are the offsets of the tokens in the text, if there are log-probabilities."""
    entries, ids, text = output.logprobs, output.token_ids, output.text
    logprobs = None
    if extra is not None:
        text = extra.text + text
        ids = [*extra.token_ids, *ids]
        if entries is not None and extra.logprobs is not None:
            entries = [*extra.logprobs, *entries]  # type: ignore[list-item]
    if entries is not None:
        logprobs = text_logprobs(header, ids, entries, starts)
    return choice(header, index, output, output.finish_reason, text=text, logprobs=logprobs)


def chat_choice(
    header: Header, index: int, output: CompletionOutput, parser: ReplyParser | None = None
) -> dict[str, Any]:
    """One choice of a chat completion; `parser` divides the text, if it is not content alone."""
    message = {"role": "assistant", "content": output.text, "refusal": None}
    if parser is not None:
        message = parser.message(output.text)
    return parsed(header, index, output, parser, message=message)


def chat_delta(
    header: Header, index: int, output: CompletionOutput, parser: ReplyParser | None = None
) -> dict[str, Any]:
    """One choice of a frame of a chat stream."""
    delta = {"content": output.text} if output.text or not output.finish_reason else {}
    if parser is not None:
        delta = parser.feed(output.text, ended=output.finish_reason is not None)
    return parsed(header, index, output, parser, delta=delta)


def parsed(
    header: Header, index: int, output: CompletionOutput, parser: ReplyParser | None, **own: Any
) -> dict[str, Any]:
    """A choice of a chat whose text was parsed."""
    reason = output.finish_reason if parser is None else parser.finish_reason(output.finish_reason)
    return choice(header, index, output, reason, **own, logprobs=chat_logprobs(output, header))


def choice(
    header: Header, index: int, output: CompletionOutput, finish_reason: str | None, **own: Any
) -> dict[str, Any]:
    """A choice with its `own` fields, at OpenAI's place."""
    made = {"index": index, **own, "finish_reason": finish_reason}
    made["stop_reason"] = output.stop_reason
    return made | ({"token_ids": output.token_ids} if header.with_ids else {})


def first_delta(index: int) -> dict[str, Any]:
    """The choice of a chat stream's first frame, sent when the first token exists."""
    delta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


# ---- log-probabilities -------------------------------------------------------------------------


@dataclass(frozen=True)
class Echo:
    """The prompt, repeated at the start of the text."""

    text: str
    token_ids: Sequence[int] = field(default_factory=list)
    logprobs: Sequence[Logprobs | None] | None = None


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LEAST_LOGPROB) if not math.isnan(logprob) else LEAST_LOGPROB


def named(header: Header, token_id: int, entry: Logprob | None = None) -> tuple[str, bytes]:
    """A token's name, which is its text or its id, and its bytes. Bytes that are not text are named
    as OpenAI does, such as ``bytes:\\xf0\\x9f``, so that the parts of characters differ."""
    tokenizer = header.tokenizer
    if tokenizer is None:
        return f"token_id:{token_id}", b""
    text = tokenizer.decode([token_id], False) if entry is None else entry.decoded_token or ""
    own = bytes_of(tokenizer, token_id, text)
    if header.as_ids:
        text = f"token_id:{token_id}"
    elif own != text.encode():
        text = f"bytes:{repr(own)[2:-1]}"
    return text, own


def text_logprobs(
    header: Header,
    token_ids: Sequence[int],
    entries: Sequence[Logprobs | None],
    starts: Sequence[int],
) -> dict[str, Any]:
    """The object `logprobs` of a completion. The first token of a prompt has null.

    Two ids may have the same name: the larger log-probability is kept, so that a greedy token is
    the maximum of its entry.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    best: list[dict[str, float] | None] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        if entry is None:
            tokens.append(named(header, token_id)[0])
            values.append(None)
            best.append(None)
            continue
        top: dict[str, float] = {}
        for token, logprob in entry.items():
            name, _ = named(header, token, logprob)
            top[name] = max(top.get(name, LEAST_LOGPROB), finite(logprob.logprob))
        tokens.append(named(header, token_id, entry[token_id])[0])
        values.append(finite(entry[token_id].logprob))
        best.append(top)
    return {
        "text_offset": list(starts) or [0] * len(tokens),
        "token_logprobs": values,
        "tokens": tokens,
        "top_logprobs": best,
    }


def chat_logprobs(output: CompletionOutput, header: Header) -> dict[str, Any] | None:
    """The object `logprobs` of a chat completion."""
    if output.logprobs is None:
        return None
    content = []
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        # The engine lists the sampled token first, also if it is not one of the best.
        best = sorted(entry.items(), key=lambda item: item[1].rank)[: header.num_top]
        top = [described(header, token, logprob) for token, logprob in best]
        sampled = described(header, token_id, entry[token_id])
        content.append(sampled | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def described(header: Header, token_id: int, entry: Logprob) -> dict[str, Any]:
    """One token of a chat completion's log-probabilities."""
    name, own = named(header, token_id, entry)
    return {"token": name, "logprob": finite(entry.logprob), "bytes": list(own)}


def prompt_logprobs(entries: Iterable[Logprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: an object by token id for each token, null for the first."""
    return [None if entry is None else by_id(entry) for entry in entries]


def by_id(entry: Mapping[int, Logprob]) -> dict[str, Any]:
    """The log-probabilities at one position, by token id."""
    return {
        str(token_id): {
            "logprob": finite(logprob.logprob),
            "rank": logprob.rank,
            "decoded_token": logprob.decoded_token,
        }
        for token_id, logprob in entry.items()
    }


def count(usage: Usage, output: RequestOutput) -> None:
    """Add a prompt's tokens at its first output."""
    usage.prompt_tokens += len(output.prompt_token_ids)
    usage.cached_tokens += output.metrics.num_cached_tokens
    usage.queue_time = max(usage.queue_time, output.metrics.queue_time)
