"""A rank as a process: ``python -m minillm.parallel.worker SOCKET LIFE``, two file descriptors.

It builds what the driver's first message says, carries out plans in their order, and ends when it
is told to, when the driver is gone, or with an error, which it reports. Modules that need torch
are imported late: from the first moment on Ctrl-C is ignored and the driver's life is watched.
"""

import gc
import json
import logging
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import astuple
from threading import Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from minillm.execution.runner import Runner
    from minillm.parallel.messages import Channel, Message, SetUp
    from minillm.parallel.place import Place

LOOK = 1.0  # seconds between two looks at the parent's id


def watch(life: int, parent: int) -> None:
    """End this process when the driver has ended: then the pipe has no writer any more, or, where
    the driver was forked and a copy of it holds the pipe, the parent is another."""
    while not select.select([life], [], [], LOOK)[0] and os.getppid() == parent:
        pass
    os._exit(1)


def main(connection: int, life: int) -> None:
    """Live as a rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the driver decides what ends
    Thread(target=watch, args=(life, os.getppid()), daemon=True).start()
    os.set_inheritable(connection, False)
    os.set_inheritable(life, False)
    os.dup2(2, 1)  # what libraries print is read as stderr is
    from minillm.parallel.messages import Channel

    channel = Channel(socket.socket(fileno=connection))
    code = 1 if serve(channel) else 0
    sys.stderr.flush()
    os._exit(code)  # without the interpreter's end, which takes a quarter of a second


def serve(
    channel: "Channel",
    read: "Callable[[bytes], SetUp] | None" = None,
    join: "Callable[[dict[str, Any]], Place] | None" = None,
) -> BaseException | None:
    """Carry out orders until the last; an error ends it, and is returned. Ranks on other machines
    read the first message and join the others in ways of their own."""
    from minillm.parallel import groups
    from minillm.parallel.messages import Kind, SetUp

    place: Place | None = None
    try:
        messages = channel.messages()
        set_up = (read or SetUp.from_bytes)(next(messages).body)
        logging.basicConfig(level=set_up.log_level, handlers=[Telling(channel)], force=True)
        channel.send(Kind.NOTE, b'"joining the others"')
        place = (join or groups.join)(set_up.group)
        channel.send(Kind.NOTE, b'"loading the model"')
        runner = build(set_up, place)
        gc.freeze()  # the collector need not look at torch's objects again and again
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
            channel.send(Kind.ERROR, last_words(error))
        return error
    return None


def build(set_up: "SetUp", place: "Place") -> "Runner":
    """The rank's runner."""
    import torch

    from minillm.execution.setup import limit_threads
    from minillm.parallel.rank import build_rank

    limit_threads()
    parts = set_up.args, set_up.source, set_up.plan, torch.device(set_up.device)
    return build_rank(*parts, place, set_up.draft)


def answer(runner: "Runner", message: "Message", place: "Place") -> bytes:
    """Carry out one order. Of a plan each rank tells its times and the hash of its tokens, and the
    first rank of the last stage tells all."""
    from minillm.execution.wire import result_to_bytes
    from minillm.parallel.executor import carried_out, token_hash
    from minillm.parallel.messages import TIMES, Kind

    if message.kind is Kind.PLAN:
        result, time = carried_out(message.body, runner, place)
        tells = place.stage.is_last and not place.split.rank
        head = TIMES.pack(time.seconds, time.communicating) + token_hash(result).encode()
        return head + (result_to_bytes(result) if tells else b"")
    if message.kind is Kind.RESET:
        runner.reset()
        return b""
    return json.dumps(runner.stats()).encode()


def last_words(error: BaseException) -> bytes:
    """An error's type, its sentence and where it was raised."""
    from minillm.errors import MinillmError, in_one_line

    known = isinstance(error, MinillmError)
    text = str(error) if known else in_one_line(error)
    return json.dumps([type(error).__name__, text, traceback.format_exc()]).encode()


class Telling(logging.Handler):
    """Sends what is logged to the driver."""

    def __init__(self, channel: "Channel"):
        super().__init__()
        self.channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        """Level, logger and text."""
        from minillm.parallel.messages import Kind

        told = record.levelno, record.name, record.getMessage()
        with suppress(OSError):  # the driver is gone
            self.channel.send(Kind.LOG, json.dumps(told).encode())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
