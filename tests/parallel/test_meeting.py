"""Connections of ranks that meet in a store: who gets in, and who does not."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import Store

from minillm.errors import NodeError
from minillm.parallel import meeting
from minillm.parallel.meeting import DRIVER, Address, Meeting, connect, way_to

KEY = b"the key of these tests"


@pytest.fixture
def store() -> tuple[Address, Store]:
    address, found = Address("127.0.0.1", 0, "tests").open(hosts=True)
    found.set("key", KEY.decode())
    return address, found


@pytest.fixture
def rank(store: tuple[Address, Store]) -> Iterator[Meeting]:
    found = Meeting(store[0], 1)
    yield found
    found.close()
    found.close()


def where(store: Store, rank: int = 1) -> tuple[str, int]:
    host, port = json.loads(store.get(f"rank {rank}"))["address"]
    return host, port


def test_ranks_and_the_driver_connect_in_any_order(store, rank):
    """Rank 1 accepts rank 2 and the driver, and connects to rank 0."""
    others = [Meeting(store[0], each) for each in (0, 2)]
    links: dict[Any, socket.socket] = {}

    def connect_all() -> None:
        links["driver"] = connect(store[1], KEY, DRIVER, 1)
        links["2"] = others[1].link(1)
        links["0"] = others[0].link(1)

    thread = threading.Thread(target=connect_all)
    thread.start()
    mine = {"2": rank.link(2), "driver": rank.link(DRIVER), "0": rank.link(0)}
    thread.join()
    for name, each in mine.items():
        each.sendall(name.encode())
        assert links[name].recv(10) == name.encode()
        assert each.gettimeout() is None
        for end in (each, links[name]):
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            end.close()
    for met in others:
        met.close()


def test_another_key(store, rank):
    refused: list[Any] = []

    def try_it() -> None:
        with contextlib.suppress(NodeError):
            refused.append(connect(store[1], b"another key of the tests", 3, 1))
        connect(store[1], KEY, 2, 1).close()

    thread = threading.Thread(target=try_it)
    thread.start()
    rank.link(2).close()
    thread.join()
    assert not refused
    assert not rank._arrived


def authentic(body: bytes) -> Callable[[socket.socket], None]:
    """One that knows the key, and then says this instead of its number."""

    def attack(end: socket.socket) -> None:
        with meeting.Connection(meeting.os.dup(end.fileno())) as connection:
            meeting.answer_challenge(connection, KEY)
            meeting.deliver_challenge(connection, KEY)
            connection.send_bytes(body)

    return attack


STRANGERS: dict[str, Callable[[socket.socket], Any]] = {
    "closes": lambda end: None,
    "silent": lambda end: end.recv(1 << 16) and end.recv(1 << 16),
    "garbage": lambda end: end.sendall(b"\xff" * 100_000),
    "web": lambda end: end.sendall(b"GET / HTTP/1.1\r\nHost: localhost:8000\r\n\r\n"),
    "long number": authentic(b"1" * 1000),
    "no number": authentic(b"abc"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_keep_no_one_out(name, store, rank, monkeypatch):
    monkeypatch.setattr(meeting, "SECONDS", 1.0)

    def come() -> None:
        with socket.create_connection(where(store[1])) as end, contextlib.suppress(OSError):
            STRANGERS[name](end)
        connect(store[1], KEY, 2, 1).close()

    thread = threading.Thread(target=come)
    thread.start()
    rank.link(2).close()
    thread.join()


@pytest.mark.slow
def test_those_who_do_not_come(store, rank, monkeypatch):
    monkeypatch.setattr(meeting, "PATIENCE", 0.5)
    for other, name in ((2, "rank 2"), (DRIVER, "the driver")):
        with pytest.raises(NodeError, match=f"^Rank 1 waited 0.5 s for {name} to connect"):
            rank.link(other)
    address, _ = store[0].open()
    late = Meeting(address, 3)
    with pytest.raises(NodeError, match=r"^Nothing was heard of rank 0 in 0.5 s; see what it rep"):
        late.link(0)
    late.close()


def test_those_who_have_gone(store, rank):
    rank.close()
    with pytest.raises(NodeError, match=r"^Rank 1 on node .* cannot be reached at 127.0.0.1:\d+: "):
        connect(store[1], KEY, 2, 1)


def test_no_way(monkeypatch):
    with pytest.raises(NodeError, match=r"^There is no way to no.such.host.invalid:1 \("):
        way_to("no.such.host.invalid", 1)
