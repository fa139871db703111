"""The one thread that steps an engine, and how event loops follow their requests.

    event loops (any number)                                     step thread
    RequestStream -- enter, ready, leave, call -->  inbox  --> taken between two steps
                  <-- receive(output or error) ---  one call_soon_threadsafe per loop and step

Nothing is shared but the tickets and the inbox. An output is made only for a consumer who waits for
one, or when it is the last, and it holds all that is new since the one before: a slow consumer
misses nothing, costs no memory and delays no other stream. Whatever ends the thread, every waiting
consumer is told why.
"""

import asyncio
import gc
import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

from minillm.api.sampling_params import RequestOutputKind
from minillm.engine.loop import Engine
from minillm.errors import EngineDeadError, InvalidRequestError, MinillmError, in_one_line
from minillm.execution.executor import RemoteExecutor
from minillm.scheduling.request import Request
from minillm.serving.stat_logger import StatLogger
from minillm.serving.ticket import Result, Ticket, deliver, ticket_key

SHUT_DOWN = "This engine was shut down; make a new one."
FORKED = (
    "This process was forked and has no engine thread; make the engine in the process using it."
)
DRAINED = "This engine was told to drain, so it takes no new requests; make a new one."
MOST_SECONDS_TO_STOP = 30.0  # how long `stop` waits for the step that runs
MOST_BURIALS = 3  # a second kill, or no memory, may interrupt one
YOUNG_OBJECTS = 20_000  # that are made and not freed before the garbage collector looks at them


def relieve_collector() -> Callable[[], None]:
    """Let the garbage collector skip all objects that there are now, and look less often at those
    to come, until the returned function is called. A full collection of a quarter of a million
    objects, most of them torch's, takes a tenth of a second, every hundred steps of 256 sequences.
    """
    if gc.get_freeze_count():  # it was done before, by another engine or by the program
        return lambda: None
    threshold, *others = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(max(threshold, YOUNG_OBJECTS) if threshold else 0, *others)

    def restore() -> None:
        gc.set_threshold(threshold, *others)
        gc.unfreeze()

    return restore


class StepThread:
    """Makes an engine and owns it: nobody else may touch it but by `call`.

    The engine is made in this thread too. Had another one ever computed with torch, OpenMP would
    keep processors for both, take them for too few, and put its threads to sleep after every
    operation: a step of the embedded model was five times slower so.

    Public methods may be called from any thread; the others run in this one.
    """

    engine: Engine

    def __init__(self, make_engine: Callable[[], Engine], max_num_requests: int):
        self.max_num_requests = max_num_requests
        self.arrivals = count()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()  # put() is safe in __del__
        self._open: set[Ticket | Future] = set()  # all that wait for an answer of this thread
        self._tickets: dict[str, Ticket] = {}  # by id, those that wait outside and those held
        self._line: list[Ticket] = []  # outside, sorted by key
        self._held: dict[str, Ticket] = {}  # in the engine
        self._drains: list[Future[None]] = []
        self._draining = self._stopping = False
        self._ended = False  # there will be no more steps
        self._stats: StatLogger | None = None
        self._cause: BaseException | None = None  # of its end, if that was not `stop`
        made: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(make_engine, made), name="minillm-steps", daemon=True
        )
        self._thread.start()
        try:
            made.result()  # or the error that says why there is no engine
        except BaseException:  # also Ctrl-C, while the thread goes on loading
            self._stopping = True
            self._inbox.put(lambda: None)
            raise

    # ---- for any thread ------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run, in the engine or outside."""
        tickets = [each for each in self._open.copy() if isinstance(each, Ticket)]
        return sum(not ticket.ended for ticket in tickets)

    @property
    def death(self) -> EngineDeadError | None:
        """Why there will be no more steps, as a new error; None while there will."""
        if not self._ended and self._thread.is_alive():
            return None
        cause, why = self._cause, SHUT_DOWN if self._ended else FORKED
        if isinstance(cause, EngineDeadError):
            why = str(cause)
        elif cause is not None:
            why = f"The engine's thread ended: {in_one_line(cause)}"
        error = EngineDeadError(why)
        error.__cause__ = cause
        return error

    @property
    def failed(self) -> bool:
        """Whether something else than `stop` ended it."""
        return self._cause is not None or not (self._ended or self._thread.is_alive())

    def enter(self, ticket: Ticket) -> None:
        """Put a request in line. Without a `request` it keeps its place until `ready`."""
        self._send(partial(self._enter, ticket), ticket)

    def ready(self, ticket: Ticket, request: Request | Exception) -> None:
        """What became of a long text: a request, or why there is none."""
        self._inbox.put(partial(self._ready, ticket, request))

    def leave(self, ticket: Ticket) -> None:
        """The consumer is gone: end the request, deliver nothing. Safe in ``__del__``."""
        if not self._ended:
            self._inbox.put(partial(self._leave, ticket))

    def call(self, function: Callable[[], Any]) -> Future:
        """Run a function between two steps; the future has its result or its error."""
        future: Future = Future()
        self._send(partial(self._call, function, future), future)
        return future

    def drain(self) -> "Future[None]":
        """Take no new requests; the future is done when all others are."""
        future: Future[None] = Future()
        self._send(partial(self._drain, future), future)
        return future

    def abort(self, request_ids: Iterable[str] | None = None) -> "Future[int]":
        """End requests, all for None, each with a last output; how many there were."""
        return self.call(partial(self._abort, request_ids))

    def stop(self) -> None:
        """End after the step that runs, and wait for that, but not for ever. Twice is fine."""
        self._stopping = True
        self._inbox.put(lambda: None)
        if threading.current_thread() is not self._thread:  # whose garbage the engine may be
            self._thread.join(MOST_SECONDS_TO_STOP)

    def _send(self, command: Callable[[], None], waiting: Ticket | Future) -> None:
        # First into the set: the thread may die with a command in its hand.
        self._open.add(waiting)
        self._inbox.put(command)
        if self._ended or not self._thread.is_alive():
            self._bury()

    # ---- the thread ----------------------------------------------------------------------

    def _run(self, make_engine: Callable[[], Engine], made: "Future[None]") -> None:
        try:
            self.engine = make_engine()
        except BaseException as error:
            self._ended = True
            made.set_exception(error)
            return
        restore_collector = relieve_collector()
        if not self.engine.args.disable_log_stats:
            self._stats = StatLogger(self.engine.scheduler.counters)
        if isinstance(self.engine.runner, RemoteExecutor):
            self.engine.runner.when_dead(self._fail)
        made.set_result(None)
        del make_engine, made
        try:
            self._serve()
        except BaseException as error:  # also SystemExit, or no memory: nobody may wait for ever
            self._cause = error
        self._ended = True
        for _ in range(MOST_BURIALS):
            with suppress(BaseException):
                self._bury()
                break
        with suppress(Exception):  # its books may be damaged
            self.engine.close()
        restore_collector()

    def _fail(self, error: MinillmError) -> None:
        """End with this error, also while there is nothing to do. Any thread may call it."""

        def fail() -> None:
            raise error

        self._inbox.put(fail)

    def _serve(self) -> None:
        while True:
            self._take_commands(wait=not self.engine.has_work and self._next() is None)
            if self._stopping:
                return
            self._drop_closed_loops()
            self._admit()
            if self.engine.has_work:
                self.engine.step()
                self._publish()
                if self._stats is not None:
                    self._stats.after_step(self.engine.scheduler)
            if self._drains and not self._tickets:
                for future in self._drains:
                    self._settle(future, None)
                self._drains = []

    def _take_commands(self, wait: bool) -> None:
        """All that have come, at least one if there is nothing else to do."""
        while True:
            try:
                command = self._inbox.get(block=wait)
            except Empty:
                return
            command()
            wait = False

    def _bury(self) -> None:
        """Tell everybody who waits that there will be no answer. Again and again is fine."""
        for waiting in self._open.copy():
            error = self.death or EngineDeadError(SHUT_DOWN)
            if isinstance(waiting, Ticket):
                with suppress(RuntimeError):  # its event loop is closed
                    waiting.loop.call_soon_threadsafe(waiting.receive, error)
            else:
                with suppress(InvalidStateError):  # nobody waits any more
                    waiting.set_exception(error)
            self._open.discard(waiting)

    # ---- commands ------------------------------------------------------------------------

    def _enter(self, ticket: Ticket) -> None:
        if self._draining:
            self._refuse(ticket, EngineDeadError(DRAINED))
        elif ticket.request_id in self._tickets:
            self._refuse(
                ticket,
                InvalidRequestError(
                    f"There is an unfinished request with the id {ticket.request_id!r} already."
                ),
            )
        else:
            self._tickets[ticket.request_id] = ticket
            insort(self._line, ticket, key=ticket_key)

    def _ready(self, ticket: Ticket, request: Request | Exception) -> None:
        if not self._knows(ticket):
            return
        if isinstance(request, Request):
            ticket.request = request
        else:
            self._forget(ticket)
            self._refuse(ticket, request)

    def _leave(self, ticket: Ticket) -> None:
        if self._knows(ticket):
            self._forget(ticket)
            self.engine.abort(ticket.request_id)
        self._open.discard(ticket)

    def _abort(self, request_ids: Iterable[str] | None) -> int:
        chosen = self._tickets if request_ids is None else request_ids
        tickets = [self._tickets[each] for each in dict.fromkeys(chosen) if each in self._tickets]
        for ticket in tickets:
            self.engine.abort(ticket.request_id)
            live = ticket.live
            self._forget(ticket)
            self._refuse(ticket, ticket.never_begun() if live is None else ticket.output(live))
        return len(tickets)

    def _drain(self, future: "Future[None]") -> None:
        self._draining = True
        self._drains.append(future)

    def _call(self, function: Callable[[], Any], future: Future) -> None:
        try:
            result = function()
        except Exception as error:
            with suppress(InvalidStateError):
                future.set_exception(error)
            self._open.discard(future)
        else:
            self._settle(future, result)

    def _settle(self, future: Future, result: object) -> None:
        with suppress(InvalidStateError):  # cancelled: nobody waits any more
            future.set_result(result)
        self._open.discard(future)

    # ---- requests ------------------------------------------------------------------------

    def _knows(self, ticket: Ticket) -> bool:
        return self._tickets.get(ticket.request_id) is ticket

    def _forget(self, ticket: Ticket) -> None:
        del self._tickets[ticket.request_id]
        if self._held.pop(ticket.request_id, None) is None:
            del self._line[bisect_left(self._line, ticket.key, key=ticket_key)]

    def _refuse(self, ticket: Ticket, result: Result) -> None:
        """The last result of a request that is in no book."""
        self._post(ticket.loop, [(ticket, result)])
        self._open.discard(ticket)

    def _post(self, loop: asyncio.AbstractEventLoop, results: list[tuple[Ticket, Result]]) -> None:
        with suppress(RuntimeError):  # the loop is closed: `_drop_closed_loops` sees to it
            loop.call_soon_threadsafe(deliver, results)

    def _drop_closed_loops(self) -> None:
        closed = {loop for loop in {each.loop for each in self._held.values()} if loop.is_closed()}
        for ticket in [each for each in self._held.values() if each.loop in closed]:
            self._leave(ticket)

    def _next(self) -> Ticket | None:
        """Who may leave the line now. A text that is still tokenised keeps its place and lets
        nobody pass."""
        if not self._line or len(self._held) >= self.max_num_requests:
            return None
        return self._line[0] if self._line[0].request is not None else None

    def _admit(self) -> None:
        """Take from the line while there is room."""
        while (ticket := self._next()) is not None and ticket.request is not None:
            del self._line[0]
            self._held[ticket.request_id] = ticket
            try:
                ticket.live = self.engine.add(ticket.request)
            except InvalidRequestError as error:
                self._forget(ticket)
                self._refuse(ticket, error)

    def _publish(self) -> None:
        """Outputs for whoever waits for one, and the last ones for all."""
        posts: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Result]]] = {}
        ended = []
        for ticket in self._held.values():
            live = ticket.live
            if live is None or live.num_updates == ticket.seen:
                continue
            finished = live.finished
            if finished or (ticket.wanted and ticket.kind is not RequestOutputKind.FINAL_ONLY):
                ticket.seen, ticket.wanted = live.num_updates, False
                posts.setdefault(ticket.loop, []).append((ticket, ticket.output(live)))
            if finished:
                ended.append(ticket)
        for loop, results in posts.items():
            self._post(loop, results)
        for ticket in ended:
            self._forget(ticket)
            self._open.discard(ticket)
