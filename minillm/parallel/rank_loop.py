"""The driver's thread that communicates with ranks that are processes, and ends them.

    any thread --- order(PLAN, ..) --> [ posted ] --> this thread --- frames ---> rank 0, rank 1, ..
         Future <--------------------------------------- answers of all ranks <--|

Only this thread uses the sockets, so Ctrl-C in another thread never leaves half a message. When a
rank ends, fails or does not answer, it ends the others, and all pending orders raise the cause.
"""

import logging
import os
import selectors
import socket
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Thread, current_thread
from time import monotonic
from typing import IO

from minillm.errors import MinillmError, in_one_line
from minillm.parallel.messages import Kind, Message
from minillm.parallel.rank_process import Failure, Rank, find_cause, no_answer

logger = logging.getLogger(__name__)

CLOSED = "This engine is closed; make a new one."
GRACE = 0.2  # seconds to learn whether another rank failed first
SECONDS_TO_CLOSE = 5.0  # for the last step, before SIGTERM
SECONDS_TO_END = 2.0  # after SIGTERM, before SIGKILL
POLL = 0.02  # seconds between checks of processes that are ending
CHUNK = 1 << 16  # bytes per read


@dataclass(eq=False)
class Order:
    """A message to all ranks, and their answers."""

    kind: Kind
    bodies: Sequence[bytes]  # one per rank, or one for all
    patience: float
    future: "Future[list[bytes]]" = field(default_factory=Future)
    number: int = 0
    due: float | None = None  # set when it becomes the oldest
    answers: dict[int, bytes] = field(default_factory=dict)


class RankLoop(Thread):
    """Starts `size` ranks and serves them until `stop`, or until one of them fails."""

    def __init__(self, size: int, spawn: Callable[[int], Rank], release: Callable[[], None]):
        super().__init__(name="minillm-ranks", daemon=True)
        self.size, self._spawn, self._release = size, spawn, release
        self.failure: Failure | None = None  # once set, no order is carried out
        self.when_dead: Callable[[MinillmError], None] | None = None
        self.ranks: list[Rank] = []
        self._posted: deque[Order] = deque()
        self._waiting: deque[Order] = deque()
        self._num_orders = 0
        self._ended = self._stopping = False
        self._decides_at: float | None = None
        self._wake_up, self._wake = socket.socketpair()
        self._wake_up.setblocking(False)
        self._wake.setblocking(False)
        self._selector = selectors.DefaultSelector()

    # ---- from any thread -----------------------------------------------------------------

    def order(self, kind: Kind, bodies: Sequence[bytes], patience: float) -> "Future[list[bytes]]":
        """Send an order; the future has the answers in rank order, or raises the failure."""
        order = Order(kind, bodies, patience)
        self._posted.append(order)
        self._wake_thread()
        if self._ended:
            self._fail_orders()
        return order.future

    def stop(self) -> None:
        """End all ranks and wait until they have ended. Idempotent."""
        self._stopping = True
        self._wake_thread()
        if current_thread() is not self:  # which may collect the engine as garbage
            self.join()

    def _wake_thread(self) -> None:
        with suppress(OSError):  # the buffer is full, or the thread has ended
            self._wake_up.send(b".")

    # ---- the thread ----------------------------------------------------------------------

    def run(self) -> None:
        """Until all processes have ended."""
        try:
            self._watch(self._wake, self._take_orders)
            for number in range(self.size):
                if not self._stopping:
                    self._add(self._spawn(number))
            while not self._stopping and self.failure is None:
                self._turn()
            if self.failure is None and not self._is_starting:
                self._close_ranks()
        except BaseException as error:
            self.failure = Failure(f"The ranks cannot be served: {in_one_line(error)}")
        self._end_all()
        self._ended = True
        self._fail_orders()
        if self.failure is not None and self.when_dead is not None:
            self.when_dead(self.failure.error())

    @property
    def _is_starting(self) -> bool:
        return not self._num_orders or any(each.kind is Kind.SET_UP for each in self._waiting)

    def _add(self, rank: Rank) -> None:
        self.ranks.append(rank)
        rank.connection.setblocking(False)
        self._watch(rank.connection, partial(self._serve, rank))
        if rank.stderr is not None:
            os.set_blocking(rank.stderr.fileno(), False)
            self._watch(rank.stderr, partial(self._read_lines, rank, rank.stderr))

    def _watch(self, file: socket.socket | IO[bytes], call: Callable[[int], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, call)

    def _turn(self) -> None:
        """Wait for an event, or until the oldest order is overdue."""
        due = self._waiting[0].due if self._waiting else None
        if self._decides_at is not None:
            self._select(POLL)
            codes = [each.code for each in self.ranks]
            found = None not in codes or any(code is not None and code < 0 for code in codes)
            if found or monotonic() >= self._decides_at:
                self.failure = find_cause(self.ranks, bool(self._waiting))
        elif due is not None and due <= monotonic():
            missing = [each for each in self.ranks if each.number not in self._waiting[0].answers]
            self.failure = no_answer(missing, self.size)
        else:
            self._select(None if due is None else due - monotonic())

    def _select(self, timeout: float | None) -> None:
        for key, events in self._selector.select(timeout):
            key.data(events)

    def _take_orders(self, _: int) -> None:
        with suppress(BlockingIOError):
            while self._wake.recv(CHUNK):
                pass
        while self._posted:
            order = self._posted.popleft()
            order.number, self._num_orders = self._num_orders, self._num_orders + 1
            self._waiting.append(order)
            self._send([Message(order.kind, order.number, each) for each in order.bodies])
        self._set_due()

    def _send(self, messages: Sequence[Message]) -> None:
        frames = [each.frame for each in messages]
        for rank in self.ranks:
            rank.unsent.append(memoryview(frames[rank.number if len(frames) > 1 else 0]))
            self._write(rank)

    def _set_due(self) -> None:
        if self._waiting and self._waiting[0].due is None:
            self._waiting[0].due = monotonic() + self._waiting[0].patience

    # ---- sockets -------------------------------------------------------------------------

    def _serve(self, rank: Rank, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._write(rank)
        if events & selectors.EVENT_READ:
            self._read(rank)

    def _write(self, rank: Rank) -> None:
        if not rank.is_open:
            return
        try:
            while rank.unsent:
                sent = rank.connection.send(rank.unsent[0])
                rank.unsent[0] = rank.unsent[0][sent:]
                if not rank.unsent[0]:
                    rank.unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:  # its last messages are still to be read
            rank.unsent.clear()
        key = self._selector.get_key(rank.connection)
        events = selectors.EVENT_READ | selectors.EVENT_WRITE * bool(rank.unsent)
        if events != key.events:
            self._selector.modify(rank.connection, events, key.data)

    def _read(self, rank: Rank) -> None:
        try:
            data = rank.connection.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        for message in rank.frames.add(data):
            self._receive(rank, message)
        if not data:
            rank.is_open = False
            self._selector.unregister(rank.connection)
            self._note_failure()

    def _receive(self, rank: Rank, message: Message) -> None:
        if message.kind is Kind.DONE:
            rank.doing = ""
            order = next(each for each in self._waiting if each.number == message.number)
            order.answers[rank.number] = message.body
            if len(order.answers) == self.size:
                self._waiting.popleft()  # ranks answer in the order of the orders
                self._set_due()
                with suppress(InvalidStateError):
                    order.future.set_result([order.answers[each] for each in range(self.size)])
        elif message.kind is Kind.NOTE:
            rank.doing = message.plain
            logger.info("rank %d: %s", rank.number, rank.doing)
        elif message.kind is Kind.LOG:
            level, name, text = message.plain
            logging.getLogger(name).log(level, "rank %d: %s", rank.number, text)
        elif message.kind is Kind.ERROR:
            rank.error = message.plain
            self._note_failure()

    def _note_failure(self) -> None:
        """A rank has failed; `GRACE` later the first cause is known."""
        if self._decides_at is None:
            self._decides_at = monotonic() + GRACE

    def _read_lines(self, rank: Rank, stderr: IO[bytes], _: int) -> None:
        try:
            data = os.read(stderr.fileno(), CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(stderr)
            data = b"\n"
        *lines, rest = (rank.lines.pop() + data.decode(errors="replace")).split("\n")
        rank.lines.extend([*lines, rest])
        for line in filter(None, map(str.rstrip, lines)):
            logger.warning("rank %d: %s", rank.number, line)

    # ---- the end -------------------------------------------------------------------------

    def _close_ranks(self) -> None:
        """Ask the ranks to end; those that are still running later get SIGTERM."""
        self._send([Message(Kind.CLOSE, 0, b"")])
        if not self._end_within(SECONDS_TO_CLOSE):
            for rank in self.ranks:
                rank.process.terminate()
            self._end_within(SECONDS_TO_END)

    def _end_within(self, seconds: float) -> bool:
        """Whether all processes have ended; their output is read meanwhile."""
        end = monotonic() + seconds
        while any(each.code is None for each in self.ranks) and monotonic() < end:
            self._select(POLL)
        return all(each.code is not None for each in self.ranks)

    def _end_all(self) -> None:
        """Kill the processes that still run, and release everything."""
        for rank in self.ranks:
            rank.process.kill()  # Popen sends nothing to a process that has been waited for
        with suppress(BaseException):
            self._end_within(SECONDS_TO_END)
        for rank in self.ranks:
            rank.connection.close()
            if rank.stderr is not None:
                rank.stderr.close()
        self._selector.close()
        self._wake_up.close()
        self._wake.close()
        self._release()

    def _fail_orders(self) -> None:
        """Make all pending orders raise."""
        failure = self.failure or Failure(CLOSED)
        for orders in (self._waiting, self._posted):
            while orders:
                with suppress(InvalidStateError, IndexError):
                    orders.popleft().future.set_exception(failure.error())
