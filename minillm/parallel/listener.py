"""Where other nodes connect to: strangers are dropped, and do not keep others waiting."""

import logging
import socket
import struct
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import monotonic, sleep
from typing import Any, NamedTuple

from minillm.errors import NodeError
from minillm.parallel import handshake
from minillm.parallel.handshake import Stranger, hello, shake_hands

logger = logging.getLogger(__name__)
MOST_PENDING = 64  # handshakes at once; a connection beyond is dropped
RETRY = 0.2  # seconds
ASK_ADDRESS = 0x8915  # SIOCGIFADDR


class Arrival(NamedTuple):
    """A peer that has proved who it is."""

    hello: dict[str, Any]
    connection: socket.socket
    peer: str


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface such as eth0; any other name stays as it is."""
    if name not in (each for _, each in socket.if_nameindex()):
        return name
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, ASK_ADDRESS, struct.pack("256s", name[:15].encode()))
        except OSError as error:
            raise NodeError(
                f"Interface {name} has no IPv4 address ({error.strerror}); name another."
            ) from None
    return socket.inet_ntoa(found[20:24])


class Listener:
    """Listens at a named interface; port 0 is chosen by the system.

    Raises NodeError where the interface is not this machine's or the port is taken.
    """

    def __init__(self, host: str, port: int, secret: bytes):
        self._secret, self._lock = secret, Lock()
        self._pending: set[socket.socket] = set()
        self._found: SimpleQueue[Arrival | NodeError] = SimpleQueue()
        self._is_closed = False
        try:
            address = socket.getaddrinfo(
                interface_address(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._socket = socket.create_server(address[4][:2], family=address[0], backlog=128)
        except OSError as error:
            raise NodeError(
                f"Cannot listen at {host}:{port} ({error.strerror}); name an interface or an "
                "address of this machine, and a free port, or 0."
            ) from None
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._thread = Thread(target=self._accept, name="minillm-listener", daemon=True)
        self._thread.start()

    def next(self, seconds: float) -> Arrival | None:
        """The next peer, or None if none comes in time. Raises what a peer was refused for."""
        try:
            found = self._found.get(timeout=max(seconds, 0))
        except Empty:
            return None
        if isinstance(found, NodeError):
            raise found
        return found

    def close(self) -> None:
        """Listen no more. Closing twice is fine."""
        with self._lock:
            self._is_closed = True
            for each in self._pending:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._socket.close()
        while not self._found.empty():
            left = self._found.get()
            if isinstance(left, Arrival):
                left.connection.close()

    def _accept(self) -> None:
        self._socket.settimeout(RETRY)
        while not self._is_closed:
            try:
                connection, peer = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                sleep(0 if self._is_closed else RETRY)  # too many files, say
                continue
            with self._lock:
                if self._is_closed or len(self._pending) >= MOST_PENDING:
                    connection.close()
                    continue
                self._pending.add(connection)
            where = f"{peer[0]}:{peer[1]}"
            Thread(target=self._greet, args=(connection, where), daemon=True).start()

    def _greet(self, connection: socket.socket, peer: str) -> None:
        try:
            found = shake_hands(connection, self._secret, hello(), True, handshake.SECONDS)
        except Stranger as error:
            self._forget(connection)
            if not self._is_closed:
                logger.warning("A connection from %s was dropped: %s.", peer, error)
        except NodeError as error:
            self._forget(connection)
            self._found.put(error)
        else:
            with self._lock:
                self._pending.discard(connection)
                if self._is_closed:
                    connection.close()
                else:
                    self._found.put(Arrival(found, connection, peer))

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._pending.discard(connection)
            connection.close()


def connect(
    host: str, port: int, secret: bytes, seconds: float, host_here: str | None = None, **more: Any
) -> Arrival:
    """A connection to a `Listener`, which may still have to start.

    Args:
        host, port: of the listener.
        seconds: to try.
        host_here: interface to leave by.
        more: part of this node's hello.

    Raises:
        NodeError: the address is wrong, or the two do not trust or match each other.
    """
    end, here = monotonic() + seconds, None
    if host_here is not None:
        here = interface_address(host_here), 0
    while True:
        try:
            connection = socket.create_connection((host, port), max(end - monotonic(), RETRY), here)
            break
        except OSError as error:
            if isinstance(error, socket.gaierror) or monotonic() + RETRY > end:
                raise NodeError(
                    f"Nothing answers at {host}:{port} ({error.strerror or 'timed out'}), tried "
                    f"for {seconds:g} s; give the address that the driver shows, and start it."
                ) from None
            sleep(RETRY)
    try:
        return Arrival(
            shake_hands(connection, secret, hello(**more), listens=False),
            connection,
            f"{host}:{port}",
        )
    except Stranger as error:
        connection.close()
        raise NodeError(
            f"The handshake with {host}:{port} failed: {error}; see that a minillm driver listens "
            "there, and that MINILLM_SECRET_FILE holds the same on both nodes."
        ) from None
    except BaseException:
        connection.close()
        raise
