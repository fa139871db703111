"""The stream of one request's outputs, which `AsyncLLMEngine.generate` returns."""

import asyncio
from collections.abc import AsyncIterator, Callable

from minillm.api.outputs import RequestOutput
from minillm.errors import InvalidRequestError
from minillm.serving.step_thread import StepThread, Ticket


class RequestStream(AsyncIterator[RequestOutput]):
    """Asynchronous iterator over the outputs of one request; the last one is `finished`.

    The request is submitted by the first iteration. It is aborted if its consumer leaves: the
    reading task is cancelled, `aclose` is called, or the stream is no longer referenced, as after a
    ``break`` out of ``async for out in engine.generate(...)``.

    This is not an asynchronous generator, because an abandoned one needs another task to close it.
    """

    def __init__(self, begin: Callable[[], Ticket], steps: StepThread):
        self._begin, self._steps = begin, steps
        self._ticket: Ticket | None = None
        self._over = False
        self.error: Exception | None = None  # that a reader got instead of an output

    def __aiter__(self) -> "RequestStream":
        if self._over:
            raise InvalidRequestError("This stream has ended; call generate for a new one.")
        return self

    async def __anext__(self) -> RequestOutput:
        ticket = self._ticket
        if ticket is None or ticket.waiter is not None or self._over:
            ticket = self._checked()
        if ticket.loop is not asyncio.get_running_loop():
            raise InvalidRequestError(
                f"The stream of request {ticket.request_id!r} began in another event loop; read it "
                "to its end there."
            )
        if ticket.result is None:
            ticket.wanted, ticket.waiter = True, ticket.loop.create_future()
            try:
                await ticket.waiter
            except BaseException:  # cancelled, or closed while waiting
                self._leave()
                raise
            finally:
                ticket.waiter = None
        result, ticket.result = ticket.result, None
        self._over = ticket.ended
        if result is None:  # closed by another task
            raise StopAsyncIteration
        if isinstance(result, Exception):
            self.error = result
            raise result
        return result

    def _checked(self) -> Ticket:
        """The ticket of this stream; the first call submits the request."""
        if self._over:
            raise StopAsyncIteration
        ticket = self._ticket or self._start()
        if ticket.waiter is not None:
            raise InvalidRequestError(
                f"The stream of request {ticket.request_id!r} is already being read; only one task "
                "may read a stream, so call generate once per task."
            )
        return ticket

    def _start(self) -> Ticket:
        try:
            self._ticket = self._begin()
        except BaseException as error:
            self._over = True
            self.error = error if isinstance(error, Exception) else None
            raise
        return self._ticket

    @property
    def begun(self) -> bool:
        """Whether the request was submitted."""
        return self._ticket is not None

    async def aclose(self) -> None:
        """Abort the request if it is unfinished. May be called twice."""
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
        # May run in any thread, and after the event loop is closed: `leave` only queues a command.
        self._leave()
