"""Connections between nodes: both ends prove that they know a secret, then compare versions.

    rank or other rank                        driver or rank that listens
    magic, nonce a      ------------------>
                        <------------------   magic, nonce b
    HMAC(secret, "connects", a, b)  ------>   else the connection is closed
    else it is closed   <------------------   HMAC(secret, "listens", a, b)
    hello               <----------------->   hello: versions, node; must agree

The secret never travels, and neither side says anything of itself to one that does not know it.
What follows is neither encrypted nor signed: use a network that others cannot write to. Reading a
message runs no code, since all of it is JSON or bytes of known length.
"""

import hmac
import json
import os
import secrets
import socket
import struct
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic
from typing import Any

from minillm.errors import ConfigError, NodeError, in_one_line

MAGIC = b"minillm\n"
PROTOCOL = 1  # of handshake, messages and wire; another number does not understand this one
NONCE = 32  # bytes
SECONDS = 20.0  # in which a peer completes the handshake
MOST = 1 << 16  # bytes of a hello
LEAST = 16  # bytes of a secret
SIZE = struct.Struct(">I")
SILENT = 30  # seconds after which a node that answers nothing is gone
COMPARED = ("protocol", "minillm", "torch", "byte_order")


class Stranger(NodeError):
    """A peer that is no minillm, or does not know the secret."""


def read_secret() -> bytes:
    """That of MINILLM_SECRET_FILE or MINILLM_SECRET.

    Raises ConfigError if there is none, or it is too short to be one.
    """
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
    """For ranks that the driver starts itself."""
    return secrets.token_hex(32).encode()


def hello(**more: Any) -> dict[str, Any]:
    """What this node says of itself."""
    return {
        "protocol": PROTOCOL,
        "minillm": sys.modules["minillm"].__version__,
        "torch": ".".join(torch_version().split(".")[:2]),
        "byte_order": sys.byteorder,
        "node": socket.gethostname(),
        **more,
    }


def torch_version() -> str:
    """Without importing it."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "unknown"


def differences(theirs: dict[str, Any], mine: dict[str, Any]) -> str:
    """One sentence on what does not agree, or nothing."""
    found = [name for name in COMPARED if theirs.get(name) != mine[name]]
    if not found:
        return ""

    def has(of: dict[str, Any]) -> str:
        each = (f"{name.replace('_', ' ')} {of.get(name, 'of no number')}" for name in found)
        return f"node {of.get('node', 'without a name')} has {' and '.join(each)}"

    return (
        f"The nodes do not match: {has(theirs)}, {has(mine)}; install the same versions of "
        "minillm and torch on all nodes."
    )


def shake_hands(
    connection: socket.socket,
    secret: bytes,
    mine: dict[str, Any],
    listens: bool,
    seconds: float = SECONDS,
) -> dict[str, Any]:
    """The peer's hello. Leaves the socket blocking, and watched by the system.

    Raises:
        Stranger: it is no minillm, does not know the secret, or took too long.
        NodeError: it knows the secret, and its versions differ.
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
    except TimeoutError:
        raise Stranger(f"it did not complete the handshake in {seconds:g} s") from None
    except OSError as error:
        raise Stranger(f"its connection ended: {in_one_line(error)}") from None
    except (ValueError, RecursionError):
        raise Stranger("what it sends is not readable") from None
    if not isinstance(theirs, dict):
        raise Stranger("what it sends is not readable")
    if text := differences(theirs, mine):
        raise NodeError(text)
    keep_alive(connection)
    return theirs


def proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    """What only one who knows the secret can say, in this role, of these nonces."""
    return hmac.digest(secret, MAGIC + role + nonces, "sha256")


def receive(connection: socket.socket, count: int, end: float) -> bytes:
    """So many bytes, until a time of `monotonic`."""
    data = b""
    while len(data) < count:
        connection.settimeout(max(end - monotonic(), 1e-3))
        more = connection.recv(count - len(data))
        if not more:
            raise Stranger("it closed the connection")
        data += more
    return data


def keep_alive(connection: socket.socket) -> None:
    """Have the system notice within `SILENT` seconds that the other node is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": SILENT // 2, "TCP_KEEPINTVL": SILENT // 6, "TCP_KEEPCNT": 3}
    for name, value in (options | {"TCP_USER_TIMEOUT": SILENT * 1000}).items():
        if hasattr(socket, name):
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
