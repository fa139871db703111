"""The engine: takes token ids, gives token ids and text. One request after another, for now.

validate -> prefill in chunks -> [sample -> append -> run the new tokens] until all have ended
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral

import torch
from torch import Tensor

from minillm.completion import Completion, with_text
from minillm.cost import kv_bytes_per_token
from minillm.engine_args import EngineArgs
from minillm.engine_setup import (
    choose_device,
    choose_dtype,
    end_tokens,
    limit_threads,
    open_tokenizer,
    plan_memory,
)
from minillm.errors import EngineDeadError, InvalidRequestError
from minillm.layers.kv_cache import KVCache
from minillm.models.checkpoint import open_model
from minillm.models.loader import DTYPES, load_model
from minillm.outputs import Logprobs, RequestMetrics, RequestOutput
from minillm.runner import Chunk, Runner
from minillm.sampler import SamplingRow, TokenLogprob, sample, token_logprobs
from minillm.sampling_params import SamplingParams, validate_against_model


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it, already checked."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    arrival: float = field(default_factory=time.perf_counter)


class Engine:
    """A loaded model that serves requests. Raises what `open_model` and `load_model` raise."""

    def __init__(self, args: EngineArgs):
        limit_threads()
        self.args = args
        self.source = open_model(args.model)
        self.device = choose_device(args.device)
        self.dtype = choose_dtype(args.dtype, self.source.config, self.device)
        self.tokenizer = open_tokenizer(args, self.source)
        self.max_model_len, self.memory = plan_memory(
            args, self.source.config, self.dtype, self.device
        )
        self.eos_token_ids = end_tokens(self.source, self.tokenizer)
        self._seeds = random.Random(args.seed)
        self._runner: Runner | None = Runner(
            load_model(
                self.source,
                DTYPES[self.dtype],
                self.device,
                self.max_model_len,
                args.load_format,
                args.seed,
            )
        )

    @property
    def runner(self) -> Runner:
        """The loaded model; an error once the engine is closed."""
        if self._runner is None:
            raise EngineDeadError("This engine is closed; make a new one.")
        return self._runner

    def close(self) -> None:
        """Give the memory back. Closing twice is fine."""
        self._runner = None

    # ---- requests ------------------------------------------------------------------------

    def make_request(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int] | None,
        params: SamplingParams,
    ) -> Request:
        """Check a request, tokenising its text if it has no ids.

        Raises InvalidRequestError, which says what cannot be served and why.
        """
        if prompt_token_ids is None:
            # Refused even where the tokenizer would put its start token: that one can be given.
            prompt_token_ids = self.encode(prompt) if prompt else ()
        self.check_prompt(prompt_token_ids)
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError(
                f"stop={list(params.stop)!r} needs a tokenizer, which {self.source.name} does not "
                "have; use stop_token_ids."
            )
        bad_words = tuple(self._bad_words(params))
        validate_against_model(params, self.source.config.vocab_size, bad_words)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        ids = tuple(map(int, prompt_token_ids))
        request = Request(request_id, prompt, ids, params, seed, bad_words)
        self._check_room(request)
        return request

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the tokenizer's own first token."""
        if self.tokenizer is None:
            raise InvalidRequestError(
                f"{self.source.name} has no tokenizer.json, so a text cannot be used; "
                "give token ids as {'prompt_token_ids': [...]}."
            )
        return self.tokenizer.encode(text)

    def check_prompt(self, ids: Sequence[int]) -> None:
        """A prompt has a token, leaves room for one, and only uses ids that the model has."""
        width = self.source.config.vocab_size
        if not ids:
            raise InvalidRequestError(
                "The prompt is empty; it needs some text or at least one token id."
            )
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, Integral):
                raise InvalidRequestError(
                    f"The prompt contains {token_id!r}; token ids are integers."
                )
            if not 0 <= token_id < width:
                raise InvalidRequestError(
                    f"The prompt contains token id {token_id}; this model has ids from 0 to "
                    f"{width - 1}."
                )
        if len(ids) >= self.max_model_len:
            longer = self.max_model_len < self.source.config.longest_context
            raise InvalidRequestError(
                f"The prompt has {len(ids)} tokens; the maximum context length is "
                f"{self.max_model_len} and must leave room for one new token, "
                f"so shorten the prompt{' or raise max_model_len' * longer}."
            )

    def max_new_tokens(self, request: Request) -> int:
        """`max_tokens`, but never beyond the context length."""
        room = self.max_model_len - len(request.prompt_token_ids)
        return room if request.params.max_tokens is None else min(request.params.max_tokens, room)

    def _check_room(self, request: Request) -> None:
        positions = len(request.prompt_token_ids) + self.max_new_tokens(request)
        needed = request.params.n * positions * self._kv_bytes_per_token
        if needed > self.memory.kv_cache_bytes:
            raise InvalidRequestError(
                f"The request needs {request.params.n} x {positions} positions x "
                f"{self._kv_bytes_per_token:,} bytes = {needed:,} bytes of KV cache, and "
                f"{self.memory.kv_cache_bytes:,} are available; lower n or max_tokens."
            )

    @property
    def _kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.source.config, self.dtype)

    def _bad_words(self, params: SamplingParams) -> Iterator[tuple[int, ...]]:
        """Each bad word as it is tokenised at the start of a text and after a space, as in vLLM."""
        for word in params.bad_words:
            if self.tokenizer is None:
                raise InvalidRequestError(
                    f"bad_words={list(params.bad_words)!r} needs a tokenizer, which "
                    f"{self.source.name} does not have."
                )
            stripped = word.lstrip()
            variants = {
                tuple(self.tokenizer.encode(variant, add_special_tokens=False))
                for variant in (stripped, " " + stripped)
            }
            yield from sorted(variants - {()})

    # ---- generation ----------------------------------------------------------------------

    def generate(self, request: Request) -> Iterator[RequestOutput]:
        """Run one request; yields the outputs so far after every step, the last one finished.

        What goes wrong in the model or the sampler ends the affected completions with
        ``finish_reason="error"``; it does not end the engine.
        """
        started = time.perf_counter()
        params, runner = request.params, self.runner
        max_tokens = self.max_new_tokens(request)
        completions = [
            Completion(
                index,
                params,
                max_tokens,
                self.eos_token_ids,
                self.tokenizer,
                request.prompt_token_ids,
            )
            for index in range(params.n)
        ]
        # The cache is this request's own: another may run before this one is read to its end.
        kv = runner.allocate(params.n, len(request.prompt_token_ids) + max_tokens)
        prompt_logprobs = None
        try:
            logits, prompt_logprobs = self._prefill(request, kv)
        except InvalidRequestError as error:  # logits that are no numbers
            for completion in completions:
                completion.fail(str(error))
        for completion in completions[1:]:
            kv.copy_block(0, completion.index)
        first_token = None
        while True:
            running = [completion for completion in completions if not completion.finish_reason]
            if running:
                self._sample(request, running, logits)
            now = time.perf_counter()
            first_token = now if first_token is None else first_token
            finished = all(completion.finish_reason for completion in completions)
            yield RequestOutput(
                request_id=request.request_id,
                prompt=request.prompt,
                prompt_token_ids=list(request.prompt_token_ids),
                outputs=[completion.output() for completion in completions],
                finished=finished,
                prompt_logprobs=prompt_logprobs,
                metrics=measure(request, completions, started, first_token, now),
            )
            if finished:
                return
            running = [completion for completion in running if not completion.finish_reason]
            logits = self._decode(request, running, kv)

    def _prefill(
        self, request: Request, kv: KVCache
    ) -> tuple[Tensor, list[Logprobs | None] | None]:
        """Compute the prompt chunk by chunk. Returns the logits [n, V] of what follows it."""
        ids, wanted = request.prompt_token_ids, request.params.prompt_logprobs
        logprobs: list[Logprobs | None] = [None]
        for start, hidden, last in self._chunks(ids, kv):
            logits = last
            if wanted is not None:
                rows = self._logprobs(hidden, ids[start + 1 : start + 1 + len(hidden)], wanted)
                logprobs += [with_text(row, self.tokenizer) for row in rows]
        return logits.expand(request.params.n, -1), None if wanted is None else logprobs

    def prompt_logprobs(self, ids: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first, given those before it."""
        kv, result = self.runner.allocate(1, len(ids)), []
        for start, hidden, _ in self._chunks(ids, kv):
            targets = ids[start + 1 : start + 1 + len(hidden)]
            rows = self._logprobs(hidden, targets, 0)
            result += [row[target].logprob for row, target in zip(rows, targets, strict=True)]
        return result

    def _chunks(self, ids: Sequence[int], kv: KVCache) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Run `ids` through block 0: yields start, hidden [T, d] and the last row's logits."""
        size = self.args.max_num_batched_tokens
        for start in range(0, len(ids), size):
            chunk = Chunk(block=0, start=start, token_ids=ids[start : start + size])
            yield start, *self.runner.run([chunk], kv)

    def _logprobs(
        self, hidden: Tensor, targets: Sequence[int], top_k: int
    ) -> list[dict[int, TokenLogprob]]:
        """Log-probabilities of `targets`, each predicted by its row of hidden [T or T + 1, d]."""
        target_ids = torch.tensor(targets, dtype=torch.int64, device=hidden.device)
        return token_logprobs(self.runner.logits, hidden[: len(targets)], target_ids, top_k)

    def _decode(self, request: Request, running: Sequence[Completion], kv: KVCache) -> Tensor:
        """One new token of every running completion. Returns logits [K, V]."""
        prompt = len(request.prompt_token_ids)
        chunks = [Chunk(c.index, prompt + len(c.token_ids) - 1, c.token_ids[-1:]) for c in running]
        return self.runner.run(chunks, kv)[1]

    def _sample(self, request: Request, running: Sequence[Completion], logits: Tensor) -> None:
        rows = [
            SamplingRow(
                params=request.params,
                seed=request.seed,
                sample_index=completion.index,
                position=len(request.prompt_token_ids) + len(completion.token_ids),
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=completion.token_ids,
                stop_ids=completion.stop_ids,
                bad_words_ids=request.bad_words_ids,
            )
            for completion in running
        ]
        sampled = sample(logits, rows)
        for row, completion in enumerate(running):
            if row in sampled.failed:
                completion.fail(sampled.failed[row])
            else:
                completion.append(sampled.token_ids[row], sampled.logprobs[row])


def measure(
    request: Request,
    completions: Sequence[Completion],
    started: float,
    first_token: float,
    now: float,
) -> RequestMetrics:
    """Times of a request after the step that ended `now`."""
    steps = max(len(completion.token_ids) for completion in completions) - 1
    return RequestMetrics(
        queue_time=started - request.arrival,
        ttft=first_token - request.arrival,
        tpot=(now - first_token) / steps if steps > 0 else None,
        e2e=now - request.arrival,
    )
