"""The GGUF container: reads metadata and the tensor table of a memory-mapped file.

Every length in the file is compared with the rest of the file before anything is allocated, so a
damaged file cannot make this process use more memory or time than its size justifies.

    "GGUF", u32 version, u64 tensors, u64 fields
    per field:  string key, u32 type, value            string: u64 length, UTF-8 bytes
    per tensor: string name, u32 dimensions, u64 each (innermost first), u32 type, u64 offset
    the data, at the next multiple of general.alignment
"""

import itertools
import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minillm.errors import CheckpointError, ModelNotFoundError
from minillm.gguf.types import TYPES, UNSUPPORTED, BlockType

SUFFIX, MAGIC = ".gguf", b"GGUF"
SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
FLOAT32, BOOL, STRING, ARRAY = 6, 7, 8, 9
VERSIONS = (2, 3)  # both have this layout
MAX_DIMENSIONS = 4
MAX_NESTING = 4  # arrays inside arrays
MAX_NAME = 1 << 16  # bytes of a key or of a tensor's name
ALIGNMENT = "general.alignment"


@dataclass(frozen=True)
class TensorInfo:
    """A tensor: its shape, outermost dimension first, and its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    start: int  # from the beginning of the file

    @property
    def num_bytes(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) // self.type.weights * self.type.bytes


@dataclass(frozen=True)
class GGUFFile:
    """An open file. `data` is the mapped file; the mapping ends with its last reference."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    data: mmap.mmap

    def floats(self, name: str) -> tuple[float, ...]:
        """The values of a small F32 tensor, such as RoPE's factors."""
        tensor = self.tensors[name]
        if tensor.type.name != "F32":
            raise CheckpointError(f"{self.path}: {name} is {tensor.type.name}; F32 is expected.")
        return struct.unpack_from(f"<{math.prod(tensor.shape)}f", self.data, tensor.start)


def is_gguf(path: Path) -> bool:
    """Whether a model's path is a GGUF file: by its suffix, or by its first bytes, for files such
    as Ollama's that have none."""
    if path.suffix == SUFFIX:
        return not os.path.isdir(path)  # Path.is_dir may raise OSError
    try:
        if not os.path.isfile(path):  # reading a pipe could wait forever
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def open_gguf(path: str | Path) -> GGUFFile:
    """Map a file and read everything but its tensors' data.

    Raises:
        ModelNotFoundError: there is no such file.
        CheckpointError: the file is damaged, or of a kind that is not supported.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            # Private and writable: torch warns about tensors over read-only memory.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"There is no file {path}.") from error
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    return parse(data, path)


def parse(data: Any, path: Path) -> GGUFFile:
    """The fields and tensors of a mapped file (or of bytes)."""
    cursor = Cursor(data, path)
    tensors, count = header(cursor)
    fields: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.name("metadata key")
        if key in fields:
            raise cursor.error(f"the metadata key {key!r} is given twice")
        fields[key] = cursor.value(cursor.number("I"), key)
    infos = [tensor_info(cursor) for _ in range(tensors)]
    return GGUFFile(path, fields, placed(cursor, fields, infos), data)


def header(cursor: "Cursor") -> tuple[int, int]:
    """Numbers of tensors and of fields, after magic and version."""
    if cursor.data[:4] != MAGIC:
        raise cursor.error("it does not begin with 'GGUF'")
    cursor.at = 4
    version = cursor.number("I")
    if version not in VERSIONS:
        kind = "big-endian" if version in (v << 24 for v in VERSIONS) else f"version {version}"
        raise cursor.error(f"it is {kind}; versions 2 and 3, little-endian, can be read")
    tensors = cursor.count(24, "tensors", cursor.number("Q"))
    return tensors, cursor.count(13, "metadata fields", cursor.number("Q"))


def tensor_info(cursor: "Cursor") -> TensorInfo:
    """An entry of the tensor table; `start` is relative to the data."""
    name = cursor.name("tensor name")
    dimensions = cursor.number("I")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.error(f"tensor {name!r} has {dimensions} dimensions; 1 to 4 are possible")
    sizes = [cursor.number("Q") for _ in range(dimensions)]
    kind, start = cursor.number("I"), cursor.number("Q")
    if kind not in TYPES:
        called = UNSUPPORTED.get(kind, f"number {kind}")
        known = ", ".join(tensor_type.name for tensor_type in TYPES.values())
        raise cursor.error(f"tensor {name!r} has the type {called}; supported are {known}")
    if min(sizes) < 1 or sizes[0] % TYPES[kind].weights:
        raise cursor.error(
            f"tensor {name!r} has dimensions {sizes}; the first must be a multiple of "
            f"{TYPES[kind].weights} for {TYPES[kind].name}, the others at least 1"
        )
    return TensorInfo(name, tuple(reversed(sizes)), TYPES[kind], start)


def placed(
    cursor: "Cursor", fields: Mapping[str, Any], infos: list[TensorInfo]
) -> dict[str, TensorInfo]:
    """The tensors by name, at their places in the file, which must not overlap."""
    alignment = fields.get(ALIGNMENT, 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.error(f"{ALIGNMENT} is {alignment!r}; it must be a power of two")
    data_start = -(-cursor.at // alignment) * alignment
    found: dict[str, TensorInfo] = {}
    for info in infos:
        if info.name in found:
            raise cursor.error(f"the tensor {info.name!r} is given twice")
        if info.start % alignment:
            raise cursor.error(
                f"tensor {info.name!r} is at {info.start}, not at a multiple of {alignment}"
            )
        start = data_start + info.start
        if start + info.num_bytes > len(cursor.data):
            raise cursor.error(
                f"tensor {info.name!r} needs {info.num_bytes:,} bytes at {start:,}, but the file "
                f"has {len(cursor.data):,} (fetch it again if it was cut off)"
            )
        found[info.name] = TensorInfo(info.name, info.shape, info.type, start)
    in_order = sorted(found.values(), key=lambda tensor: tensor.start)
    for one, next_one in itertools.pairwise(in_order):
        if one.start + one.num_bytes > next_one.start:
            raise cursor.error(f"tensors {one.name!r} and {next_one.name!r} overlap")
    return found


class Cursor:
    """Reads values one after another, each checked against the rest of the file."""

    def __init__(self, data: Any, path: Path):
        self.data, self.path, self.at = data, path, 0

    def error(self, what: str) -> CheckpointError:
        """An error that names the file."""
        return CheckpointError(f"{self.path} cannot be used as a GGUF file: {what}.")

    def count(self, smallest: int, what: str, number: int) -> int:
        """`number`, if that many items of at least `smallest` bytes fit into the rest."""
        rest = len(self.data) - self.at
        if number * smallest > rest:
            raise self.error(
                f"{number:,} {what} are announced at byte {self.at:,}, but only {rest:,} bytes "
                "follow"
            )
        return number

    def number(self, code: str) -> Any:
        """A little-endian number."""
        size = struct.calcsize(f"<{code}")
        if len(self.data) - self.at < size:
            raise self.error(f"it ends at byte {len(self.data):,}, within a number")
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += size
        return value

    def text(self, what: str) -> str:
        """A string."""
        length = self.count(1, f"bytes of {what}", self.number("Q"))
        start, self.at = self.at, self.at + length
        try:
            return bytes(self.data[start : self.at]).decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8 text") from error

    def name(self, what: str) -> str:
        """A short string that is not empty."""
        name = self.text(f"a {what}")
        if not 0 < len(name) <= MAX_NAME:
            raise self.error(f"a {what} has {len(name):,} characters; 1 to {MAX_NAME:,} can be")
        return name

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        """A value of a field: a number, a bool, a string, or a tuple of those."""
        if kind == STRING:
            return self.text(f"the value of {key!r}")
        if kind == ARRAY:
            return self.array(key, depth)
        if kind not in SCALARS:
            raise self.error(f"{key!r} has the unknown value type {kind}")
        return self.checked(self.number(SCALARS[kind]), kind, key)

    def checked(self, value: Any, kind: int, key: str) -> Any:
        """A number, or a bool from 0 or 1. A float32 such as 1e-6 becomes the double 1e-6."""
        if kind == FLOAT32:
            return float(str(np.float32(value)))  # the shortest number that rounds to it
        if kind == BOOL and value > 1:
            raise self.error(f"{key!r} is the bool {value}; bools are 0 or 1")
        return bool(value) if kind == BOOL else value

    def array(self, key: str, depth: int) -> tuple[Any, ...]:
        """An array of values of one type."""
        kind, number = self.number("I"), self.number("Q")
        if kind in SCALARS:
            return self.numbers(kind, number, key)
        if kind not in (STRING, ARRAY):
            raise self.error(f"{key!r} is an array of the unknown type {kind}")
        if depth >= MAX_NESTING:
            raise self.error(f"{key!r} has arrays nested more than {MAX_NESTING} deep")
        self.count(8 if kind == STRING else 12, f"items of {key!r}", number)
        return tuple(self.value(kind, key, depth + 1) for _ in range(number))

    def numbers(self, kind: int, number: int, key: str) -> tuple[Any, ...]:
        """All numbers of an array at once."""
        size = struct.calcsize(f"<{SCALARS[kind]}")
        self.count(size, f"items of {key!r}", number)
        values = struct.unpack_from(f"<{number}{SCALARS[kind]}", self.data, self.at)
        self.at += number * size
        if kind == BOOL:
            return tuple(self.checked(value, kind, key) for value in values)
        return values
