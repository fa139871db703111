"""A request in the engine: its completions, and the times and counts of its metrics."""

from time import perf_counter

from minillm.api.outputs import FinishReason, Logprobs, RequestMetrics, RequestOutput
from minillm.engine.completion import Completion, with_text
from minillm.errors import Failure, in_one_line
from minillm.sampling.logprobs import TokenLogprob
from minillm.scheduling.request import Request, Sequence
from minillm.text.tokenizer import Tokenizer


class LiveRequest:
    """The handle of a request that `Engine.add` returns, with its outputs so far.

    `num_updates` increases with every token and every end of a completion.
    """

    __slots__ = (
        "__weakref__", "_ended", "_first_token", "_last_token", "_num_read", "_prompt_token_ids",
        "_scheduled", "_tokenizer", "acceptance", "completions", "finished", "num_updates",
        "prompt_logprobs", "request", "sequences",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        first: Sequence,
        eos_token_ids: tuple[int, ...],
        tokenizer: Tokenizer | None,
    ):
        self.request = request
        self.sequences = {0: first}  # by completion index; forks are added
        self.completions = [
            Completion(index, request, eos_token_ids, tokenizer)
            for index in range(request.params.n)
        ]
        self.acceptance: str | None = None  # as of `RequestMetrics`
        self.finished = False  # all completions have ended
        self.num_updates = 0
        self.prompt_logprobs: list[Logprobs | None] | None = None
        if request.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
        self._prompt_token_ids: list[int] | None = None  # one list, shared by all outputs
        self._num_read = 0  # entries of prompt_logprobs that delta outputs have returned
        self._tokenizer = tokenizer
        self._scheduled: float | None = None
        self._first_token: float | None = None
        self._last_token: float | None = None
        self._ended: float | None = None  # when the latest completion ended

    @property
    def num_tokens(self) -> int:
        """New tokens of all completions."""
        return sum(len(one.token_ids) for one in self.completions)

    def schedule(self, time: float) -> None:
        """Record when the request was first scheduled."""
        if self._scheduled is None:
            self._scheduled = time

    def append(
        self, index: int, token_id: int, logprobs: dict[int, TokenLogprob] | None, time: float
    ) -> FinishReason | None:
        """Add a token, computed at `time`, to a completion; returns its finish reason, if any."""
        completion = self.completions[index]
        self._last_token = time
        if self._first_token is None:
            self._first_token = time
        self.num_updates += 1
        try:
            completion.append(token_id, logprobs)
        except Exception as error:  # a detokenization error ends this completion only
            completion.fail(no_text("completion", error))
        if completion.finish_reason is not None:
            self._record_end(time)
        return completion.finish_reason

    def _record_end(self, time: float) -> None:
        self._ended = time
        self.finished = all(one.finish_reason is not None for one in self.completions)

    def end(self, reason: FinishReason, time: float, error: Failure | None = None) -> None:
        """End all unfinished completions."""
        for completion in self.completions:
            if completion.finish_reason is None:
                self.end_completion(completion.index, reason, time, error)

    def end_completion(
        self, index: int, reason: FinishReason, time: float, error: Failure | None = None
    ) -> None:
        """End one completion; its tokens are kept."""
        self.num_updates += 1
        completion = self.completions[index]
        if error is not None:
            completion.fail(error)
        else:
            try:
                completion.finish(reason)
            except Exception as failure:
                completion.fail(no_text("completion", failure))
        self._record_end(time)

    def add_prompt_logprobs(
        self, start: int, entries: list[dict[int, TokenLogprob]], time: float
    ) -> bool:
        """Add the logprobs of prompt positions from `start`, except those known already (the
        positions were recomputed). Returns False if this ended the request."""
        known = self.prompt_logprobs or [None]
        try:
            known += [with_text(entry, self._tokenizer) for entry in entries[len(known) - start :]]
        except Exception as error:
            self.end("error", time, no_text("prompt", error))
        return not self.finished

    def output(self, delta: bool = False) -> RequestOutput:
        """The output so far, or with `delta` the part that is new since the last call."""
        request, logprobs = self.request, self.prompt_logprobs
        if self._prompt_token_ids is None:
            self._prompt_token_ids = list(request.prompt_token_ids)
        if logprobs is not None:
            start = self._num_read if delta else 0
            self._num_read, logprobs = len(logprobs), logprobs[start:]
        return RequestOutput(
            request.request_id,
            request.prompt,
            self._prompt_token_ids,
            [completion.output(delta) for completion in self.completions],
            self.finished,
            logprobs,
            self.metrics(),
        )

    def metrics(self) -> RequestMetrics:
        """Times of the request, up to its end or to now, and its counts of tokens."""
        arrival, report = self.request.arrival, self.sequences[0].report
        end = self._ended if self.finished and self._ended is not None else perf_counter()
        first, last = self._first_token, self._last_token
        num_recomputed = num_preemptions = num_drafted = num_accepted = longest = 0
        for sequence in self.sequences.values():
            num_recomputed += sequence.num_recomputed
            num_preemptions += sequence.num_preemptions
            num_drafted += sequence.num_draft_tokens
            num_accepted += sequence.num_accepted_tokens
        for completion in self.completions:
            longest = max(longest, len(completion.token_ids))
        return RequestMetrics(
            (self._scheduled or end) - arrival,
            None if first is None else first - arrival,
            (last - first) / (longest - 1) if first and last and longest > 1 else None,
            end - arrival,
            report.cached if report else 0,
            num_recomputed,
            num_preemptions,
            report,
            num_drafted,
            num_accepted,
            self.acceptance,
        )


def no_text(what: str, error: Exception) -> Failure:
    """The failure of a tokenizer on the model's tokens: its request asked for nothing wrong."""
    return Failure(f"The text of this {what} failed: {in_one_line(error)}", "model")
