"""`AsyncLLMEngine`: many requests at once from asyncio, with vLLM's names."""

import asyncio
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Any

from minillm.api.arguments import AsyncEngineArgs
from minillm.api.outputs import PrefixReport
from minillm.api.prompts import (
    Prompt,
    one_params,
    one_priority,
    one_prompt,
    refuse_left_out,
    split_prompt,
)
from minillm.api.sampling_params import SamplingParams, shown
from minillm.engine.loop import Engine
from minillm.errors import ConfigError, EngineDeadError, InvalidRequestError
from minillm.scheduling.data_parallel import reset_prefix_cache
from minillm.scheduling.request import Request
from minillm.serving.engine_state import EngineState
from minillm.serving.request_stream import RequestStream
from minillm.serving.step_thread import StepThread, Ticket
from minillm.text.tokenizer import LONG_TEXT, Tokenizer
from minillm.trace.recorder import Trace

# Longer prompts, and texts of more than LONG_TEXT characters, are checked in a tokeniser thread,
# because they would block the event loop for more than a few milliseconds.
LONG_PROMPT = 10_000  # token ids
NUM_TOKENISERS = 2
NUM_COMPILING = 8  # requests whose constraints are waited for; two are compiled at a time


class AsyncLLMEngine:
    """A model that serves many requests concurrently, each with its own stream of outputs.

        engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model="tiny"))
        async for output in engine.generate("def fib(n):", SamplingParams(), "request-1"):
            output.outputs[0].text  # the text so far

    One thread steps the engine; streams may be read in one event loop or several. On a CPU no other
    thread of the process should run torch operations: torch starts a thread pool for each, and the
    pools compete for the cores. Objects that exist at the start are excluded from garbage
    collection (`gc.freeze`) until the engine stops. Use it in an ``async with`` block, or call
    `shutdown`.
    """

    def __init__(self, args: AsyncEngineArgs):
        if not isinstance(args, AsyncEngineArgs):
            raise ConfigError(f"AsyncLLMEngine takes AsyncEngineArgs, not {type(args).__name__}.")
        self.args = args
        self._steps = StepThread(partial(Engine, args), args.max_num_requests)
        self._engine = self._steps.engine
        self._tokenisers = ThreadPoolExecutor(NUM_TOKENISERS, "minillm-tokeniser")
        self._compiling = ThreadPoolExecutor(NUM_COMPILING, "minillm-compiling")
        # Also runs at interpreter exit; the threads hold no reference to this object.
        self._end = weakref.finalize(self, stop, self._steps, self._tokenisers, self._compiling)

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> "AsyncLLMEngine":
        """Load the model and start the thread."""
        return cls(engine_args)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        priority: int = 0,
        **others: Any,
    ) -> RequestStream:
        """Generate from one prompt. The stream yields cumulative outputs; with `output_kind`
        ``DELTA`` only the new part of each, with ``FINAL_ONLY`` only the last output.

        An output is made only while the consumer awaits one, with all tokens since the previous
        output. Prompts are those of `LLM.generate`. `sampling_params` None means the model's
        defaults. A `request_id` may be reused when its request has finished. `priority` needs
        scheduling_policy="priority"; lower numbers are scheduled first.

        The first iteration raises InvalidRequestError if the request cannot be served, and any
        iteration raises EngineDeadError if the engine has stopped. Leaving the loop aborts the
        request.
        """
        refuse_left_out("generate", others)
        begin = partial(self._begin, prompt, sampling_params, request_id, priority)
        return RequestStream(begin, self._steps)

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The fields of `SamplingParams` that the model's generation_config.json sets."""
        return self._engine.source.sampling_defaults

    def get_default_sampling_params(self) -> SamplingParams:
        """`SamplingParams()` updated from the model's generation_config.json."""
        return SamplingParams(**self._engine.source.sampling_defaults)

    async def get_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None if its folder has none."""
        return self._engine.tokenizer

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None if its folder has none."""
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a prompt and its completion together."""
        return self._engine.max_model_len

    @property
    def acceptance(self) -> str | None:
        """The rule that accepts drafts, if it changes the distribution of the text."""
        return self._engine.acceptance

    @property
    def vocab_size(self) -> int:
        """Logits of the model; token ids are smaller."""
        return self._engine.source.config.vocab_size

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort one request or several; each stream yields a last output, finish_reason "abort".

        Unknown and finished ids are ignored. Blocks are freed at once, or with `async_scheduling`
        when the step in flight has completed.
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await asyncio.wrap_future(self._steps.abort(ids))

    async def abort_all(self) -> int:
        """Abort all requests; returns their number."""
        return await asyncio.wrap_future(self._steps.abort())

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Returns True, as in vLLM."""
        reset = partial(reset_prefix_cache, self._engine.scheduler)
        await asyncio.wrap_future(self._steps.call(reset))
        return True

    def limit_outputs(self, per_second: float) -> None:
        """Limit the outputs per second over all streams. A stream's next output then has several
        tokens; its first and its last output are not delayed."""
        self._steps.max_rate = per_second

    def state(self) -> EngineState:
        """Numbers of the running engine, for reports; any thread may call it."""
        return EngineState.of(self._engine, self._steps.num_unfinished, self._steps.num_tokens)

    def seconds_since_progress(self) -> float:
        """Time since the latest step, or 0 if no request is unfinished."""
        return self._steps.seconds_since_progress()

    @property
    def trace(self) -> Trace:
        """Records of the latest steps, as `LLM.trace`; may be read while steps run."""
        return self._engine.trace

    def unfinished(self) -> list[tuple[float, str]]:
        """Arrival and id of the unfinished requests, in the engine or outside."""
        return [(ticket.arrival, ticket.request_id) for ticket in self._steps.tickets()]

    def _ticket(self, request_id: str) -> Ticket | None:
        tickets = (ticket for ticket in self._steps.tickets() if ticket.request_id == request_id)
        return next(tickets, None)

    def prefix_report(self, request_id: str) -> PrefixReport | None:
        """Prefix cache hits and misses of an unfinished request, once it was admitted."""
        ticket = self._ticket(request_id)
        if ticket is None or ticket.live is None:
            return None
        report = ticket.live.sequences[0].report
        return None if report is None else replace(report)  # computes its counts now

    def waiting_outside(self, request_id: str) -> tuple[float, str] | None:
        """Seconds since the arrival of a request of which no step has known, and why it waits."""
        ticket = self._ticket(request_id)
        if ticket is None:
            return None
        why = "no step was planned since it arrived"
        if ticket.request is None:
            why = "its prompt is not tokenised yet"
            if ticket.compiles:
                why = "its structured_outputs are not compiled yet"
        elif ticket.live is None and self._steps.is_full:
            why = f"the engine has its {self._steps.max_num_requests} requests (max_num_requests)"
        return perf_counter() - ticket.arrival, why

    # ---- state ---------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Unfinished requests, in the engine or waiting outside."""
        return self._steps.num_unfinished

    @property
    def is_running(self) -> bool:
        """Whether the engine accepts calls: it was not shut down and no error stopped it."""
        return self._steps.death is None

    @property
    def errored(self) -> bool:
        """Whether an error stopped the engine."""
        return self._steps.failed

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The error that every call raises; None while the engine is running."""
        return self._steps.death

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine has stopped."""
        if (error := self._steps.death) is not None:
            raise error

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests, and wait until all others have finished.

        After `timeout` seconds the remaining requests are aborted, each with a last output. Returns
        True if none was aborted. Call `shutdown` afterwards.
        """
        drained = asyncio.wrap_future(self._steps.drain())
        await asyncio.wait([drained], timeout=timeout)
        num_aborted = 0
        if not drained.done():
            num_aborted = await self.abort_all()
        await drained
        return num_aborted == 0

    def shutdown(self) -> None:
        """Stop after the running step and free the memory; waiting calls raise EngineDeadError. May
        be called twice."""
        self._end()

    async def __aenter__(self) -> "AsyncLLMEngine":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.shutdown)  # waits for the running step

    # ---- new requests --------------------------------------------------------------------

    def _begin(
        self, prompt: Prompt, sampling_params: SamplingParams | None, request_id: str, priority: int
    ) -> Ticket:
        """Check a request and queue it. Runs in the event loop of its consumer."""
        if (error := self._steps.death) is not None:
            raise error
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError(
                f"request_id is {shown(request_id)}; it must be a non-empty string."
            )
        text, ids, salt = split_prompt(one_prompt(prompt))
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = one_params(sampling_params)
        priority = one_priority(priority, self.args.scheduling_policy)
        make = partial(self._engine.make_request, request_id, text, ids, params, priority, salt)
        ticket = Ticket(request_id, (priority, next(self._steps.arrivals)), params, text)
        ticket.compiles = not self._engine.grammars.is_compiled(params)
        if ticket.compiles or is_long(text, ids):
            self._steps.enter(ticket)
            threads = self._compiling if ticket.compiles else self._tokenisers
            try:
                threads.submit(tokenise, self._steps, ticket, make)
            except BaseException as error:  # remove it, or it would block the queue
                ticket.ended = True
                self._steps.leave(ticket)
                if isinstance(error, RuntimeError):  # just shut down, or no thread could start
                    raise self._steps.death or error from None
                raise
        else:
            ticket.request = make()
            self._steps.enter(ticket)
        return ticket


def is_long(text: str | None, ids: Sequence[int] | None) -> bool:
    """Whether checking this prompt takes too long for an event loop."""
    if ids is not None:
        return len(ids) > LONG_PROMPT
    return len(text or "") > LONG_TEXT


def tokenise(steps: StepThread, ticket: Ticket, make: Callable[[], Request]) -> None:
    """Create the request of a queued ticket. Runs in a thread for long prompts or constraints."""
    if ticket.ended:
        return
    result: Request | Exception = EngineDeadError("The thread that made this request ended.")
    try:
        result = replace(make(), arrival=ticket.arrival)
    except Exception as error:
        result = error
    finally:  # whatever ended this task: the consumer waits for it, and the queue behind it
        steps.ready(ticket, result)


def stop(steps: StepThread, *pools: ThreadPoolExecutor) -> None:
    """Stop the threads of an engine, which may be garbage already."""
    steps.stop()
    for threads in pools:
        threads.shutdown(wait=False, cancel_futures=True)
