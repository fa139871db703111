"""Connections between nodes: who gets in, and what the others are told."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from minillm.errors import ConfigError, NodeError
from minillm.parallel import handshake
from minillm.parallel.handshake import (
    MAGIC,
    MOST,
    NONCE,
    SIZE,
    Listener,
    Stranger,
    connect,
    hello,
    interface_address,
    proof,
    read_secret,
    shake_hands,
)

SECRET = b"a secret of these tests"
LIMIT = 60.0  # seconds; what takes longer hangs


@pytest.fixture
def door() -> Iterator[Listener]:
    found = Listener("127.0.0.1", 0, SECRET)
    yield found
    found.close()
    found.close()


def meet(door: Listener, secret: bytes = SECRET, **more: Any) -> Any:
    return connect(*door.address, secret, LIMIT, **more)


def both(mine: dict[str, Any], theirs: dict[str, Any]) -> list[Any]:
    """What the listening and the connecting end get."""
    found: list[Any] = [None, None]

    def run(place: int, end: socket.socket, own: dict[str, Any]) -> None:
        try:
            found[place] = shake_hands(end, SECRET, own, listens=not place)
        except NodeError as error:
            found[place] = error

    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    with left, right:
        other = threading.Thread(target=run, args=(1, left, theirs))
        other.start()
        run(0, right, mine)
        other.join()
    return found


# ---- those who get in --------------------------------------------------------------------------


def test_both_ends_hear_of_each_other(door):
    mine = meet(door, rank=3)
    theirs = door.next(LIMIT)
    assert theirs.hello == hello(rank=3)
    assert mine.hello == hello()
    mine.connection.sendall(b"later")
    assert theirs.connection.recv(5) == b"later"
    assert theirs.connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    mine.connection.close()
    theirs.connection.close()


@pytest.mark.parametrize(
    ("name", "other", "sentence"),
    [
        ("protocol", 2, "node beta has protocol 2, node alpha has protocol 1;"),
        ("minillm", "9.9", "node beta has minillm 9.9, node alpha has minillm "),
        ("torch", "1.0", "node beta has torch 1.0, node alpha has torch "),
        ("byte_order", "big", "node beta has byte order big, node alpha has byte order little;"),
        ("byte_order", None, "node beta has byte order None, node alpha has"),
    ],
)
def test_other_versions(name, other, sentence):
    """Both ends say the same, each in its order."""
    mine, theirs = hello() | {"node": "alpha"}, hello() | {"node": "beta", name: other}
    listening, connecting = both(mine, theirs)
    assert sentence in str(listening)
    assert "install the same versions" in str(listening)
    assert "node alpha has" in str(connecting).split(",")[0]
    assert not isinstance(listening, Stranger)


def test_a_listener_tells_its_owner_of_other_versions(door, monkeypatch):
    first = iter([hello() | {"torch": "1.0"}])  # of the end that connects, which asks first
    monkeypatch.setattr(handshake, "hello", lambda **_: next(first, hello()))
    with pytest.raises(NodeError, match=r"has torch 1\.0"):
        meet(door)
    with pytest.raises(NodeError, match=r"has torch 1\.0"):
        door.next(LIMIT)


# ---- those who do not --------------------------------------------------------------------------


def test_another_secret(door, caplog):
    with pytest.raises(NodeError, match=r"failed: it closed .*MINILLM_SECRET_FILE") as caught:
        meet(door, b"another secret of these tests")
    assert "\n" not in str(caught.value)
    assert meet(door).hello == hello()  # and others still get in
    assert door.next(LIMIT).hello == hello()
    (line,) = caplog.messages
    assert line.endswith("was dropped: its secret is another.")
    assert "secret of these tests" not in line


def test_a_listener_without_the_secret_learns_nothing():
    """It is refused before this side says what it is."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        heard = []

        def pretend() -> None:
            end, _ = server.accept()
            end.sendall(MAGIC + bytes(NONCE) + bytes(32) + SIZE.pack(2) + b"{}")
            with contextlib.suppress(OSError):
                while data := end.recv(1 << 16):
                    heard.append(data)
            end.close()

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(NodeError, match="its secret is another"):
            connect(*server.getsockname(), SECRET, LIMIT)
        thread.join()
    assert len(b"".join(heard)) == len(MAGIC) + NONCE + 32


def authentic(
    body: bytes, size: int | None = None, role: bytes = b"connects"
) -> Callable[[socket.socket], None]:
    """One that knows the secret, and then sends this."""

    def attack(end: socket.socket) -> None:
        end.sendall(MAGIC + bytes(NONCE))
        head = handshake.receive(end, len(MAGIC) + NONCE, time.monotonic() + LIMIT)
        end.sendall(proof(SECRET, role, bytes(NONCE) + head[len(MAGIC) :]))
        end.sendall(SIZE.pack(len(body) if size is None else size) + body)
        end.recv(1 << 16)

    return attack


ATTACKS: dict[str, tuple[Callable[[socket.socket], None], str]] = {
    "garbage": (lambda end: end.sendall(b"\xff" * 100_000), "is no minillm"),
    "web": (lambda end: end.sendall(b"GET / HTTP/1.1\r\nHost: localhost:8000\r\n\r\n"), "no minil"),
    "half": (lambda end: (end.sendall(MAGIC + b"1"), end.shutdown(1)), "closed the connection"),
    "the other end's role": (authentic(b"", role=b"listens"), "its secret is another"),
    "large": (authentic(b"", MOST + 1), "its hello has 65537 bytes"),
    "list": (authentic(b"[1]"), "not readable"),
    "no JSON": (authentic(b"\xff\xfe{"), "not readable"),
    "deep": (authentic(b"[" * 60_000), "not readable"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_strangers(name, door, caplog):
    attack, why = ATTACKS[name]
    with socket.create_connection(door.address) as end:
        end.settimeout(LIMIT)
        try:
            attack(end)
            while end.recv(1 << 16):
                pass
        except OSError:
            pass
    wait_for(lambda: caplog.messages)
    assert "127.0.0.1" in caplog.text
    assert why in caplog.text
    assert meet(door).hello == hello()


def test_those_who_say_nothing_keep_no_one_waiting(door, monkeypatch, caplog):
    monkeypatch.setattr(handshake, "SECONDS", 1.0)
    silent = [socket.create_connection(door.address) for _ in range(5)]
    assert meet(door).hello == hello()
    assert door.next(LIMIT) is not None
    wait_for(lambda: len(caplog.messages) == 5)
    assert all("did not complete the handshake in 1 s" in each for each in caplog.messages)
    for each in silent:
        each.close()


def test_one_that_says_a_byte_a_second(monkeypatch):
    """The time is that of the handshake, and not of a byte."""
    left, right = socket.socketpair()
    monkeypatch.setattr(handshake, "MAGIC", MAGIC)

    def drip() -> None:
        try:
            for each in MAGIC * 1000:
                left.sendall(bytes([each]))
                time.sleep(0.05)
        except OSError:
            pass

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    with pytest.raises(TimeoutError):
        handshake.receive(right, 10_000, time.monotonic() + 0.3)
    right.close()
    thread.join(LIMIT)
    left.close()


def test_too_many_at_once(door, monkeypatch):
    monkeypatch.setattr(handshake, "MOST_PENDING", 3)
    silent = [socket.create_connection(door.address) for _ in range(3)]
    wait_for(lambda: len(door._pending) == 3)
    with socket.create_connection(door.address) as end:
        end.settimeout(LIMIT)
        assert not end.recv(1)
    silent[0].close()
    wait_for(lambda: len(door._pending) == 2)
    assert meet(door).hello == hello()
    for each in silent:
        each.close()


def wait_for(holds: Callable[[], Any]) -> None:
    end = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- addresses and secrets ---------------------------------------------------------------------


def test_addresses():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with pytest.raises(NodeError, match=r"^Cannot listen at 127.0.0.1:\d+ \(Address already"):
            Listener(*address, SECRET)
    with pytest.raises(NodeError, match=r"^Nothing answers at .*refused.*tried for 0.3 s"):
        connect(*address, SECRET, 0.3)
    with pytest.raises(NodeError, match=r"^Nothing answers at no.such.host.invalid"):
        connect("no.such.host.invalid", 1, SECRET, LIMIT)
    with pytest.raises(NodeError, match=r"^Cannot listen at 192.0.2.1:0 .*of this machine"):
        Listener("192.0.2.1", 0, SECRET)
    assert interface_address("lo") == "127.0.0.1"
    assert interface_address("alpha") == "alpha"


def test_a_listener_that_starts_late():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(connect(*address, SECRET, LIMIT)))
    thread.start()
    time.sleep(0.3)
    late = Listener(*address, SECRET)
    assert late.next(LIMIT).hello == hello()
    thread.join()
    late.close()


@pytest.mark.parametrize(
    ("text", "what"), [(None, "is not set"), ("", "is not set"), ("0123456789", "10 characters")]
)
def test_no_secret(text, what, monkeypatch):
    monkeypatch.delenv("MINILLM_SECRET_FILE", raising=False)
    monkeypatch.setenv("MINILLM_SECRET", text) if text is not None else monkeypatch.delenv(
        "MINILLM_SECRET", raising=False
    )
    with pytest.raises(ConfigError, match=what) as caught:
        read_secret()
    assert "0123456789" not in str(caught.value)


def test_a_secret_of_a_file(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    monkeypatch.setenv("MINILLM_SECRET_FILE", str(path))
    assert read_secret() == SECRET
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret()
