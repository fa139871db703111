"""What `AsyncLLMEngine.generate` returns: the outputs of one request, as they come."""

import asyncio
from collections.abc import AsyncIterator, Callable

from minillm.api.outputs import RequestOutput
from minillm.errors import InvalidRequestError
from minillm.serving.step_thread import StepThread, Ticket


class RequestStream(AsyncIterator[RequestOutput]):
    """Outputs of one request, as its `SamplingParams.output_kind` says; the last is `finished`.

    The request begins with the first step of the iteration. It is aborted when the iteration is
    left for good: the reading task is cancelled, `aclose` is called, or the stream is no longer
    referred to, as after a ``break`` out of ``async for out in engine.generate(...)``.

    A class and no generator, because a generator that is left needs another task to be closed.
    """

    def __init__(self, begin: Callable[[], Ticket], steps: StepThread):
        self._begin, self._steps = begin, steps
        self._ticket: Ticket | None = None
        self._over = False

    def __aiter__(self) -> "RequestStream":
        if self._over:
            raise InvalidRequestError("This stream has ended; call generate for another one.")
        return self

    async def __anext__(self) -> RequestOutput:
        ticket = self._ticket
        if ticket is None or ticket.waiter is not None or self._over:
            ticket = self._checked()
        if ticket.loop is not asyncio.get_running_loop():
            raise InvalidRequestError(
                f"The stream of request {ticket.request_id!r} began in another event loop, which "
                "must read it to its end."
            )
        if ticket.result is None:
            ticket.wanted, ticket.waiter = True, ticket.loop.create_future()
            try:
                await ticket.waiter
            except BaseException:  # cancelled, or thrown away in the middle
                self._leave()
                raise
            finally:
                ticket.waiter = None
        result, ticket.result = ticket.result, None
        self._over = ticket.ended
        if result is None:  # closed by another task
            raise StopAsyncIteration
        if isinstance(result, Exception):
            raise result
        return result

    def _checked(self) -> Ticket:
        """The ticket of a stream that has one or may begin now."""
        if self._over:
            raise StopAsyncIteration
        ticket = self._ticket or self._start()
        if ticket.waiter is not None:
            raise InvalidRequestError(
                f"The stream of request {ticket.request_id!r} is already being read; one task "
                "reads a stream, and others call generate for their own."
            )
        return ticket

    def _start(self) -> Ticket:
        try:
            self._ticket = self._begin()
        except BaseException:
            self._over = True
            raise
        return self._ticket

    async def aclose(self) -> None:
        """Abort the request if it is not finished. Twice is fine."""
        self._leave()
        if self._ticket is not None:
            self._ticket.wake()  # another task may be reading

    def _leave(self) -> None:
        self._over, ticket = True, self._ticket
        if ticket is not None:
            ticket.result = None
            if not ticket.ended:
                ticket.ended = True
                self._steps.leave(ticket)

    def __del__(self) -> None:
        # Maybe in another thread, or after the event loop: this only leaves a message.
        self._leave()
