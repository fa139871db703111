"""One completion of a request: its sampled tokens, their text, and its stop conditions."""

from collections.abc import Sequence

from minillm.api.outputs import CompletionOutput, FinishReason, Logprob, Logprobs
from minillm.api.sampling_params import RequestOutputKind
from minillm.errors import Failure
from minillm.sampling.logprobs import TokenLogprob
from minillm.scheduling.request import Request
from minillm.text.detokenizer import IncrementalDetokenizer
from minillm.text.stop import StopStrings
from minillm.text.tokenizer import Tokenizer


class Completion:
    """Completion `index` of a request.

    Unless `ignore_eos`, any of `eos_token_ids` ends it. The stop reason is None for the first of
    these, as in vLLM, and the token id for others.
    """

    __slots__ = (
        "_cumulative", "_detokenizer", "_eos", "_error", "_failure", "_has_text", "_logprobs",
        "_num_detokenized", "_num_read", "_stop_reason", "_stops", "_text", "_text_end",
        "_tokenizer", "_unread", "finish_reason", "index", "params", "request", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        request: Request,
        eos_token_ids: Sequence[int],
        tokenizer: Tokenizer | None,
    ):
        self.index, self.request = index, request
        self.params = params = request.params
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._eos = () if params.ignore_eos else tuple(eos_token_ids)
        self._stop_reason: str | int | None = None
        self._error: Failure | None = None
        self._cumulative = 0.0  # log-probability
        self._logprobs: list[Logprobs] = []
        self._tokenizer = tokenizer
        self._stops: StopStrings | None = None
        if params.stop:
            self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        # Created with the first text: a waiting request does not need it, and creating may fail.
        self._detokenizer: IncrementalDetokenizer | None = None
        self._has_text = tokenizer is not None and params.detokenize
        self._num_detokenized = 0
        self._text_end: int | None = None  # detokenize tokens before this index; None: all
        self._failure: Exception | None = None  # the detokenizer's error
        self._text: list[str] = []
        self._unread: list[str] = []  # text that no delta output has returned
        self._num_read = 0  # tokens that delta outputs have returned

    def append(self, token_id: int, logprobs: dict[int, TokenLogprob] | None) -> None:
        """Add a token; finish at a stop token, at a stop string, or at `max_tokens`."""
        self.token_ids.append(token_id)
        if logprobs is not None:
            self._cumulative += logprobs[token_id].logprob
            self._logprobs.append(with_text(logprobs, self._tokenizer))
        if self._failure is not None:
            raise self._failure
        count = len(self.token_ids)
        if token_id in self.request.stop_ids and count >= self.params.min_tokens:
            self._end_at(token_id)
            return
        if self._stops is not None:
            self._detokenize(count >= self.params.min_tokens)
            if self._stops.matched is not None:
                self.finish("stop", self._stops.matched)
                return
        if count >= self.request.max_tokens:
            self.finish("length")

    def _end_at(self, token_id: int) -> None:
        """Finish at a stop token, whose text is included if `include_stop_str_in_output`."""
        if not self.params.include_stop_str_in_output:
            self._text_end = len(self.token_ids) - 1
        primary = bool(self._eos) and token_id == self._eos[0]
        self.finish("stop", None if primary else token_id)

    def fail(self, error: Failure) -> None:
        """End with an error; the tokens and text so far are kept."""
        self._error = error
        try:
            self.finish("error")
        except Exception:  # detokenization failed: keep the text so far
            self.finish_reason = "error"

    def output(self, delta: bool = False) -> CompletionOutput:
        """The output so far, or with `delta` the part that is new since the last call."""
        try:
            self._detokenize()
        except Exception as error:  # `append` raises it again, which ends the completion
            self._failure = error
        start, end = 0, len(self.token_ids)
        if delta:
            text, start = "".join(self._unread), self._num_read
            self._unread, self._num_read = [], end
        else:
            text = "".join(self._text)
            self._text = [text]
        output = CompletionOutput.of(self.index, text, self.token_ids, start, end)
        if self.params.logprobs is not None:
            output.cumulative_logprob = self._cumulative
            output.logprobs = self._logprobs[start:]
        if self.finish_reason is not None:
            output.finish_reason, output.stop_reason = self.finish_reason, self._stop_reason
            if self._error is not None:
                output.error, output.error_owner = self._error
        return output

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End, and add the text held back for a possible stop string or incomplete character."""
        self._detokenize()
        if self._detokenizer is not None:
            self._add_up_to_stop(self._detokenizer.flush())
            if self._stops is not None:
                self._add(self._stops.flush())
                # The text held back may complete a stop string.
                if self._stops.matched is not None and reason == "length":
                    reason, stop_reason = "stop", self._stops.matched
        self.finish_reason, self._stop_reason = reason, stop_reason

    def _detokenize(self, may_stop: bool = True) -> None:
        """Detokenize all new tokens: after each token if there are stop strings, otherwise only
        when an output is read or the completion ends."""
        if self._failure is not None:
            raise self._failure
        if not self._has_text:
            return
        new = self.token_ids[self._num_detokenized : self._text_end]
        if not new:
            return
        if self._detokenizer is None and self._tokenizer is not None:
            skip = self.params.skip_special_tokens
            self._detokenizer = IncrementalDetokenizer(
                self._tokenizer, self.request.prompt_token_ids, skip
            )
        if self._detokenizer is not None:
            text = self._detokenizer.push(new)
            self._num_detokenized += len(new)
            self._add_up_to_stop(text, may_stop)

    def _add_up_to_stop(self, text: str, may_stop: bool = True) -> None:
        if self._stops is not None:
            text = self._stops.push(text, may_stop)
        self._add(text)

    def _add(self, text: str) -> None:
        self._text.append(text)
        if self.params.output_kind is RequestOutputKind.DELTA:
            self._unread.append(text)


def with_text(logprobs: dict[int, TokenLogprob], tokenizer: Tokenizer | None) -> Logprobs:
    """Add the text of each token."""
    return {
        token_id: Logprob(
            entry.logprob,
            entry.rank,
            None if tokenizer is None else tokenizer.token_text(token_id),
        )
        for token_id, entry in logprobs.items()
    }
