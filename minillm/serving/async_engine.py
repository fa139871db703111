"""`AsyncLLMEngine`: many requests at once from asyncio, with vLLM's names."""

import asyncio
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import TracebackType

from minillm.api.async_engine_args import AsyncEngineArgs
from minillm.api.prompts import Prompt, one_params, one_priority, one_prompt, split_prompt
from minillm.api.sampling_params import SamplingParams, shown
from minillm.engine.loop import Engine
from minillm.errors import ConfigError, EngineDeadError, InvalidRequestError
from minillm.scheduling.data_parallel import reset_prefix_cache
from minillm.scheduling.request import Request
from minillm.serving.request_stream import RequestStream
from minillm.serving.step_thread import StepThread, Ticket
from minillm.text.tokenizer import LONG_TEXT, Tokenizer
from minillm.trace.recorder import Trace

# Longer prompts, and texts of more than LONG_TEXT characters, are checked in a thread, for they
# would hold up the event loop for more than a few milliseconds.
LONG_PROMPT = 10_000  # token ids
NUM_TOKENISERS = 2


class AsyncLLMEngine:
    """A model that serves many requests, each with its own stream of outputs.

        engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model="tiny"))
        async for output in engine.generate("def fib(n):", SamplingParams(), "request-1"):
            output.outputs[0].text  # all of it so far

    One thread advances all requests; event loops, one or several, only read. On a CPU let no other
    thread of the process compute with torch: each would have threads of its own, and they would
    wait for each other. Until its end the garbage collector looks at no object that there was at
    the start (`gc.freeze`). Use it in an ``async with`` block, or call `shutdown`, to end it early.
    """

    def __init__(self, args: AsyncEngineArgs):
        if not isinstance(args, AsyncEngineArgs):
            raise ConfigError(
                f"An AsyncLLMEngine is made of AsyncEngineArgs, not {type(args).__name__}."
            )
        self.args = args
        self._steps = StepThread(partial(Engine, args), args.max_num_requests)
        self._engine = self._steps.engine
        self._tokenisers = ThreadPoolExecutor(NUM_TOKENISERS, "minillm-tokeniser")
        # Also when the interpreter ends; the thread knows nothing of this object.
        self._end = weakref.finalize(self, stop, self._steps, self._tokenisers)

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
    ) -> RequestStream:
        """Continue one prompt; the stream has the output so far (cumulative), again and again, or
        with ``output_kind=RequestOutputKind.DELTA`` what is new, with ``FINAL_ONLY`` the last one.

        While no output is awaited none is made: the next one holds what came meanwhile. A prompt is
        what it is for `LLM.generate`; `sampling_params` None means the model's own defaults.
        `request_id` is free again when its request has ended. `priority` is for the scheduling
        policy "priority", the lowest first.

        The first step of the iteration raises InvalidRequestError for what cannot be served, and
        any step EngineDeadError when the engine has stopped. Leaving the iteration aborts.
        """
        begin = partial(self._begin, prompt, sampling_params, request_id, priority)
        return RequestStream(begin, self._steps)

    def get_default_sampling_params(self) -> SamplingParams:
        """`SamplingParams()` with what the model's generation_config.json recommends."""
        return SamplingParams(**self._engine.source.sampling_defaults)

    async def get_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None when its folder has none."""
        return self._engine.tokenizer

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End one request or several: each stream yields a last output with finish_reason "abort".

        Unknown and finished ones are fine. Their blocks are free once the step in flight has ended:
        with `async_scheduling` there is one when this returns, otherwise none.
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await asyncio.wrap_future(self._steps.abort(ids))

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, as before a measurement; True, as in vLLM."""
        await asyncio.wrap_future(
            self._steps.call(lambda: reset_prefix_cache(self._engine.scheduler))
        )
        return True

    @property
    def trace(self) -> Trace:
        """The records of the last steps, as `LLM.trace`; it may be read while steps run."""
        return self._engine.trace

    # ---- its own life --------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run, in the engine or outside."""
        return self._steps.num_unfinished

    @property
    def is_running(self) -> bool:
        """Whether it still serves: it was not shut down, and nothing stopped it."""
        return self._steps.death is None

    @property
    def errored(self) -> bool:
        """Whether an error stopped it."""
        return self._steps.failed

    @property
    def dead_error(self) -> EngineDeadError | None:
        """What every call is answered with; None while it serves."""
        return self._steps.death

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine has stopped."""
        if (error := self._steps.death) is not None:
            raise error

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests from now on, and wait until all others have ended.

        After `timeout` seconds those that are left are aborted, each with a last output. Returns
        whether none had to be. Call `shutdown` afterwards.
        """
        drained = asyncio.wrap_future(self._steps.drain())
        await asyncio.wait([drained], timeout=timeout)
        num_aborted = 0
        if not drained.done():
            num_aborted = await asyncio.wrap_future(self._steps.abort())
        await drained
        return num_aborted == 0

    def shutdown(self) -> None:
        """Stop now: whoever still waits gets EngineDeadError. Gives the memory back; twice is
        fine."""
        self._end()

    async def __aenter__(self) -> "AsyncLLMEngine":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.shutdown)  # the step that runs is waited for

    # ---- a request begins ----------------------------------------------------------------

    def _begin(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        priority: int,
    ) -> Ticket:
        """Check a request and put it in line. Runs in the event loop that will read it."""
        if (error := self._steps.death) is not None:
            raise error
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError(
                f"request_id is {shown(request_id)}; it must be a string that is not empty."
            )
        text, ids, salt = split_prompt(one_prompt(prompt))
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = one_params(sampling_params)
        priority = one_priority(priority, self.args.scheduling_policy)
        make = partial(self._engine.make_request, request_id, text, ids, params, priority, salt)
        ticket = Ticket(request_id, (priority, next(self._steps.arrivals)), params, text)
        if is_long(text, ids):
            self._steps.enter(ticket)
            try:
                self._tokenisers.submit(tokenise, self._steps, ticket, make)
            except BaseException as error:  # it would hold up all who come after it
                ticket.ended = True
                self._steps.leave(ticket)
                if isinstance(error, RuntimeError):  # shut down a moment ago, or no more threads
                    raise self._steps.death or error from None
                raise
        else:
            ticket.request = make()
            self._steps.enter(ticket)
        return ticket


def is_long(text: str | None, ids: Sequence[int] | None) -> bool:
    """Whether making a request of it takes too long for an event loop."""
    if ids is not None:
        return len(ids) > LONG_PROMPT
    return len(text or "") > LONG_TEXT


def tokenise(steps: StepThread, ticket: Ticket, make: Callable[[], Request]) -> None:
    """Make the request of a ticket that is already in line. Runs in a tokeniser thread."""
    if ticket.ended:
        return
    try:
        request = replace(make(), arrival=ticket.arrival)
    except Exception as error:
        steps.ready(ticket, error)
    else:
        steps.ready(ticket, request)


def stop(steps: StepThread, tokenisers: ThreadPoolExecutor) -> None:
    """End the threads of an engine, maybe one that nobody refers to any more."""
    steps.stop()
    tokenisers.shutdown(wait=False, cancel_futures=True)
