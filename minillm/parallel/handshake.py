"""Authenticated connections between nodes: `Listener` accepts them, `connect` opens them.

In the handshake both ends prove that they know a secret, then compare versions.

    rank or other rank                        driver or rank that listens
    magic, nonce a      ------------------>
                        <------------------   magic, nonce b
    HMAC(secret, "connects", a, b)  ------>   else the connection is closed
    else it is closed   <------------------   HMAC(secret, "listens", a, b)
    hello               <----------------->   hello: versions, node; must agree

The secret is never sent, and a side describes itself only to a peer that knows it. Later traffic is
neither encrypted nor signed: use a network that others cannot write to. Reading a message runs no
code, since all of it is JSON or bytes of known length. In the listener each handshake has a thread
and a time limit, so a silent peer does not delay others.
"""

import hmac
import json
import logging
import os
import secrets
import select
import socket
import struct
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import monotonic, sleep
from typing import Any, NamedTuple

from minillm.errors import ConfigError, NodeError, in_one_line

logger = logging.getLogger(__name__)
MAGIC = b"minillm\n"
PROTOCOL = 1  # version of handshake, messages and wire; must be equal
NONCE = 32  # bytes
SECONDS = 20.0  # time limit of a handshake
MOST = 1 << 16  # maximum bytes of a hello
LEAST = 16  # minimum bytes of a secret
SIZE = struct.Struct(">I")
SILENT = 30  # seconds after which a node that does not answer counts as gone
COMPARED = ("protocol", "minillm", "torch", "byte_order")
MOST_PENDING = 64  # handshakes at once; further connections are dropped
RETRY = 0.2  # seconds
ASK_ADDRESS = 0x8915  # SIOCGIFADDR
HANG_UP = int(getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR)  # peer has closed


class Stranger(NodeError):
    """The peer is no minillm, or does not know the secret."""


def read_secret() -> bytes:
    """From the file MINILLM_SECRET_FILE, or MINILLM_SECRET. Raises ConfigError if it is missing or
    too short."""
    path, text = os.environ.get("MINILLM_SECRET_FILE"), os.environ.get("MINILLM_SECRET", "")
    if path:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"MINILLM_SECRET_FILE cannot be read: {in_one_line(error)}") from None
    secret = text.strip().encode()
    if len(secret) < LEAST:
        state = f"has {len(secret)} characters" if secret else "is not set"
        raise ConfigError(
            f"The secret that nodes share {state}; on every node set MINILLM_SECRET_FILE to a copy "
            f"of one file with {LEAST} characters or more, such as `openssl rand -hex 32` writes."
        )
    return secret


def new_secret() -> bytes:
    """A random one, for ranks that the driver starts itself."""
    return secrets.token_hex(32).encode()


def hello(**more: Any) -> dict[str, Any]:
    """The description of this node that is sent to the peer."""
    return {
        "protocol": PROTOCOL,
        "minillm": sys.modules["minillm"].__version__,
        "torch": ".".join(version("torch").split(".")[:2]),
        "byte_order": sys.byteorder,
        "node": socket.gethostname(),
        **more,
    }


def differences(theirs: dict[str, Any], mine: dict[str, Any]) -> str:
    """The error message for hellos that do not match, or nothing."""
    found = [name for name in COMPARED if theirs.get(name) != mine[name]]
    if not found:
        return ""
    texts = [
        f"node {each.get('node', 'without a name')} has "
        + " and ".join(f"{name.replace('_', ' ')} {each.get(name, 'missing')}" for name in found)
        for each in (theirs, mine)
    ]
    return (
        f"The nodes do not match: {', '.join(texts)}; install the same versions of minillm and "
        "torch on all nodes."
    )


def shake_hands(
    connection: socket.socket,
    secret: bytes,
    mine: dict[str, Any],
    listens: bool,
    seconds: float = SECONDS,
) -> dict[str, Any]:
    """The peer's hello. Leaves the socket blocking, with keep-alive.

    Raises:
        Stranger: the peer is no minillm, does not know the secret, or took too long.
        NodeError: the peer knows the secret, but its versions differ.
    """
    end = monotonic() + seconds
    own = secrets.token_bytes(NONCE)
    try:
        connection.settimeout(seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(MAGIC + own)
        head = receive(connection, len(MAGIC) + NONCE, end)
        if not head.startswith(MAGIC):
            raise Stranger("what it sends is no minillm")
        other = head[len(MAGIC) :]
        nonces = other + own if listens else own + other
        prove = proof(secret, b"listens" if listens else b"connects", nonces)
        expected = proof(secret, b"connects" if listens else b"listens", nonces)
        if not listens:
            connection.sendall(prove)
        if not hmac.compare_digest(receive(connection, len(expected), end), expected):
            raise Stranger("its secret is another")
        if listens:
            connection.sendall(prove)
        body = json.dumps(mine).encode()
        connection.sendall(SIZE.pack(len(body)) + body)
        (size,) = SIZE.unpack(receive(connection, SIZE.size, end))
        if size > MOST:
            raise Stranger(f"its hello has {size} bytes")
        theirs = json.loads(receive(connection, size, end))
        if not isinstance(theirs, dict):
            raise ValueError
    except TimeoutError:
        raise Stranger(f"it did not complete the handshake in {seconds:g} s") from None
    except OSError as error:
        raise Stranger(f"its connection ended: {in_one_line(error)}") from None
    except (ValueError, RecursionError):
        raise Stranger("what it sends is not readable") from None
    if text := differences(theirs, mine):
        raise NodeError(text)
    keep_alive(connection)
    return theirs


def proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    """Proof of knowing the secret, for one role and one pair of nonces."""
    return hmac.digest(secret, MAGIC + role + nonces, "sha256")


def receive(connection: socket.socket, count: int, end: float) -> bytes:
    """Exactly `count` bytes, until the time `end` of `monotonic`."""
    data = b""
    while len(data) < count:
        connection.settimeout(max(end - monotonic(), 1e-3))
        more = connection.recv(count - len(data))
        if not more:
            raise Stranger("it closed the connection")
        data += more
    return data


def keep_alive(connection: socket.socket) -> None:
    """Make the system detect within `SILENT` seconds that the other node is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": SILENT // 2, "TCP_KEEPINTVL": SILENT // 6, "TCP_KEEPCNT": 3}
    for name, value in (options | {"TCP_USER_TIMEOUT": SILENT * 1000}).items():
        if hasattr(socket, name):
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# ---- both ends ---------------------------------------------------------------------------------


class Arrival(NamedTuple):
    """An authenticated peer."""

    hello: dict[str, Any]
    connection: socket.socket


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface such as eth0; other names are returned unchanged."""
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
    """Listens at an interface or address; for port 0 the system chooses one. Raises NodeError."""

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
        """The next peer; None after the timeout. Raises NodeError for a peer of other versions."""
        try:
            found = self._found.get(timeout=max(seconds, 0))
        except Empty:
            return None
        if isinstance(found, NodeError):
            raise found
        return found

    def close(self) -> None:
        """Stop listening, and drop unfinished handshakes. Idempotent."""
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
                sleep(0 if self._is_closed else RETRY)  # for example, too many open files
                continue
            with self._lock:
                if self._is_closed or len(self._pending) >= MOST_PENDING:
                    connection.close()
                    continue
                self._pending.add(connection)
            where = f"{peer[0]}:{peer[1]}"
            Thread(target=self._greet, args=(connection, where), daemon=True).start()

    def _greet(self, connection: socket.socket, peer: str) -> None:
        found: Arrival | NodeError
        try:
            theirs = shake_hands(connection, self._secret, hello(), True, SECONDS)
            found = Arrival(theirs, connection)
        except NodeError as error:
            found = error
        with self._lock:
            self._pending.discard(connection)
            if self._is_closed or isinstance(found, NodeError):
                connection.close()
            if self._is_closed:
                return
            if not isinstance(found, Stranger):
                self._found.put(found)
                return
        logger.warning("A connection from %s was dropped: %s.", peer, found)


def connect(
    host: str, port: int, secret: bytes, seconds: float, host_here: str | None = None, **more: Any
) -> Arrival:
    """Connect to a `Listener`, which may start later.

    Args:
        host, port: of the listener.
        seconds: time limit for the connection.
        host_here: local interface.
        more: added to this node's hello.

    Raises:
        NodeError: nothing answers, or the handshake fails.
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
        theirs = shake_hands(connection, secret, hello(**more), listens=False)
        return Arrival(theirs, connection)
    except Stranger as error:
        connection.close()
        raise NodeError(
            f"The handshake with {host}:{port} failed: {error}; see that a minillm driver listens "
            "there, and that MINILLM_SECRET_FILE holds the same on both nodes."
        ) from None
    except BaseException:
        connection.close()
        raise
