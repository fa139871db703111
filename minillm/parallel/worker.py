"""A rank as a process: ``python -m minillm.parallel.worker SOCKET``, a file descriptor.

It builds what the driver's first message describes, carries out plans in order, and ends when the
driver says so, when the driver is gone, or with an error, which it reports. Modules that need torch
are imported late: Ctrl-C is ignored and the driver is watched from the first moment.
"""

import gc
import json
import logging
import os
import select
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import astuple
from multiprocessing.connection import Connection
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from minillm.execution.runner import Runner
    from minillm.parallel.meeting import Address
    from minillm.parallel.messages import Channel, Message, SetUp
    from minillm.parallel.place import Place

LOOK = 1.0  # seconds between checks of the parent process
HANG_UP = int(getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR)  # peer has closed


def watch(connection: Connection, parent: int | None, done: Event) -> None:
    """End this process when the driver has ended, also in the middle of a step: it has closed the
    connection, or, where a fork of it still holds its end, is no longer the `parent`."""
    poll = select.poll()
    poll.register(connection, HANG_UP)
    while not poll.poll(LOOK * 1000) and parent in (None, os.getppid()):
        pass
    if not done.is_set():
        with suppress(OSError):
            sys.stderr.write("error: The driver has ended, and so this rank.\n")
            sys.stderr.flush()
        os._exit(1)


def main(number: int) -> None:
    """Run a rank in this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the driver decides what ends
    os.set_inheritable(number, False)
    connection = Connection(number)
    Thread(target=watch, args=(connection, os.getppid(), Event()), daemon=True).start()
    os.dup2(2, 1)  # the driver reads stderr, so what libraries print goes there
    from minillm.parallel import groups
    from minillm.parallel.messages import Channel

    code = 1 if serve(Channel(connection), groups.join) else 0
    sys.stderr.flush()
    os._exit(code)  # skips the interpreter's shutdown, which takes a quarter of a second


def serve(channel: "Channel", join: "Callable[[dict[str, Any]], Place]") -> BaseException | None:
    """Read the set-up, `join` the other ranks, and carry out orders until CLOSE; returns the error
    that ended it, if any."""
    from minillm.parallel.messages import Kind, SetUp

    place: Place | None = None
    try:
        messages = channel.messages()
        set_up = SetUp.from_bytes(next(messages).body)
        logging.basicConfig(level=set_up.log_level, handlers=[ToDriver(channel)], force=True)
        channel.send(Kind.NOTE, b'"joining the others"')
        place = join(set_up.group)
        channel.send(Kind.NOTE, b'"loading the model"')
        runner = build(set_up, place)
        gc.freeze()  # garbage collection skips the objects that exist now
        channel.send(Kind.DONE, json.dumps(astuple(runner.capacity())).encode())
        for message in messages:
            if message.kind is Kind.CLOSE:
                break
            channel.send(Kind.DONE, answer(runner, message, place), message.number)
        else:
            raise ConnectionError("the driver has ended")
        place.close()
    except BaseException as error:
        if place is not None:
            place.abort()
        with suppress(OSError):
            channel.send(Kind.ERROR, described(error))
        return error
    return None


def build(set_up: "SetUp", place: "Place") -> "Runner":
    """The rank's runner."""
    from minillm.execution.setup import limit_threads
    from minillm.parallel.rank import build_rank

    limit_threads()
    return build_rank(set_up, place)


def answer(runner: "Runner", message: "Message", place: "Place") -> bytes:
    """Carry out one order."""
    from minillm.execution.wire import to_bytes
    from minillm.parallel.executor import carried_out
    from minillm.parallel.messages import Kind

    if message.kind is Kind.PLAN:
        return to_bytes(carried_out(message.body, runner, place))
    if message.kind is Kind.RESET:
        runner.reset()
        return b""
    return json.dumps(runner.stats()).encode()


def described(error: BaseException) -> bytes:
    """An error's type, message and traceback."""
    from minillm.errors import MinillmError, in_one_line

    text = str(error) if isinstance(error, MinillmError) else in_one_line(error)
    return json.dumps([type(error).__name__, text, traceback.format_exc()]).encode()


class ToDriver(logging.Handler):
    """Sends log records to the driver."""

    def __init__(self, channel: "Channel"):
        super().__init__()
        self.channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        """Level, logger and text."""
        from minillm.parallel.messages import Kind

        plain = record.levelno, record.name, record.getMessage()
        with suppress(OSError):  # the driver is gone
            self.channel.send(Kind.LOG, json.dumps(plain).encode())


def serve_torchrun() -> None:
    """Serve one engine as the rank that torchrun has started, until its driver closes it."""
    from minillm.parallel.meeting import torchrun_address

    signals = signal.SIGINT, signal.SIGTERM  # torchrun sends them to all: the driver decides
    serve_rank(torchrun_address(), int(os.environ["RANK"]), signals)


def serve_rank(address: "Address", rank: int, ignored: "Sequence[signal.Signals]" = ()) -> None:
    """Serve one engine as a rank, until its driver closes it.

    Args:
        address: of the store.
        rank: its number.
        ignored: signals that no longer end this process once the driver has connected.

    Raises:
        NodeError: the driver does not come, or has ended.
        MinillmError: any other failure of the rank, which the driver reports, too.
    """
    from minillm.errors import NodeError
    from minillm.parallel.groups import join
    from minillm.parallel.meeting import DRIVER, Meeting
    from minillm.parallel.messages import Channel
    from minillm.parallel.rank_process import hang_up

    met, done = Meeting(address, rank), Event()
    try:
        with Connection(met.link(DRIVER).detach()) as connection:
            for signal_number in ignored:
                signal.signal(signal_number, signal.SIG_IGN)
            Thread(target=watch, args=(connection, None, done), daemon=True).start()
            error = serve(Channel(connection), lambda plain: join(plain, met))
            done.set()
            hang_up(connection)  # `watch` still holds it
    finally:
        met.close()
    if isinstance(error, StopIteration | ConnectionError):
        raise NodeError("The driver has ended; its own message says why.")
    if error is not None:
        raise error


if __name__ == "__main__":
    main(int(sys.argv[1]))
