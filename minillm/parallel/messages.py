"""The protocol between the driver and its ranks: messages over a `multiprocessing` connection.

    driver --> rank    SET_UP, PLAN, RESET, STATS, CLOSE
    rank --> driver    DONE: the answer to one of these, with its number
                       NOTE: what the rank is doing, LOG: a log record, ERROR: why the rank ends

Nothing is pickled, so reading a message runs no code: bodies are JSON, or the plans and results of
`execution/wire.py`. Arguments are validated again where they are rebuilt.
"""

import json
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from enum import IntEnum
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from minillm.api.arguments import EngineArgs
from minillm.errors import CheckpointError, ModelNotFoundError, UnsupportedFeatureError
from minillm.models.checkpoint import ModelSource, open_model
from minillm.parallel.fingerprint import check_models, check_versions
from minillm.plan.cost import MemoryPlan
from minillm.speculative.setup import DraftSource, speculation_of

HEADER = struct.Struct(">BI")  # kind, number


class Kind(IntEnum):
    """The kind of a message."""

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
    """A message; `number` is that of the order that it is or answers."""

    kind: Kind
    number: int
    body: bytes

    @property
    def plain(self) -> Any:
        """The body of a NOTE, LOG or ERROR."""
        return json.loads(self.body)

    def send(self, connection: Connection) -> None:
        """Send it."""
        connection.send_bytes(HEADER.pack(self.kind, self.number) + self.body)

    @classmethod
    def receive(cls, connection: Connection) -> "Message":
        """The next one. Raises EOFError where the peer has closed the connection."""
        data = connection.recv_bytes()
        kind, number = HEADER.unpack_from(data)
        return cls(Kind(kind), number, data[HEADER.size :])


class Channel:
    """A rank's end of the connection. Any thread may send."""

    def __init__(self, connection: Connection):
        self._connection, self._lock = connection, Lock()

    def send(self, kind: Kind, body: bytes = b"", number: int = 0) -> None:
        """Send a message."""
        with self._lock:
            Message(kind, number, body).send(self._connection)

    def messages(self) -> Iterator[Message]:
        """The driver's messages, until it closes the connection."""
        with suppress(EOFError):
            while True:
                yield Message.receive(self._connection)


@dataclass(frozen=True)
class SetUp:
    """Everything from which a rank builds its part of the engine.

    Attributes:
        rank: its number.
        args, source, plan, device, draft: those of the engine, equal on all ranks.
        group: its connections to the other ranks, as plain data.
        log_level: of the logger "minillm".
        fingerprint: of the driver's node, for ranks on others.
    """

    rank: int
    args: EngineArgs
    source: ModelSource
    plan: MemoryPlan
    device: str
    draft: DraftSource | None
    group: dict[str, Any]
    log_level: int
    fingerprint: dict[str, str] | None = None

    @property
    def sources(self) -> dict[str, ModelSource]:
        """The models that a rank loads, by what they are."""
        return {"model": self.source} | ({"draft": self.draft.source} if self.draft else {})

    def to_bytes(self) -> bytes:
        """As JSON."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain["args"] = args_to_plain(self.args)
        plain["source"] = source_to_plain(self.source)
        plain["plan"] = asdict(self.plan)
        if self.draft is not None:
            source = source_to_plain(self.draft.source)
            plain["draft"] = {"source": source, "context": self.draft.context}
        return json.dumps(plain, default=os.fspath).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "SetUp":
        """The inverse of `to_bytes`. Opens the models' folders."""
        plain = json.loads(data)
        if prints := plain["fingerprint"]:
            check_versions(prints)
        plain["args"] = EngineArgs(**plain["args"])
        plain["source"] = source_from_plain(**plain["source"])
        plain["plan"] = msgspec.convert(plain["plan"], MemoryPlan)
        if draft := plain["draft"]:
            plain["draft"] = DraftSource(source_from_plain(**draft["source"]), draft["context"])
        made = cls(**plain)
        if prints:
            check_models(prints, made.sources, made.args.load_format)
        return made


def args_to_plain(args: EngineArgs) -> dict[str, Any]:
    """Engine arguments, without those of the subclass `AsyncEngineArgs`.

    Raises:
        UnsupportedFeatureError: a proposer is an object, which cannot be sent.
    """
    plain = {field.name: getattr(args, field.name) for field in fields(EngineArgs)}
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
    """Where a model is."""
    where = source.name if source.folder is None else str(source.folder.absolute())
    return {"name": source.name, "where": where, "hub_id": source.hub_id}


def source_from_plain(name: str, where: str, hub_id: str | None) -> ModelSource:
    """The same model; `where` names the same commit of a model from a hub. On a node that does not
    have that folder, the model of the same name."""
    try:
        source = open_model(where if Path(where).is_dir() else hub_id or name)
    except ModelNotFoundError as error:
        raise CheckpointError(
            f"Node {socket.gethostname()} does not have the driver's model: {error} Copy it to the "
            "same place."
        ) from None
    return replace(source, name=name, hub_id=hub_id)
