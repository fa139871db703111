"""The driver's threads that communicate with ranks that are processes, and end them.

    any thread --- order(PLAN, ..) --> [ posted ] --> sending thread ---> rank 0, rank 1, ..
         Future <------------ answers of all ranks <-- a reading thread for each rank <--|

No other thread uses the connections, so Ctrl-C never leaves half a message. When a rank ends, fails
or does not answer, `RankLoop` itself ends the others, and all pending orders raise the cause.
"""

import logging
import signal
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Lock, Thread, current_thread
from time import monotonic
from typing import IO

from minillm.errors import MinillmError, in_one_line
from minillm.parallel.messages import Kind, Message
from minillm.parallel.rank_process import Failure, Rank, find_cause, hang_up, no_answer

logger = logging.getLogger(__name__)

CLOSED = "This engine is closed; make a new one."
GRACE = 0.2  # seconds to learn whether another rank failed first
SECONDS_TO_CLOSE = 5.0  # for the last step, before SIGTERM
SECONDS_TO_END = 2.0  # after SIGTERM, before SIGKILL
LOOK = 0.2  # seconds between checks for overdue orders
POLL = 0.02  # seconds between checks of processes that are ending


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
        self._posted: SimpleQueue[Order | None] = SimpleQueue()
        self._alarms: SimpleQueue[None] = SimpleQueue()  # wakes this thread
        self._lock = Lock()  # of the next two
        self._waiting: deque[Order] = deque()
        self._num_orders = 0
        self._ended = self._stopping = False
        self._decides_at: float | None = None
        self._sender = Thread(target=self._send_orders, name="minillm-orders", daemon=True)
        self._readers: list[tuple[Rank, Thread]] = []

    # ---- from any thread -----------------------------------------------------------------

    def order(self, kind: Kind, bodies: Sequence[bytes], patience: float) -> "Future[list[bytes]]":
        """Send an order; the future has the answers in rank order, or raises the failure."""
        order = Order(kind, bodies, patience)
        self._posted.put(order)
        if self._ended:
            self._fail_orders()
        return order.future

    def stop(self) -> None:
        """End all ranks and wait until they have ended. Idempotent."""
        self._stopping = True
        self._alarms.put(None)
        own = self, self._sender, *(thread for _, thread in self._readers)
        if current_thread() not in own:  # which may collect the engine as garbage
            self.join()

    # ---- the thread ----------------------------------------------------------------------

    def run(self) -> None:
        """Until all processes have ended."""
        try:
            for number in range(self.size):
                if not self._stopping:
                    self._add(self._spawn(number))
            self._sender.start()
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
        with self._lock:
            waits = any(order.kind is Kind.SET_UP for order in self._waiting)
            return waits or not self._num_orders

    def _add(self, rank: Rank) -> None:
        self.ranks.append(rank)
        self._read(self._read_messages, rank)
        if rank.stderr is not None:
            self._read(self._read_lines, rank)

    def _read(self, call: Callable[[Rank], None], rank: Rank) -> None:
        thread = Thread(target=call, args=(rank,), name=f"minillm-rank-{rank.number}", daemon=True)
        self._readers.append((rank, thread))
        thread.start()

    def _turn(self) -> None:
        """Wait for a failure or for the next check."""
        self._wait(LOOK if self._decides_at is None else POLL)
        with self._lock:
            oldest = self._waiting[0] if self._waiting else None
        if self._decides_at is not None:
            codes = [rank.code for rank in self.ranks]
            is_clear = None not in codes or any(code is not None and code < 0 for code in codes)
            if is_clear or monotonic() >= self._decides_at:
                self._hear_out()
                self.failure = self.failure or find_cause(self.ranks, oldest is not None)
        elif oldest is not None and oldest.due is not None and oldest.due <= monotonic():
            missing = [rank for rank in self.ranks if rank.number not in oldest.answers]
            self.failure = no_answer(missing, self.size)

    def _wait(self, seconds: float) -> None:
        with suppress(Empty):
            self._alarms.get(timeout=seconds)

    def _hear_out(self) -> None:
        """Wait for the last messages and lines of ranks that have ended."""
        for rank, thread in self._readers:
            if rank.code is not None:
                thread.join(GRACE)

    def _set_due(self) -> None:
        if self._waiting and self._waiting[0].due is None:
            self._waiting[0].due = monotonic() + self._waiting[0].patience

    # ---- the other threads ---------------------------------------------------------------

    def _send_orders(self) -> None:
        while (order := self._posted.get()) is not None:
            with self._lock:
                order.number, self._num_orders = self._num_orders, self._num_orders + 1
                self._waiting.append(order)
                self._set_due()
            messages = [Message(order.kind, order.number, body) for body in order.bodies]
            for rank in self.ranks:
                with suppress(OSError):  # its reader notices that it is gone
                    messages[rank.number if len(messages) > 1 else 0].send(rank.connection)

    def _read_messages(self, rank: Rank) -> None:
        try:
            while True:
                self._receive(rank, Message.receive(rank.connection))
        except (EOFError, OSError):
            rank.is_open = False
        except Exception as error:
            self.failure = Failure(f"Rank {rank.number} cannot be read: {in_one_line(error)}")
        self._note_failure()

    def _receive(self, rank: Rank, message: Message) -> None:
        if message.kind is Kind.DONE:
            rank.doing = ""
            self._note_answer(rank, message)
        elif message.kind is Kind.NOTE:
            rank.doing = message.plain
            logger.info("rank %d: %s", rank.number, rank.doing)
        elif message.kind is Kind.LOG:
            level, name, text = message.plain
            logging.getLogger(name).log(level, "rank %d: %s", rank.number, text)
        elif message.kind is Kind.ERROR:
            rank.error = message.plain
            self._note_failure()

    def _note_answer(self, rank: Rank, message: Message) -> None:
        with self._lock:
            order = next(waiting for waiting in self._waiting if waiting.number == message.number)
            order.answers[rank.number] = message.body
            if len(order.answers) < self.size:
                return
            self._waiting.popleft()  # ranks answer in the order of the orders
            self._set_due()
        with suppress(InvalidStateError):
            order.future.set_result([order.answers[number] for number in range(self.size)])

    def _note_failure(self) -> None:
        """A rank has failed; `GRACE` later the first cause is known."""
        if self._decides_at is None:
            self._decides_at = monotonic() + GRACE
        self._alarms.put(None)

    def _read_lines(self, rank: Rank) -> None:
        lines: IO[str] | tuple[str, ...] = rank.stderr or ()
        for line in filter(None, map(str.rstrip, lines)):
            rank.last_line = line.strip()
            logger.warning("rank %d: %s", rank.number, line)

    # ---- the end -------------------------------------------------------------------------

    def _close_ranks(self) -> None:
        """Ask the ranks to end; those that are still running later get SIGTERM."""
        self._posted.put(Order(Kind.CLOSE, [b""], SECONDS_TO_CLOSE))
        if not self._end_within(SECONDS_TO_CLOSE):
            for rank in self.ranks:
                rank.end(signal.SIGTERM)
            self._end_within(SECONDS_TO_END)

    def _end_within(self, seconds: float) -> bool:
        """Whether all processes have ended."""
        end = monotonic() + seconds
        while any(rank.code is None for rank in self.ranks) and monotonic() < end:
            self._wait(POLL)
        return all(rank.code is not None for rank in self.ranks)

    def _end_all(self) -> None:
        """Kill the processes that still run, and release everything."""
        for rank in self.ranks:
            rank.end(signal.SIGKILL)
        self._end_within(SECONDS_TO_END)
        for rank in self.ranks:
            hang_up(rank.connection)  # which wakes threads that still read or send
        self._posted.put(None)
        if self._sender.ident is not None:
            self._sender.join(SECONDS_TO_END)
        for _, thread in self._readers:
            thread.join(SECONDS_TO_END)
        busy = [rank for rank, thread in self._readers if thread.is_alive()]
        for rank in self.ranks:
            rank.connection.close()
            if rank.stderr is not None and rank not in busy:  # a child of the rank holds its end
                rank.stderr.close()
        self._release()

    def _fail_orders(self) -> None:
        """Make all pending orders raise."""
        failure = self.failure or Failure(CLOSED)
        with suppress(Empty):
            while True:
                if (order := self._posted.get_nowait()) is not None:
                    self._waiting.append(order)
        while self._waiting:
            with suppress(InvalidStateError, IndexError):
                self._waiting.popleft().future.set_exception(failure.error())
