"""Ranks that find each other through a store of `torch.distributed`: torchrun's, or the driver's.

    rank n    listens, and publishes its address in the store as "rank n"
    driver    connects to each rank for plans and results
    rank n    connects to ranks with lower numbers, and accepts those with higher ones, for data

Both ends of a connection prove that they know a random key (`multiprocessing.connection`), which is
in the store. So a process that reaches the store is trusted, and traffic is neither encrypted nor
signed: nodes need a private network.
"""

import json
import os
import socket
import struct
from contextlib import suppress
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from minillm.errors import ConfigError, NodeError, in_one_line

if TYPE_CHECKING:
    from torch.distributed import Store

PATIENCE = 600.0  # seconds in which all ranks of an engine start
SECONDS = 10.0  # time limit for a peer to prove that it knows the key
SILENT = 30  # seconds after which a node that does not answer counts as gone
DRIVER = 2**31  # its number: above those of all ranks, so it connects to them
REFUSED = OSError, EOFError, ValueError, AuthenticationError  # of a peer without the key


class Address(NamedTuple):
    """Where a store is: host, port, and what the names of its entries start with."""

    host: str
    port: int
    prefix: str

    def open(self, hosts: bool = False) -> "tuple[Address, Store]":
        """A connection to the store, which this process `hosts` at this address only, or another
        one; and the address, where port 0 has become a number. Raises NodeError."""
        from torch.distributed import PrefixStore, TCPStore

        try:
            port, end, time = self.port, None, timedelta(seconds=PATIENCE)
            if hosts:  # by itself a TCPStore listens at all addresses
                listener = socket.create_server(self[:2])
                port, end = listener.getsockname()[1], listener.detach()
            store = TCPStore(self.host, port, None, hosts, time, False, master_listen_fd=end)
        except (RuntimeError, ValueError, OSError) as error:
            raise NodeError(
                f"The store of the ranks at {self.host}:{self.port} cannot be "
                f"{'opened' if hosts else 'reached'}: {in_one_line(error)}"
            ) from None
        return self._replace(port=store.port), PrefixStore(self.prefix, store)


def torchrun_address() -> Address:
    """Where torchrun's store is. Raises ConfigError outside of torchrun."""
    try:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise ConfigError(
            "distributed_executor_backend='external' needs the variables MASTER_ADDR, MASTER_PORT, "
            "RANK and WORLD_SIZE of torchrun; start the program with `torchrun --nnodes N ... -m "
            "minillm`, or leave the backend out."
        ) from None
    return Address(host, port, f"minillm {attempt}")


class Meeting:
    """A rank's connections to the driver and to the other ranks. Raises NodeError.

    Args:
        address: of the store.
        rank: number of this rank.
    """

    def __init__(self, address: Address, rank: int):
        self.rank, (_, self._store) = rank, address.open()
        self._arrived: dict[int, socket.socket] = {}
        self._listener = socket.create_server((way_to(*address[:2]), 0))
        try:
            self._key = get(self._store, "key", "the driver")
            where = {"node": socket.gethostname(), "address": self._listener.getsockname()}
            self._store.set(f"rank {rank}", json.dumps(where))
        except BaseException:
            self.close()
            raise

    def link(self, other: int) -> socket.socket:
        """The connection to another rank, or to the `DRIVER`."""
        if other < self.rank:
            return connect(self._store, self._key, self.rank, other)
        end = monotonic() + PATIENCE
        while other not in self._arrived:
            try:
                self._listener.settimeout(max(end - monotonic(), 1e-3))
                connection, _ = self._listener.accept()
            except TimeoutError:
                name = "the driver" if other == DRIVER else f"rank {other}"
                raise NodeError(
                    f"Rank {self.rank} waited {PATIENCE:g} s for {name} to connect to it; see that "
                    "all nodes reach each other."
                ) from None
            try:
                self._arrived[greet(connection, self._key)] = connection
            except REFUSED:  # none of this engine's
                connection.close()
        return self._arrived.pop(other)

    def close(self) -> None:
        """Close the listener and unused connections. Idempotent."""
        self._listener.close()
        for connection in self._arrived.values():
            connection.close()


def get(store: "Store", name: str, whose: str) -> bytes:
    """An entry of the store, once it is there. Raises NodeError."""
    try:
        return bytes(store.get(name))
    except RuntimeError:  # DistStoreError, DistNetworkError
        raise NodeError(
            f"Nothing was heard of {whose} in {PATIENCE:g} s; see what it reports."
        ) from None


def connect(store: "Store", key: bytes, own: int, other: int) -> socket.socket:
    """Connect to a rank, once it is there. Raises NodeError."""
    theirs = json.loads(get(store, f"rank {other}", f"rank {other}"))
    host, port = theirs["address"]
    connection = None
    try:
        connection = socket.create_connection((host, port), SECONDS)
        greet(connection, key, own)
    except REFUSED as error:
        if connection is not None:
            connection.close()
        raise NodeError(
            f"Rank {other} on node {theirs['node']} cannot be reached at {host}:{port}: "
            f"{in_one_line(error)}; --master-addr must be an address that all nodes reach."
        ) from None
    return connection


def greet(connection: socket.socket, key: bytes, own: int | None = None) -> int:
    """Prove to know the key, and have the peer prove it; returns the number of the one that has
    connected, which is `own` there. Leaves the socket blocking."""
    connection.settimeout(None)
    limit = struct.pack("ll", int(SECONDS), 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with Connection(os.dup(connection.fileno())) as end:
        if own is None:
            deliver_challenge(end, key)
            answer_challenge(end, key)
            own = int(end.recv_bytes(16))
        else:
            answer_challenge(end, key)
            deliver_challenge(end, key)
            end.send_bytes(b"%d" % own)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": SILENT // 2, "TCP_KEEPINTVL": SILENT // 6, "TCP_KEEPCNT": 3}
    for name, value in (options | {"TCP_USER_TIMEOUT": SILENT * 1000}).items():
        with suppress(OSError, AttributeError):  # not on all systems
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return own


def way_to(host: str, port: int) -> str:
    """This machine's IPv4 address on the route to another; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise NodeError(f"There is no way to {host}:{port} ({error.strerror}).") from None
