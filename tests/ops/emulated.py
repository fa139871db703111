"""The C library compiled for another processor, whose functions run under qemu.

`Emulated` takes the place of a library: tests call its functions with addresses, as those of any
other. A call sends the memory behind the addresses to `emulator.c`, and writes back what it
returns. So the tests of the C functions run with the same inputs and compare with the same
float64.
"""

import ctypes
import hashlib
import shutil
import struct
import subprocess
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from minillm.ops import c_library, cpu_structures
from tests.ops.c_variants import DIVIDED, folder, patiently

COMPILER, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"
OWN_SOURCES = [Path(__file__).with_name(name) for name in ("emulator.c", "jobs.c")]
ROWS_OF = {"choose_tokens": 3, "draw_from_shard": 3, "describe_tokens": 2}
"""Sampling gets an array of addresses first: the argument that says how many there are."""


@dataclass(frozen=True)
class Machine:
    """A processor: the compiler's flags, and qemu's name of one that has no more than these."""

    flags: tuple[str, ...]
    cpu: str


MACHINES = {
    "neon": Machine(("-march=armv8-a",), "cortex-a72"),
    "neon_bf16": Machine(("-march=armv8.2-a+bf16",), "max"),
}


def skip_without_tools() -> None:
    """Skip a test on machines without the cross compiler or qemu."""
    for name in (COMPILER, QEMU):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed; CONTRIBUTING.md names its Debian package")


def build(
    machine: Machine,
    element: c_library.Element,
    path: Path,
    sources: Path = c_library.SOURCES,
    options: Sequence[str] = (),
) -> Path:
    """The driver with the functions of a folder of sources, as one program without libraries."""
    skip_without_tools()
    command = [COMPILER, *c_library.FLAGS, *machine.flags, f"-DELEMENT_{element}", *DIVIDED]
    command.append(f"-I{sources}")
    files = [*sorted(sources.glob("*.c")), *OWN_SOURCES]
    path.mkdir(parents=True, exist_ok=True)
    objects = [str(path / f"{each.stem}.o") for each in files]
    compiling = [
        c_library.start([*command, *options, "-c", str(each), "-o", made])
        for each, made in zip(files, objects, strict=True)
    ]
    made = path / "emulator"
    with patiently():
        c_library.wait(compiling)
        c_library.wait([c_library.start([*command, "-static", *objects, "-o", str(made), "-lm"])])
    return made


def kept(machine: Machine, element: c_library.Element, options: Sequence[str]) -> Path:
    """The same from run to run, in the user's cache, by what it is compiled of and how."""
    digest = hashlib.sha256(repr((machine, element, options, c_library.FLAGS, DIVIDED)).encode())
    for file in sorted([*c_library.SOURCES.glob("*.[ch]"), *OWN_SOURCES]):
        digest.update(file.read_bytes())
    made = folder() / f"emulator-{digest.hexdigest()[:16]}"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as place:
            build(machine, element, Path(place), options=options).replace(made)
    return made


class Memory:
    """Tensors and structures whose addresses were asked for, kept alive while they are needed."""

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.structures: dict[int, ctypes.Structure] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Note everything whose address is taken; forget all at the end."""
        original = torch.Tensor.data_ptr

        def data_ptr(tensor: torch.Tensor) -> int:
            storage = tensor.untyped_storage()
            self.storages[storage.data_ptr()] = storage
            return original(tensor)

        def addressof(structure: ctypes.Structure) -> int:
            address = ctypes.addressof(structure)
            self.structures[address] = structure
            return address

        with (
            patch.object(torch.Tensor, "data_ptr", data_ptr),
            patch.object(cpu_structures, "addressof", addressof),
        ):
            try:
                yield
            finally:
                self.storages.clear()
                self.structures.clear()

    def around(self, address: int) -> tuple[int, int] | None:
        """Address and size of the memory in which an address lies."""
        starts = sorted(self.storages)
        at = bisect_right(starts, address) - 1
        if at < 0 or address >= starts[at] + self.storages[starts[at]].nbytes():
            return None
        return starts[at], self.storages[starts[at]].nbytes()


class Emulated(c_library.Library):
    """A library whose functions run in the emulator."""

    def __init__(self, program: Path, machine: Machine):
        self.memory = Memory()
        self._lock = threading.Lock()
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [QEMU, "-cpu", machine.cpu, str(program)], stdin=pipe, stdout=pipe
        )

    def __getattr__(self, name: str) -> "Function":
        if name.startswith("_"):
            raise AttributeError(name)
        function = Function(self, name)
        if name in c_library.PROTOTYPES:
            function.restype, *function.argtypes = c_library.PROTOTYPES[name]
        setattr(self, name, function)
        return function

    def close(self) -> None:
        """End the emulator, which ends with its input."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()

    def exchange(self, request: bytes, size: int) -> bytes:
        """Send a call, and receive its result and memory."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(request)
        self.process.stdin.flush()
        answer = self.process.stdout.read(size)
        if len(answer) < size:
            raise RuntimeError(f"the emulator ended with exit code {self.process.wait()}")
        return answer


class Function:
    """A function of an emulated library, called like one of ctypes."""

    def __init__(self, library: Emulated, name: str):
        self.library, self.name = library, name
        self.restype: Any = ctypes.c_int64
        self.argtypes: Sequence[Any] = ()

    def __call__(self, *arguments: Any) -> int:
        call = Call(self.library.memory)
        for place, (kind, given) in enumerate(zip(self.argtypes, arguments, strict=True)):
            count = arguments[ROWS_OF[self.name]] if self.name in ROWS_OF and not place else 0
            call.add(kind, given, count)
        with self.library._lock:
            answer = self.library.exchange(call.request(self.name), call.answer_size())
        call.write_back(answer)
        return struct.unpack_from("<q", answer)[0]


class Call:
    """The arguments of a call, and the memory that they point to."""

    def __init__(self, memory: Memory):
        self.memory = memory
        self.regions: dict[int, tuple[int, bool]] = {}  # address: size, has addresses
        self.integers: list[tuple[int, int]] = []
        self.floats: list[bytes] = []

    def add(self, kind: Any, given: Any, addresses: int) -> None:
        """Add an argument; it points to this number of addresses, if that is not 0."""
        if kind is ctypes.c_float:
            self.floats.append(struct.pack("<fi", given, 0))
        elif kind is ctypes.c_double:
            self.floats.append(struct.pack("<d", given))
        elif kind is ctypes.c_int64:
            self.integers.append((0, int(given)))
        elif isinstance(given, int | None):
            self.integers.append((1, given or 0))
            self.point_to(given or 0, addresses)
        else:  # an array or structure, or a reference to one
            held = getattr(given, "_obj", given)
            self.integers.append((1, ctypes.addressof(held)))
            self.point_to_structure(ctypes.addressof(held), ctypes.sizeof(held))

    def point_to(self, address: int, addresses: int) -> None:
        """The memory of a tensor, or an array of addresses of tensors."""
        if addresses:
            self.point_to_structure(address, 8 * addresses)
        elif address:
            found = self.memory.around(address)
            if found is None:
                raise RuntimeError(f"the address {address:#x} is in none of the tensors")
            self.regions[found[0]] = found[1], False

    def point_to_structure(self, address: int, size: int) -> None:
        """Memory that may contain addresses of tensors and of other structures."""
        self.regions[address] = size, True
        for (value,) in struct.iter_unpack("<q", ctypes.string_at(address, size // 8 * 8)):
            found = self.memory.around(value)
            if found is not None:
                self.regions[found[0]] = found[1], False
            elif value in self.memory.structures and value not in self.regions:
                inner = self.memory.structures[value]
                self.point_to_structure(value, ctypes.sizeof(inner))

    def request(self, name: str) -> bytes:
        parts = [name.encode().ljust(32, b"\0"), struct.pack("<q", len(self.regions))]
        for address, (size, has_addresses) in self.regions.items():
            parts.append(struct.pack("<qqq", address, size, has_addresses))
            parts.append(ctypes.string_at(address, size))
        parts.append(struct.pack("<q", len(self.integers)))
        parts += [struct.pack("<qq", *each) for each in self.integers]
        parts += [struct.pack("<q", len(self.floats)), *self.floats]
        return b"".join(parts)

    def answer_size(self) -> int:
        return 8 + sum(size for size, _ in self.regions.values())

    def write_back(self, answer: bytes) -> None:
        """Write the memory of tensors; structures are only read by C."""
        at = 8
        for address, (size, has_addresses) in self.regions.items():
            if not has_addresses:
                ctypes.memmove(address, answer[at : at + size], size)
            at += size
