"""A rank that connects to a driver on another machine, and then lives as other ranks do."""

import json
import os
import select
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

from minillm.errors import CheckpointError, ConfigError, ModelNotFoundError, NodeError
from minillm.parallel.fingerprint import check_fingerprint, fingerprint
from minillm.parallel.listener import Listener, connect, interface_address
from minillm.parallel.meeting import Meeting
from minillm.parallel.messages import Channel, SetUp
from minillm.parallel.sockets import hang_up
from minillm.parallel.worker import serve

PATIENCE = 60.0  # seconds in which the driver has to answer


def split_address(text: str) -> tuple[str, int]:
    """ "host:port" -> its parts. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{text!r} is no address; write HOST:PORT, as the driver shows it.")
    return host.strip("[]"), int(port)


def serve_rank(
    address: str,
    secret: bytes,
    host_here: str | None = None,
    number: int | None = None,
    model: str | None = None,
    patience: float = PATIENCE,
) -> None:
    """Serve one engine as a rank, until its driver closes it.

    Args:
        address: host:port of the driver.
        secret: the same on all nodes.
        host_here: interface at which the other ranks connect to this one; the one that leads to the
            driver if None.
        number: of this rank; the driver chooses if None.
        model: where this node has the model, if not where the driver has it.
        patience: seconds in which the driver has to answer.

    Raises:
        NodeError: no driver, no trust, other versions, or the driver ended.
        MinillmError: what else the rank failed of; the driver reports it too.
    """
    host, port = split_address(address)
    here = interface_address(host_here) if host_here else way_to(host, port)
    listener = Listener(here, 0, secret)
    meeting = Meeting(listener, secret)
    try:
        more = {"rank": number, "address": listener.address}
        arrival = connect(host, port, secret, patience, host_here, **more)
        channel = Channel(arrival.connection)
        done = Event()
        Thread(target=watch, args=(arrival.connection, address, done), daemon=True).start()
        with arrival.connection:
            error = serve(channel, partial(read_set_up, model=model), meeting.join)
            done.set()
            with suppress(OSError):
                arrival.connection.shutdown(socket.SHUT_RDWR)  # close alone leaves it to `watch`
    finally:
        meeting.close()
    if isinstance(error, StopIteration | ConnectionError):
        raise NodeError(f"The driver at {address} has ended; its own message says why.")
    if error is not None:
        raise error


def way_to(host: str, port: int) -> str:
    """This machine's address on the way to another; nothing is sent."""
    try:
        kind, *_, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise NodeError(
            f"There is no way to {host}:{port} ({error.strerror}); give the address that the "
            "driver listens at."
        ) from None


def watch(connection: socket.socket, address: str, done: Event) -> None:
    """End this process when the driver has ended, also in the middle of a step."""
    poll = select.poll()
    poll.register(connection, hang_up())
    with suppress(OSError, ValueError):  # closed here
        poll.poll()
        if done.is_set():
            return
        with suppress(OSError):
            sys.stderr.write(f"error: The driver at {address} has ended, and so this rank.\n")
            sys.stderr.flush()
        os._exit(1)


def read_set_up(data: bytes, model: str | None) -> SetUp:
    """What the driver says, with the models where this node has them.

    Raises CheckpointError where they are not there, or differ.
    """
    given = json.loads(data)
    sources = {"model": given["source"]}
    if given["draft"]:
        sources["draft"] = given["draft"]["source"]
    for what, each in sources.items():
        if what == "model" and model is not None:
            each["where"] = model
        elif not Path(each["where"]).is_dir():
            each["where"] = each["hub_id"] or each["name"]
    prints: dict[str, Any] = given["fingerprint"]
    node = str(prints["node"])
    try:
        set_up = SetUp.from_bytes(json.dumps(given).encode())
    except ModelNotFoundError as error:
        raise CheckpointError(
            f"Node {socket.gethostname()} does not have the model of node {node}: {error} Copy it "
            "to the same place, or name its folder with `minillm node --model`."
        ) from None
    for what, each in sources.items():
        source = set_up.draft.source if what == "draft" and set_up.draft else set_up.source
        mine = fingerprint(source, set_up.args.load_format)
        check_fingerprint(prints[what], mine, node, each["where"], what)
    return set_up
