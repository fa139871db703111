"""Writes GGUF files (version 3), in the layout of `container.py`."""

import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from minillm.errors import CheckpointError
from minillm.gguf.container import ARRAY, BOOL, FLOAT32, SCALARS, STRING
from minillm.gguf.types import TYPES, BlockType

UINT32, INT32 = 4, 5
ALIGNED = 32  # the default of general.alignment
NUMBERS: Mapping[str, int] = {kind.name: number for number, kind in TYPES.items()}


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written: its name, its shape, outermost dimension first, and its type."""

    name: str
    shape: tuple[int, ...]
    type: BlockType

    @property
    def num_bytes(self) -> int:
        """Bytes of the data."""
        count = 1
        for size in self.shape:
            count *= size
        return count // self.type.weights * self.type.bytes


def write_gguf(
    path: Path, fields: Mapping[str, Any], tensors: list[NewTensor], data: Iterable[bytes]
) -> None:
    """Write a file completely or not at all. `data` has the bytes of each tensor, in order.

    Raises:
        CheckpointError: the file exists, or cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        if path.exists():
            raise CheckpointError(f"{path} exists; give a new file as --out.")
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            write_header(file, fields, tensors)
            for tensor, content in zip(tensors, data, strict=True):
                if len(content) != tensor.num_bytes:
                    raise RuntimeError(f"{tensor.name} has {len(content)} bytes.")
                file.write(bytes(-file.tell() % ALIGNED) + content)
        os.replace(part, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        part.unlink(missing_ok=True)


def write_header(file: BinaryIO, fields: Mapping[str, Any], tensors: list[NewTensor]) -> None:
    """Magic, counts, metadata and the table of tensors."""
    file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)))
    for key, value in fields.items():
        kind = kind_of(value)
        file.write(text(key) + struct.pack("<I", kind) + packed(value, kind))
    start = 0
    for tensor in tensors:
        sizes = reversed(tensor.shape)  # innermost first
        file.write(text(tensor.name) + struct.pack("<I", len(tensor.shape)))
        file.write(b"".join(struct.pack("<Q", size) for size in sizes))
        file.write(struct.pack("<IQ", NUMBERS[tensor.type.name], start))
        start += -(-tensor.num_bytes // ALIGNED) * ALIGNED


def kind_of(value: Any) -> int:
    """The type of a field: uint32 for integers, float32 for floats."""
    for python, kind in ((bool, BOOL), (str, STRING), (int, UINT32), (float, FLOAT32)):
        if isinstance(value, python):
            return kind
    return ARRAY


def packed(value: Any, kind: int) -> bytes:
    """The bytes of a value. Integers of an array are int32."""
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        item = kind_of(value[0]) if value else UINT32
        item = INT32 if item == UINT32 else item
        head = struct.pack("<IQ", item, len(value))
        return head + b"".join(packed(element, item) for element in value)
    return struct.pack(f"<{SCALARS[kind]}", value)


def text(value: str) -> bytes:
    """A string: its length in bytes, then UTF-8."""
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded
