"""What the driver and its ranks say to each other, and its form: frames of JSON over a socket.

    driver --> rank    SET_UP, PLAN, RESET, STATS, CLOSE
    rank --> driver    DONE: the answer to one of these, with its number
                       NOTE: what it is doing, LOG: a line for the log, ERROR: its last words

No pickle: reading a message runs no code. Engine arguments, memory plan and draft model travel as
plain data, and are checked again where they are built.
"""

import json
import socket
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from enum import IntEnum
from pathlib import Path
from threading import Lock
from typing import Any

from minillm.api.engine_args import EngineArgs
from minillm.errors import UnsupportedFeatureError
from minillm.models.checkpoint import ModelSource, open_model
from minillm.plan.cost import BatchFit, MemoryPlan, PlanSettings
from minillm.speculative.setup import DraftSource, speculation_of

HEADER = struct.Struct(">IBI")  # bytes of the body, kind, number
TIMES = struct.Struct(">dd")  # seconds of a step, and those in which a rank communicated


class Kind(IntEnum):
    """What a message is about."""

    SET_UP = 1
    PLAN = 2
    RESET = 3
    STATS = 4
    CLOSE = 5
    DONE = 6
    NOTE = 7
    LOG = 8
    ERROR = 9


@dataclass(frozen=True)
class Message:
    """A kind, the number of the order that it is or answers, and JSON."""

    kind: Kind
    number: int
    body: bytes

    @property
    def plain(self) -> Any:
        """What the body says."""
        return json.loads(self.body)

    @property
    def frame(self) -> bytes:
        """As it is sent."""
        return HEADER.pack(len(self.body), self.kind, self.number) + self.body


class Frames:
    """Bytes as they arrive become messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> Iterator[Message]:
        """The messages that these bytes complete."""
        self._data += data
        start = 0
        while len(self._data) >= start + HEADER.size:
            size, kind, number = HEADER.unpack_from(self._data, start)
            end = start + HEADER.size + size
            if len(self._data) < end:
                break
            yield Message(Kind(kind), number, bytes(self._data[start + HEADER.size : end]))
            start = end
        del self._data[:start]


class Channel:
    """A rank's end of the socket. Any thread may send."""

    def __init__(self, connection: socket.socket):
        self._socket, self._lock, self._frames = connection, Lock(), Frames()

    def send(self, kind: Kind, body: bytes = b"", number: int = 0) -> None:
        """Send all of it."""
        with self._lock:
            self._socket.sendall(Message(kind, number, body).frame)

    def messages(self) -> Iterator[Message]:
        """What the driver says, until it is gone."""
        while data := self._socket.recv(1 << 16):
            yield from self._frames.add(data)


# ---- what a rank is to build -------------------------------------------------------------------


@dataclass(frozen=True)
class SetUp:
    """All that a rank has to know."""

    rank: int
    size: int
    args: EngineArgs
    source: ModelSource
    plan: MemoryPlan
    device: str
    draft: DraftSource | None
    group: dict[str, Any]  # how the ranks reach each other: `groups.py`
    log_level: int
    fingerprint: dict[str, Any] | None = None  # of the models, for ranks on other machines

    def to_bytes(self) -> bytes:
        """JSON."""
        return json.dumps(
            {
                "rank": self.rank,
                "size": self.size,
                "args": args_to_plain(self.args),
                "source": source_to_plain(self.source),
                "plan": asdict(self.plan),
                "device": self.device,
                "draft": self.draft
                and {"source": source_to_plain(self.draft.source), "context": self.draft.context},
                "group": self.group,
                "log_level": self.log_level,
                "fingerprint": self.fingerprint,
            }
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "SetUp":
        """What `to_bytes` wrote. Opens the models' folders."""
        given = json.loads(data)
        draft = given["draft"]
        return cls(
            **given
            | {
                "args": EngineArgs(**given["args"]),
                "source": source_from_plain(**given["source"]),
                "plan": plan_from_plain(given["plan"]),
                "draft": draft
                and DraftSource(source_from_plain(**draft["source"]), draft["context"]),
            }
        )


def args_to_plain(args: EngineArgs) -> dict[str, Any]:
    """Engine arguments that are not the defaults.

    Raises:
        UnsupportedFeatureError: an object that cannot be sent.
    """
    plain: dict[str, Any] = {}
    for each in fields(EngineArgs):  # those of an `AsyncEngineArgs` stay in the driver
        value = getattr(args, each.name)
        if value is None or value == each.default:
            continue
        plain[each.name] = str(value) if isinstance(value, Path) else value
    if (config := speculation_of(args)) is not None:
        if not isinstance(config.method, str):
            raise UnsupportedFeatureError(
                f"speculative_config's method is a {config.name}, which cannot be sent to ranks "
                "that are processes; use a method by name, or "
                "distributed_executor_backend='threads'."
            )
        plain["speculative_config"] = asdict(config)
    if args.eplb is not None:
        plain["eplb_config"] = asdict(args.eplb)
    return plain


def source_to_plain(source: ModelSource) -> dict[str, Any]:
    """Where a model is, so that another process opens the same."""
    where = source.name if source.folder is None else str(source.folder.absolute())
    return {"name": source.name, "where": where, "hub_id": source.hub_id}


def source_from_plain(name: str, where: str, hub_id: str | None) -> ModelSource:
    """The model, opened again: the same commit, where it is from a hub."""
    return replace(open_model(where), name=name, hub_id=hub_id)


def plan_from_plain(plain: dict[str, Any]) -> MemoryPlan:
    """A memory plan out of its ``asdict``."""
    more = {
        "settings": PlanSettings(**plain["settings"]),
        "combinations": tuple(BatchFit(**each) for each in plain["combinations"]),
        "hints": tuple(plain["hints"]),
    }
    return MemoryPlan(**plain | more)
