"""The outputs of a request. Names are vLLM's.

The dataclasses are not frozen: creating a frozen object takes six times as long, and a stream
creates three objects per token. An output belongs to its consumer, who may change it, except for
the shared list `RequestOutput.prompt_token_ids`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from minillm.errors import Owner

T = TypeVar("T")

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Logprob:
    """Logprob (nats) of one token, from the raw logits; rank 1 is the most probable token."""

    logprob: float
    rank: int
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]  # token id -> Logprob: the sampled token first, then the best


class _LazyFields:
    """Base of a dataclass with fields that are computed when first read; pickling reads them."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        names = [item.name for item in fields(self)]  # type: ignore[arg-type]
        return type(self), tuple(getattr(self, name) for name in names)


class _LazyTokens(_LazyFields):
    """Copies the slot `token_ids` of a `CompletionOutput` when it is first read."""

    __slots__ = ("_tokens",)
    _tokens: tuple[list[int], int, int]

    def __getattr__(self, name: str) -> list[int]:
        if name != "token_ids":
            raise AttributeError(f"CompletionOutput has no attribute {name!r}.")
        token_ids, start, end = self._tokens
        self.token_ids = taken = token_ids[start:end]  # type: ignore[misc]
        return taken


class _LazyCounts(_LazyFields):
    """Computes the counts of a `PrefixReport` when the first of them is read."""

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
class CompletionOutput(_LazyTokens):
    """One completion of a prompt so far. With `RequestOutputKind.DELTA`, `text`, `token_ids` and
    `logprobs` hold only what is new since the previous output.

    `finish_reason` is None until the completion ends. `stop_reason` is the stop string or stop
    token id that ended it, None for the end-of-sequence token. If `finish_reason` is "error",
    `error` is the message, and `error_owner` says whose it is: "request", "model" or "server".
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    error_owner: Owner | None = None

    @classmethod
    def of(
        cls, index: int, text: str, token_ids: list[int], start: int, end: int
    ) -> "CompletionOutput":
        """An output with tokens `start` to `end` of a list that is only appended to; they are
        copied when `token_ids` is first read."""
        output = cls.__new__(cls)
        output.index, output.text = index, text
        output._tokens = token_ids, start, end  # type: ignore[misc]
        output.cumulative_logprob = output.logprobs = None
        output.finish_reason = output.stop_reason = output.error = output.error_owner = None
        return output


@dataclass(slots=True)
class PrefixReport(_LazyCounts):
    """Prefix cache hits and misses of a prompt at its first admission, in tokens; the counts add
    up to the prompt's length.

    A server must not return the report to its clients: `salt` reveals prompts that other salts
    have cached.

    Attributes:
        cached: hits.
        partial_block: misses in a last block that is not full.
        last_token: cached tokens that are recomputed, because sampling the first new token needs
            the logits of the last prompt token (a whole block if only whole blocks are shared), or
            because no block was free to copy a partially shared block into.
        evicted: cached under this salt before, and evicted since.
        salt: cached under another salt only.
        new: never seen, or forgotten by the eviction history.
        unread: the engine or the request does not use the prefix cache.
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
        """A report whose other counts are computed by `explain` when one is first read."""
        report = cls.__new__(cls)
        report.cached, report._explain = cached, explain
        return report


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request in seconds, and its counts of cached, recomputed and drafted tokens.

    `ttft` is the time from arrival to the first token, `tpot` the mean time per following token
    (None with fewer than two tokens), `e2e` the time from arrival to the end, or to now.

    `num_cached_tokens` prompt tokens were read from the prefix cache; `prefix` explains the
    misses. `num_recomputed_tokens` were recomputed after preemptions.

    Speculative decoding proposed `num_draft_tokens`, and `num_accepted_tokens` of them are in the
    completions (counted as `Counters` of `scheduling/record.py` says). `acceptance` names the rule
    that accepted them if it changes the distribution of the text: "typical" or "synthetic".
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
    acceptance: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions so far.

    All outputs of a request share one list `prompt_token_ids`, because copying a long prompt would
    take longer than computing a token: do not change it. (The engine has its own copy.)
    `prompt_logprobs[i]` is of prompt token i given the tokens before it; the first is None.
    With `RequestOutputKind.DELTA` it holds only the entries since the previous output.
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
        """Prompt tokens read from the prefix cache (vLLM's attribute)."""
        return self.metrics.num_cached_tokens


def joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two consecutive delta outputs as one."""
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
    """The concatenation of two lists, or `after` if either is None."""
    return after if before is None or after is None else before + after


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """Log-likelihood, perplexity and bits per byte of a text.

    The first token is predicted only if the tokenizer puts a special token before it. Otherwise
    its log-likelihood and its bytes are not counted.
    """

    num_tokens: int  # predicted tokens
    num_bytes: int  # UTF-8 bytes of the predicted tokens
    log_likelihood: float  # sum over the predicted tokens, in nats
    perplexity: float  # exp of the mean negative log-likelihood per token
    bits_per_byte: float

    @classmethod
    def of(cls, logprobs: Sequence[float], num_bytes: int) -> "ScoreOutput":
        """The scores of predicted tokens with these log-probabilities; an overflow is infinity."""
        total, count = sum(logprobs), len(logprobs)
        try:
            perplexity = math.exp(-total / count)
        except OverflowError:
            perplexity = math.inf
        bits_per_byte = -total / math.log(2) / max(num_bytes, 1)
        return cls(count, num_bytes, total, perplexity, bits_per_byte)
