"""What a request gives back. Names are vLLM's.

Nothing here is frozen: making a frozen object takes six times as long, and three are made for each
token of a stream. An output belongs to its consumer, and changing it changes nothing elsewhere,
but for `RequestOutput.prompt_token_ids`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

T = TypeVar("T")

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Logprob:
    """Log-probability (nats) of one token under the raw model distribution; rank 1 is the best."""

    logprob: float
    rank: int
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]  # token id -> Logprob: the chosen token first, then the best


class _Later:
    """Around a dataclass some of whose values are made when they are first read."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        names = [item.name for item in fields(self)]  # type: ignore[arg-type]
        return type(self), tuple(getattr(self, name) for name in names)


class _TokensLater(_Later):
    """What `CompletionOutput` does where its slot `token_ids` is still empty."""

    __slots__ = ("_tokens",)
    _tokens: tuple[list[int], int, int]

    def __getattr__(self, name: str) -> list[int]:
        if name != "token_ids":
            raise AttributeError(f"CompletionOutput has no attribute {name!r}.")
        token_ids, start, end = self._tokens
        self.token_ids = taken = token_ids[start:end]  # type: ignore[misc]
        return taken


class _CountsLater(_Later):
    """What `PrefixReport` does where the slot of a count is still empty."""

    __slots__ = ("_explain",)
    _explain: Callable[[], "PrefixReport"]

    def __getattr__(self, name: str) -> int:
        if name not in PrefixReport.__slots__:
            raise AttributeError(f"PrefixReport has no attribute {name!r}.")
        made = self._explain()
        for slot in PrefixReport.__slots__:
            setattr(self, slot, getattr(made, slot))
        count: int = getattr(made, name)
        return count


@dataclass(slots=True)
class CompletionOutput(_TokensLater):
    """One completion of a prompt: all of it so far, or with `RequestOutputKind.DELTA` what is new
    in `text`, `token_ids` and `logprobs` since the output before.

    `finish_reason` is None while it runs. `stop_reason` is the stop string or stop token id that
    ended it, None for the end-of-sequence token. `error` says what went wrong when
    `finish_reason` is "error".
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    @classmethod
    def of(
        cls, index: int, text: str, token_ids: list[int], start: int, end: int
    ) -> "CompletionOutput":
        """Of tokens `start` to `end` of a list that only grows: it is copied when that is read."""
        output = cls.__new__(cls)
        output.index, output.text = index, text
        output._tokens = token_ids, start, end  # type: ignore[misc]
        output.cumulative_logprob = output.logprobs = None
        output.finish_reason = output.stop_reason = output.error = None
        return output


@dataclass(slots=True)
class PrefixReport(_CountsLater):
    """Where the tokens of a prompt came from when it was first let in; adds up to its length.

    `salt` says what a cache salt hides from others. Offline the sender of a request and the reader
    of its report are the same person; a server must not pass the report on to the sender.

    Attributes:
        cached: read from the prefix cache.
        partial_block: not cached because they do not fill a block.
        last_token: cached, but computed again because the first new token is sampled from the
            logits of the last one (a whole block of them where only whole blocks can be shared),
            or because there was no room for a copy of the block that begins with them.
        evicted: once cached under this salt, and evicted since.
        salt: cached under another salt only.
        new: never seen, or too long ago to be remembered.
        unread: the request or the engine reads no prefixes.
    """

    cached: int = 0
    partial_block: int = 0
    last_token: int = 0
    evicted: int = 0
    salt: int = 0
    new: int = 0
    unread: int = 0

    @classmethod
    def when_asked(cls, cached: int, explain: Callable[[], "PrefixReport"]) -> "PrefixReport":
        """A report whose other counts are made by `explain` when the first of them is read."""
        report = cls.__new__(cls)
        report.cached, report._explain = cached, explain
        return report


@dataclass(slots=True)
class RequestMetrics:
    """Where the time of a request went, in seconds, and what the cache did for it.

    `ttft` is the time from arrival to the first token, `tpot` the mean time of the following
    ones (None with fewer than two), `e2e` the time from arrival to the end, or to now.

    `num_cached_tokens` of the prompt were read from the prefix cache, and `prefix` says why not
    the rest. After a preemption `num_recomputed_tokens` were computed again.

    Speculative decoding proposed `num_draft_tokens`, of which `num_accepted_tokens` are tokens of
    the completions; `scheduling/acceptance.py` says what counts.
    """

    queue_time: float = 0.0
    ttft: float | None = None
    tpot: float | None = None
    e2e: float = 0.0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    prefix: PrefixReport | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions, so far.

    `prompt_token_ids` is one list for all outputs of a request, because a copy of a long prompt
    for each token would cost more than the token: do not change it. (The engine has its own.)
    `prompt_logprobs[i]` describes prompt token i given those before it; the first is None.
    With `RequestOutputKind.DELTA` only those since the output before are there.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[Logprobs | None] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens read from the prefix cache, where vLLM has it."""
        return self.metrics.num_cached_tokens


def joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two outputs of what was new, one after the other, as one."""
    outputs = [
        replace(
            after,
            text=before.text + after.text,
            token_ids=before.token_ids + after.token_ids,
            logprobs=added(before.logprobs, after.logprobs),
        )
        for before, after in zip(first.outputs, second.outputs, strict=True)
    ]
    entries = added(first.prompt_logprobs, second.prompt_logprobs)
    return replace(second, outputs=outputs, prompt_logprobs=entries)


def added(before: list[T] | None, after: list[T] | None) -> list[T] | None:
    """One list after the other, where there are any."""
    return after if before is None or after is None else before + after


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """How well the model predicts a text.

    The first token has no context unless the tokenizer puts a special one before it; then it is
    not predicted, and neither its log-likelihood nor its bytes count.
    """

    num_tokens: int  # predicted
    num_bytes: int  # of UTF-8, covered by the predicted tokens
    log_likelihood: float  # sum over the predicted tokens, in nats
    perplexity: float  # exp of the mean negative log-likelihood per token
    bits_per_byte: float
