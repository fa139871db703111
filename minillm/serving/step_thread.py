"""The thread that steps an engine, and its communication with event loops.

    event loops (any number)                                     step thread
    RequestStream -- enter, ready, leave, call -->  inbox  --> taken between two steps
                  <-- receive(output or error) ---  one call_soon_threadsafe per loop and step

Only the tickets and the inbox are shared. An output is made when the consumer awaits one or the
request has finished, with everything that is new since the previous output. So a slow consumer
misses no token, needs no buffer, and does not delay other streams. When the thread ends, for any
reason, every waiting consumer gets an error with the cause.
"""

import asyncio
import gc
import math
import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from itertools import count
from operator import attrgetter
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from minillm.api.sampling_params import RequestOutputKind
from minillm.engine.loop import Engine
from minillm.errors import EngineDeadError, InvalidRequestError, MinillmError, in_one_line
from minillm.parallel.processes import RankProcesses
from minillm.scheduling.request import Request
from minillm.serving.stat_logger import StatLogger
from minillm.serving.ticket import Result, Ticket, deliver

SHUT_DOWN = "This engine was shut down; make a new one."
FORKED = (
    "This process was forked and has no engine thread; make the engine in the process using it."
)
DRAINED = "This engine was told to drain, so it takes no new requests; make a new one."
STOP_TIMEOUT = 30.0  # seconds that `stop` waits for the running step
MAX_CLEANUP_ATTEMPTS = 3  # another kill or a MemoryError may interrupt one
THIS_THREAD = Path("/proc/thread-self/comm")
GC_THRESHOLD = 20_000  # new objects between two collections of the youngest generation


def reduce_garbage_collection() -> Callable[[], None]:
    """Exclude all present objects from garbage collection, and collect new ones less often, until
    the returned function is called. Without it a full collection of 250,000 objects, most of them
    torch's, takes 0.1 s every hundred steps of 256 sequences.
    """
    if gc.get_freeze_count():  # already done by another engine or by the program
        return lambda: None
    threshold, *others = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(max(threshold, GC_THRESHOLD) if threshold else 0, *others)

    def restore() -> None:
        gc.set_threshold(threshold, *others)
        gc.unfreeze()

    return restore


class StepThread:
    """Creates an engine in a new thread and steps it there; other threads use the engine only by
    `call`.

    The engine is created in this thread, too, so that only one thread runs torch operations. If two
    threads do, OpenMP has more threads than cores and puts them to sleep after every operation,
    which made a step of the embedded model five times slower.

    Public methods may be called from any thread; private methods run in this one.
    """

    engine: Engine

    def __init__(self, make_engine: Callable[[], Engine], max_num_requests: int):
        self.max_num_requests = max_num_requests
        self.arrivals = count()
        self.max_rate = math.inf  # outputs per second, over all streams
        self._sent = -math.inf  # when outputs were last due
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()  # put() is safe in __del__
        self._open: set[Ticket | Future] = set()  # everything that awaits a reply of this thread
        self._tickets: dict[str, Ticket] = {}  # by request id: all of `_queue` and `_held`
        self._queue: list[Ticket] = []  # waiting outside the engine, sorted by key
        self._held: dict[str, Ticket] = {}  # in the engine, by request id
        self._num_tokens = 0  # of requests that are no longer in `_held`
        self._drains: list[Future[None]] = []
        self._draining = self._stopping = False
        self._ended = False  # no more steps will run
        self._progress = monotonic()  # when the loop last began a step, or was woken
        self._stats: StatLogger | None = None
        self._cause: BaseException | None = None  # the error that ended the thread, if any
        made: Future[None] = Future()
        arguments = make_engine, made
        self._thread = threading.Thread(None, self._run, "minillm-steps", arguments, daemon=True)
        self._thread.start()
        try:
            made.result()  # raises the error of creating the engine
        except BaseException:  # also Ctrl-C while the thread is still loading
            self._stopping = True
            self._inbox.put(lambda: None)
            raise

    # ---- called from any thread ----------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Unfinished requests, in the engine or waiting outside."""
        return sum(not ticket.ended for ticket in self.tickets())

    @property
    def num_tokens(self) -> int:
        """New tokens since the start."""
        lives = [ticket.live for ticket in list(self._held.values())]
        return self._num_tokens + sum(live.num_tokens for live in lives if live is not None)

    def tickets(self) -> list[Ticket]:
        """The tickets of unfinished requests."""
        return [ticket for ticket in self._open.copy() if isinstance(ticket, Ticket)]

    @property
    def is_full(self) -> bool:
        """Whether the engine has `max_num_requests` requests, so that others wait outside."""
        return len(self._held) >= self.max_num_requests

    def seconds_since_progress(self) -> float:
        """Time since the loop last began a step, or 0 if no request is unfinished."""
        return monotonic() - self._progress if self.num_unfinished else 0.0

    @property
    def death(self) -> EngineDeadError | None:
        """A new error that says why no more steps will run; None while the thread runs."""
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
        """Whether the thread ended for another reason than `stop`."""
        return self._cause is not None or not (self._ended or self._thread.is_alive())

    def enter(self, ticket: Ticket) -> None:
        """Queue a request. A ticket without a `request` keeps its place until `ready`."""
        self._send(partial(self._enter, ticket), ticket)

    def ready(self, ticket: Ticket, request: Request | Exception) -> None:
        """Give a queued ticket its request, or the error of creating it."""
        self._inbox.put(partial(self._ready, ticket, request))

    def leave(self, ticket: Ticket) -> None:
        """Abort the request of a consumer that has left, without an output. Safe in ``__del__``."""
        if not self._ended:
            self._inbox.put(partial(self._leave, ticket))

    def call(self, function: Callable[[], Any]) -> Future:
        """Run a function between two steps; the future gets its result or its error."""
        future: Future = Future()
        self._send(partial(self._call, function, future), future)
        return future

    def drain(self) -> "Future[None]":
        """Refuse new requests; the future is done when all others have finished."""
        future: Future[None] = Future()
        self._send(partial(self._drain, future), future)
        return future

    def abort(self, request_ids: Iterable[str] | None = None) -> "Future[int]":
        """Abort requests (None: all), each with a last output; the result is their number."""
        return self.call(partial(self._abort, request_ids))

    def stop(self) -> None:
        """End the thread after the running step, and wait up to `STOP_TIMEOUT` seconds for it. May
        be called twice."""
        self._stopping = True
        self._inbox.put(lambda: None)
        if threading.current_thread() is not self._thread:  # which may collect the engine object
            self._thread.join(STOP_TIMEOUT)

    def _send(self, command: Callable[[], None], waiting: Ticket | Future) -> None:
        # Added before the command is sent: the thread may end while it runs the command.
        self._open.add(waiting)
        self._inbox.put(command)
        if self._ended or not self._thread.is_alive():
            self._fail_waiting()

    # ---- the step loop -------------------------------------------------------------------

    def _run(self, make_engine: Callable[[], Engine], made: "Future[None]") -> None:
        with suppress(OSError):  # its name in `top -H` and `perf`, as in Python 3.14; on Linux
            THIS_THREAD.write_text(threading.current_thread().name)
        try:
            self.engine = make_engine()
        except BaseException as error:
            self._ended = True
            made.set_exception(error)
            return
        restore_garbage_collection = reduce_garbage_collection()
        if not self.engine.args.disable_log_stats:
            self._stats = StatLogger(self.engine.scheduler.counters)
        if isinstance(self.engine.runner, RankProcesses):
            self.engine.runner.when_dead(self._fail)
        made.set_result(None)
        del make_engine, made
        try:
            self._serve()
        except BaseException as error:  # also SystemExit and MemoryError: consumers must be told
            self._cause = error
        self._ended = True
        for _ in range(MAX_CLEANUP_ATTEMPTS):
            with suppress(BaseException):
                self._fail_waiting()
                break
        with suppress(Exception):  # the engine's state may be inconsistent
            self.engine.close()
        restore_garbage_collection()

    def _fail(self, error: MinillmError) -> None:
        """End the thread with this error, even while it is idle. Any thread may call it."""

        def fail() -> None:
            raise error

        self._inbox.put(fail)

    def _serve(self) -> None:
        while True:
            self._take_commands(wait=not self.engine.has_work and self._next() is None)
            self._progress = monotonic()
            if self._stopping:
                return
            self._drop_closed_loops()
            self._admit()
            if self.engine.has_work:
                self.engine.step()
                self._publish()
                if self._stats is not None:
                    self._stats.after_step(self.engine)
            if self._drains and not self._tickets:
                for future in self._drains:
                    self._settle(future, None)
                self._drains = []

    def _take_commands(self, wait: bool) -> None:
        """Run all queued commands; with `wait`, wait for the first one."""
        while True:
            try:
                command = self._inbox.get(block=wait)
            except Empty:
                return
            command()
            wait = False

    def _fail_waiting(self) -> None:
        """Fail everything that awaits a reply. May be called repeatedly."""
        for waiting in self._open.copy():
            error = self.death or EngineDeadError(SHUT_DOWN)
            if isinstance(waiting, Ticket):
                with suppress(RuntimeError):  # its event loop is closed
                    waiting.loop.call_soon_threadsafe(waiting.receive, error)
            else:
                with suppress(InvalidStateError):  # cancelled
                    waiting.set_exception(error)
            self._open.discard(waiting)

    # ---- commands ------------------------------------------------------------------------

    def _enter(self, ticket: Ticket) -> None:
        if self._draining:
            self._finish(ticket, EngineDeadError(DRAINED))
        elif ticket.request_id in self._tickets:
            text = f"There is already an unfinished request with the id {ticket.request_id!r}."
            self._finish(ticket, InvalidRequestError(text))
        else:
            self._tickets[ticket.request_id] = ticket
            insort(self._queue, ticket, key=attrgetter("key"))

    def _ready(self, ticket: Ticket, request: Request | Exception) -> None:
        if not self._knows(ticket):
            return
        if isinstance(request, Request):
            ticket.request = request
        else:
            self._forget(ticket)
            self._finish(ticket, request)

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
            self._finish(ticket, ticket.aborted_output() if live is None else ticket.output(live))
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
        with suppress(InvalidStateError):  # cancelled
            future.set_result(result)
        self._open.discard(future)

    # ---- requests ------------------------------------------------------------------------

    def _knows(self, ticket: Ticket) -> bool:
        return self._tickets.get(ticket.request_id) is ticket

    def _forget(self, ticket: Ticket) -> None:
        del self._tickets[ticket.request_id]
        if self._held.pop(ticket.request_id, None) is None:
            del self._queue[bisect_left(self._queue, ticket.key, key=attrgetter("key"))]
        elif ticket.live is not None:
            self._num_tokens += ticket.live.num_tokens

    def _finish(self, ticket: Ticket, result: Result) -> None:
        """Send the last result of a request that is not in `_tickets`."""
        self._post(ticket.loop, [(ticket, result)])
        self._open.discard(ticket)

    def _post(self, loop: asyncio.AbstractEventLoop, results: list[tuple[Ticket, Result]]) -> None:
        with suppress(RuntimeError):  # the loop is closed: `_drop_closed_loops` drops its tickets
            loop.call_soon_threadsafe(deliver, results)

    def _drop_closed_loops(self) -> None:
        for ticket in [held for held in self._held.values() if held.loop.is_closed()]:
            self._leave(ticket)

    def _next(self) -> Ticket | None:
        """The next ticket to admit, if any. A prompt that is still being tokenised blocks the
        tickets after it; a constraint that is still being compiled does not."""
        for ticket in self._queue if len(self._held) < self.max_num_requests else ():
            if ticket.request is not None or not ticket.compiles:
                return ticket if ticket.request is not None else None
        return None

    def _admit(self) -> None:
        """Add queued requests to the engine, up to `max_num_requests`."""
        while (ticket := self._next()) is not None and ticket.request is not None:
            self._queue.remove(ticket)
            self._held[ticket.request_id] = ticket
            try:
                ticket.live = self.engine.add(ticket.request)
            except InvalidRequestError as error:
                self._forget(ticket)
                self._finish(ticket, error)

    def _publish(self) -> None:
        """Send outputs to the consumers that await one, and the last outputs to all."""
        posts, ended = dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Result]]](), []
        # First outputs are never delayed; later ones share a step, so that the loop wakes up once.
        due = monotonic() - self._sent >= len(self._held) / self.max_rate
        self._sent = monotonic() if due else self._sent
        for ticket in self._held.values():
            live = ticket.live
            if live is None or live.num_updates == ticket.seen:
                continue
            finished = live.finished
            wanted = ticket.wanted and ticket.kind is not RequestOutputKind.FINAL_ONLY
            if finished or (wanted and (due or not ticket.seen)):
                ticket.seen, ticket.wanted = live.num_updates, False
                posts.setdefault(ticket.loop, []).append((ticket, ticket.output(live)))
            if finished:
                ended.append(ticket)
        for loop, results in posts.items():
            self._post(loop, results)
        for ticket in ended:
            self._forget(ticket)
            self._open.discard(ticket)
