"""A rank that connects to a driver on another machine, and to the other ranks.

Each rank listens at an address that the driver passes on. Of two ranks the one with the higher
number connects; the name of the link includes the engine, which keeps ranks of two engines apart.
"""

import json
import os
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any

from minillm.errors import CheckpointError, ConfigError, ModelNotFoundError, NodeError
from minillm.parallel.fingerprint import check_fingerprint, fingerprint
from minillm.parallel.handshake import MOST, Listener, connect, interface_address
from minillm.parallel.messages import Channel, SetUp
from minillm.parallel.place import Place, Topology
from minillm.parallel.worker import serve, wait_for_end

PATIENCE = 60.0  # seconds in which the driver has to answer
START_PATIENCE = 300.0  # seconds in which the other ranks connect


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
        host_here: interface at which the other ranks connect to this one; by default the one that
            leads to the driver.
        number: of this rank; by default the driver chooses.
        model: folder of the model on this node, if it differs from the driver's.
        patience: seconds in which the driver has to answer.

    Raises:
        NodeError: the driver does not answer, fails the handshake, or has ended.
        MinillmError: any other failure of the rank, which the driver reports too.
    """
    host, port = split_address(address)
    listener = Listener(
        interface_address(host_here) if host_here else way_to(host, port), 0, secret
    )
    meeting = Meeting(listener, secret)
    try:
        more = {"rank": number, "address": listener.address}
        arrival = connect(host, port, secret, patience, host_here, **more)
        done = Event()
        Thread(target=watch, args=(arrival.connection, address, done), daemon=True).start()
        with arrival.connection:
            read = partial(read_set_up, model=model)
            error = serve(Channel(arrival.connection), read, meeting.join)
            done.set()
            with suppress(OSError):
                arrival.connection.shutdown(socket.SHUT_RDWR)  # `watch` still holds it
    finally:
        meeting.close()
    if isinstance(error, StopIteration | ConnectionError):
        raise NodeError(f"The driver at {address} has ended; its own message says why.")
    if error is not None:
        raise error


def way_to(host: str, port: int) -> str:
    """This machine's address on the route to another; nothing is sent."""
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
    with suppress(OSError, ValueError):  # closed here
        wait_for_end(connection)
        if done.is_set():
            return
        with suppress(OSError):
            sys.stderr.write(f"error: The driver at {address} has ended, and so this rank.\n")
            sys.stderr.flush()
        os._exit(1)


def read_set_up(data: bytes, model: str | None) -> SetUp:
    """The driver's first message, with the models where this node has them.

    Raises CheckpointError where they are missing or differ.
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
    for what, source in set_up.sources.items():
        mine = fingerprint(source, set_up.args.load_format)
        check_fingerprint(prints[what], mine, node, sources[what]["where"], what)
    return set_up


class Meeting:
    """A rank's connections to the other ranks; `listener` is its own."""

    def __init__(self, listener: Listener, secret: bytes):
        self._listener, self._secret = listener, secret
        self._arrived: dict[str, socket.socket] = {}

    def join(self, plain: dict[str, Any]) -> Place:
        """This rank's place, by the `group` of its `SetUp`. Raises NodeError."""
        topology, link = Topology(**plain["topology"]), partial(self._link, plain)
        return topology.place_of_process(plain["rank"], plain["patience"], link)

    def _link(self, plain: dict[str, Any], other: int) -> socket.socket:
        me, end = plain["rank"], monotonic() + START_PATIENCE
        name = f"{plain['engine']} {min(me, other)}-{max(me, other)}"
        if other < me:
            host, port = plain["addresses"][other]
            here = self._listener.address[0]
            return connect(host, port, self._secret, START_PATIENCE, here, link=name).connection
        while name not in self._arrived:
            if (found := self._listener.next(end - monotonic())) is None:
                raise NodeError(
                    f"Rank {me} waited {START_PATIENCE:g} s for rank {other} to connect to it; "
                    "see that all nodes reach each other."
                )
            self._arrived[str(found.hello.get("link"))[:MOST]] = found.connection
        return self._arrived.pop(name)

    def close(self) -> None:
        """Close the listener and unused connections. Idempotent."""
        self._listener.close()
        for each in self._arrived.values():
            each.close()
