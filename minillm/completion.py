"""One growing completion: collects sampled tokens, makes text of them, decides when to end."""

from collections.abc import Sequence

from minillm.logprobs import TokenLogprob
from minillm.outputs import CompletionOutput, FinishReason, Logprob, Logprobs
from minillm.sampling_params import SamplingParams
from minillm.text.detokenizer import IncrementalDetokenizer
from minillm.text.stop import StopStrings
from minillm.text.tokenizer import Tokenizer


class Completion:
    """Sample `index` of a request.

    `eos_token_ids` end it unless `ignore_eos`; the first is *the* end-of-sequence token, whose
    stop reason is None as in vLLM. `max_tokens` is already limited to the room there is.
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        max_tokens: int,
        eos_token_ids: Sequence[int],
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int],
    ):
        self.index, self.params, self.max_tokens = index, params, max_tokens
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self._eos = () if params.ignore_eos else tuple(eos_token_ids)
        self._stop_reason: str | int | None = None
        self._error: str | None = None
        self._cumulative = 0.0
        self._logprobs: list[Logprobs] = []
        self._tokenizer, self._prompt_token_ids = tokenizer, prompt_token_ids
        # Made with the first token: whoever waits needs none, and it may fail.
        self._detokenizer: IncrementalDetokenizer | None = None
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end this completion."""
        return (*self._eos, *self.params.stop_token_ids)

    def append(self, token_id: int, logprobs: dict[int, TokenLogprob] | None) -> None:
        """Take the next token, and finish if it completes a stop or uses the last room."""
        self.token_ids.append(token_id)
        if logprobs is not None:
            self._cumulative += logprobs[token_id].logprob
            self._logprobs.append(with_text(logprobs, self._tokenizer))
        if self._detokenizer is None and self._tokenizer is not None and self.params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                self._tokenizer, self._prompt_token_ids, self.params.skip_special_tokens
            )
        may_stop = len(self.token_ids) >= self.params.min_tokens
        ends = may_stop and token_id in self.stop_ids
        if self._detokenizer is not None and (not ends or self.params.include_stop_str_in_output):
            self.text += self._stops.push(self._detokenizer.push(token_id), may_stop)
        if ends:
            primary = bool(self._eos) and token_id == self._eos[0]
            self.finish("stop", None if primary else token_id)
        elif self._stops.matched is not None:
            self.finish("stop", self._stops.matched)
        elif len(self.token_ids) >= self.max_tokens:
            self.finish("length")

    def fail(self, message: str) -> None:
        """End with an error; what was generated stays."""
        self._error = message
        try:
            self.finish("error")
        except Exception:  # what failed was the text: leave it as it is
            self.finish_reason = "error"

    def output(self) -> CompletionOutput:
        """What there is so far."""
        wanted = self.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=list(self.token_ids),
            cumulative_logprob=self._cumulative if wanted else None,
            logprobs=list(self._logprobs) if wanted else None,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            error=self._error,
        )

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End, and show what was held back; after a stop string that is nothing."""
        if self._detokenizer is not None:
            # The end of the text may itself complete a stop string.
            self.text += self._stops.push(self._detokenizer.flush()) + self._stops.flush()
            if self._stops.matched is not None and reason == "length":
                reason, stop_reason = "stop", self._stops.matched
        self.finish_reason, self._stop_reason = reason, stop_reason


def with_text(logprobs: dict[int, TokenLogprob], tokenizer: Tokenizer | None) -> Logprobs:
    """Add the text of each token, which only the tokenizer knows."""
    return {
        token_id: Logprob(
            entry.logprob,
            entry.rank,
            None if tokenizer is None else tokenizer.token_text(token_id),
        )
        for token_id, entry in logprobs.items()
    }
