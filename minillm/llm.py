"""`LLM`: the offline interface, with vLLM's names."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

from tqdm import tqdm

from minillm.api.arguments import EngineArgs, without_meaningless
from minillm.api.outputs import RequestOutput, ScoreOutput
from minillm.api.prompts import (
    Prompt,
    list_params,
    list_priorities,
    list_prompts,
    refuse_left_out,
    split_prompt,
)
from minillm.api.sampling_params import RequestOutputKind, SamplingParams
from minillm.engine.live_request import LiveRequest
from minillm.engine.loop import Engine
from minillm.errors import InvalidRequestError, UnknownArgumentError
from minillm.plan.cost import MemoryPlan
from minillm.scheduling.data_parallel import reset_prefix_cache
from minillm.scheduling.request import Request
from minillm.text.chat_prompt import chat_prompt
from minillm.text.tokenizer import Tokenizer
from minillm.trace.recorder import Trace

Message = Mapping[str, Any]


class LLM:
    """A model for offline inference: ``LLM(model="tiny").generate(["def fib(n):"])``.

    `model` is the name of an embedded model, a Hugging Face folder, a hub id, or with
    ``load_format="dummy"`` a ``preset:NAME``. All other arguments are those of `EngineArgs`.
    An `LLM` is not thread-safe. Use it in a ``with`` block, or call `close`, to free the memory.
    """

    def __init__(self, model: str | Path | None = None, **arguments: Any):
        # The default of `model` makes a misspelt `modl=` an UnknownArgumentError.
        try:
            args = EngineArgs(model, **without_meaningless(arguments))  # type: ignore[arg-type]
        except UnknownArgumentError as error:
            raise UnknownArgumentError(str(error).replace("EngineArgs", "LLM", 1)) from None
        self.engine = Engine(args)
        self._num_requests = 0

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None if its folder has none."""
        return self.engine.tokenizer

    @property
    def trace(self) -> Trace:
        """Records of the last steps: what was scheduled, what waited and why, and the blocks."""
        return self.engine.trace

    def get_tokenizer(self) -> Tokenizer | None:
        """vLLM's name for `tokenizer`."""
        return self.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Generate completions of all prompts in one batch; outputs are in the prompts' order.

        A prompt is a string, a list of token ids, ``{"prompt": ...}`` or
        ``{"prompt_token_ids": ...}``. A dict may have a ``"cache_salt"``: prompts with different
        salts never share cached prefixes. Give one `SamplingParams` for all prompts or one for
        each. `priority` has one number per prompt, the lowest scheduled first, and needs
        scheduling_policy="priority". All requests are checked before the first one runs:
        InvalidRequestError names the invalid one. A later error in one request ends only that
        request, with ``finish_reason="error"``. `others` are vLLM's arguments, which must be None.
        """
        refuse_left_out("generate", others)
        listed = list_prompts(prompts)
        priorities = list_priorities(priority, len(listed), self.engine.args.scheduling_policy)
        requests = [
            self._request(prompt, params, f"prompt {index}: " if len(listed) > 1 else "", urgency)
            for index, (prompt, params, urgency) in enumerate(
                zip(listed, self._params(sampling_params, len(listed)), priorities, strict=True)
            )
        ]
        return [live.output() for live in self._run(requests, "Generating", "req", use_tqdm)]

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of a request without any: `SamplingParams()` updated from the
        model's generation_config.json."""
        return SamplingParams(**self.engine.source.sampling_defaults)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Generate from one prompt and yield the output after every step: all of it so far, or with
        `output_kind` ``DELTA`` the new part. ``FINAL_ONLY`` yields only the last output."""
        listed = list_prompts(prompt)
        if len(listed) != 1:
            raise InvalidRequestError(
                f"stream takes one prompt, not {len(listed)}; use generate for several."
            )
        (params,) = self._params(sampling_params, 1)
        return self._stream(self._request(listed[0], params))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Generate the answer to one conversation or several, with the model's chat template.
        `options` are those of `minillm.text.chat_prompt.chat_prompt`."""
        if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
            raise InvalidRequestError(
                f"messages is a {type(messages).__name__}; it must be a list of messages such as "
                "{'role': 'user', 'content': '...'}, or a list of such lists."
            )
        several = bool(messages) and not isinstance(messages[0], Mapping)
        chats: Any = messages if several else [messages]
        prompts = [self.chat_prompt(chat, add_generation_prompt, **options) for chat in chats]
        return self.generate(prompts, sampling_params, use_tqdm)

    def chat_prompt(
        self, messages: Sequence[Message], add_generation_prompt: bool | None = None, **options: Any
    ) -> dict[str, Any]:
        """The prompt that `chat` uses, as text and token ids."""
        if self.tokenizer is None:
            raise InvalidRequestError(
                f"{self.engine.source.name} has no tokenizer and no chat template; "
                "use generate with token ids."
            )
        prompt = chat_prompt(self.tokenizer, messages, add_generation_prompt, **options)
        return {"prompt": prompt.text, "prompt_token_ids": prompt.ids()}

    def score(self, texts: str | Sequence[str]) -> list[ScoreOutput]:
        """Log-likelihood, perplexity and bits per byte of each text, without generating."""
        listed = [texts] if isinstance(texts, str) else texts
        if not isinstance(listed, Sequence) or not all(isinstance(text, str) for text in listed):
            raise InvalidRequestError("score takes a text or a list of texts.")
        engine = self.engine
        requests = [
            engine.make_scoring_request(self._next_id(), self._scored_ids(text)) for text in listed
        ]
        lives = self._run(requests, "Scoring", "text", use_tqdm=True)
        return [self._score(text, live) for text, live in zip(listed, lives, strict=True)]

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Returns True, as in vLLM."""
        self.engine.check_open()
        reset_prefix_cache(self.engine.scheduler)
        return True

    def plan(self) -> MemoryPlan:
        """The engine's memory plan: bytes of weights, activations and KV cache."""
        return self.engine.memory

    def close(self) -> None:
        """Free the memory. The object cannot be used afterwards."""
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        return list_params(self.get_default_sampling_params() if params is None else params, count)

    def _request(
        self, prompt: Prompt, params: SamplingParams, where: str = "", priority: int = 0
    ) -> Request:
        self.engine.check_open()
        try:
            text, ids, salt = split_prompt(prompt)
            return self.engine.make_request(self._next_id(), text, ids, params, priority, salt)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{where}{error}") from error.__cause__

    def _next_id(self) -> str:
        self._num_requests += 1
        return str(self._num_requests - 1)

    def _run(
        self, requests: Sequence[Request], what: str, unit: str, use_tqdm: bool
    ) -> list[LiveRequest]:
        """Step the engine until these requests have finished."""
        engine = self.engine
        engine.check_open()
        lives: list[LiveRequest] = []
        try:
            for request in requests:
                lives.append(engine.add(request))
            # No bar in the first second, then one update per second, even if no request finishes.
            with tqdm(total=len(lives), desc=what, unit=unit, disable=not use_tqdm, delay=1,
                      mininterval=1, miniters=0, dynamic_ncols=True) as bar:  # fmt: skip
                self._advance({live.request.request_id for live in lives}, bar)
        finally:
            for live in lives:
                if not live.finished:
                    engine.abort(live.request.request_id)
        return lives

    def _advance(self, left: set[str], bar: tqdm) -> None:
        """Step until the requests in `left` have finished, updating the progress bar."""
        start, counts = perf_counter(), dict.fromkeys(left, 0)
        num_tokens = 0
        while left and self.engine.has_work:
            stepped = [x for x in self.engine.step() if x.request.request_id in left]
            for live in stepped:
                count = live.num_tokens
                num_tokens += count - counts[live.request.request_id]
                counts[live.request.request_id] = count
            done = [live for live in stepped if live.finished]
            left.difference_update(live.request.request_id for live in done)
            if num_tokens:
                rate = num_tokens / (perf_counter() - start)
                bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
            bar.update(len(done))

    def _stream(self, request: Request) -> Iterator[RequestOutput]:
        kind, live, seen = request.params.output_kind, self.engine.add(request), 0
        try:
            while not live.finished or live.num_updates > seen:
                final_only = kind is RequestOutputKind.FINAL_ONLY and not live.finished
                if live.num_updates == seen or final_only:
                    self.engine.step()
                else:
                    seen = live.num_updates
                    yield live.output(kind is RequestOutputKind.DELTA)
        finally:
            self.engine.abort(request.request_id)  # if the stream was closed before its end

    def _scored_ids(self, text: str) -> list[int]:
        ids = self.engine.encode(text)
        if len(ids) < 2:
            raise InvalidRequestError(
                f"The text {text[:40]!r} has {len(ids)} tokens; scoring needs at least 2, "
                "because the first has no context."
            )
        return ids

    def _score(self, text: str, live: LiveRequest) -> ScoreOutput:
        if live.prompt_logprobs is None or live.completions[0].finish_reason == "error":
            raise InvalidRequestError(live.completions[0].output().error)
        ids = live.request.prompt_token_ids
        entries = live.prompt_logprobs[1:]
        logprobs = [e[i].logprob for e, i in zip(entries, ids[1:], strict=True) if e is not None]
        return ScoreOutput.of(logprobs, self._covered_bytes(text, ids[0]))

    def _covered_bytes(self, text: str, first_id: int) -> int:
        """UTF-8 bytes of the text without the first token, which is not predicted."""
        tokenizer = self.tokenizer
        size = len(text.encode())
        if tokenizer is None or first_id in tokenizer.special_ids:
            return size
        return size - tokenizer.first_token_bytes(text)
