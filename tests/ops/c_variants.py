"""The C library of this processor, and the same for processors that can do less.

Memory that C gets here has a band around it: numbers that must not change, or NaN that must not be
read.
"""

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from minillm.ops import c_library, cpu
from minillm.plan import machine

NO_TILES = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")
PATHS = {
    "native": (),
    "no tiles": NO_TILES,
    "no pairs": (*NO_TILES, "-mno-avx512bf16"),
    "AVX2": ("-march=x86-64-v3", "-mno-avx512f", "-mprefer-vector-width=256"),
}
PRODUCT_PATHS = PATHS | {  # of linear.c and layers.c
    "tiles in C": (*NO_TILES, "-include", str(Path(__file__).with_name("tiles_in_c.h"))),
    "baseline": ("-march=x86-64", "-mno-avx", "-mprefer-vector-width=128"),
}
QUICK = ("native", "AVX2")  # the others are slow
NEEDS = {"no tiles": "avx512_bf16", "no pairs": "avx2", "AVX2": "avx2"}  # an instruction set
NEEDS |= {"tiles in C": "avx512_bf16", "baseline": "sse2"}
WIDE = ("-march=x86-64-v3", "-include", str(Path(__file__).with_name("avx512_in_avx2.h")))
PAIRS = (*WIDE, "-DEMULATE_VNNI", "-DEMULATE_BF16")
EMULATED_PATHS = {  # AVX-512 by SIMDe, on a processor with AVX2
    "AVX-512": WIDE,
    "AVX-512 with VNNI": (*WIDE, "-DEMULATE_VNNI"),
    "AVX-512 with VNNI and BF16": PAIRS,
    "AMX": (*PAIRS, *PRODUCT_PATHS["tiles in C"][len(NO_TILES) :]),
}
ELEMENTS: dict[c_library.Element, torch.dtype] = {"BF16": torch.bfloat16, "F32": torch.float32}
DIVIDED = ("-DSTARTING_NANOSECONDS=1",)  # small jobs, too, are divided among the threads
BAND = 64  # elements on each side
MARK = 119.0


@cache
def folder() -> Path:
    """Where libraries of the tests stay from run to run: in the user's cache. Their names depend on
    everything but the headers beside this file, on which the folder's name depends."""
    digest = hashlib.sha256()
    for header in sorted(Path(__file__).parent.glob("*.h")):
        digest.update(header.read_bytes())
    return c_library.cache_folder() / "tests" / digest.hexdigest()[:16]


def use(monkeypatch: pytest.MonkeyPatch, library: c_library.Library, dtype: torch.dtype) -> None:
    """Compute with the functions of another library, which was built for this type."""
    usual = cpu.functions  # of float64 there are none
    monkeypatch.setattr(cpu, "functions", lambda dtype: library if usual(dtype) else None)


def parameters(*cases: tuple[str, ...]) -> list:
    """Parameters that begin with one of PRODUCT_PATHS, slow but for QUICK."""
    return [
        pytest.param(case if len(case) > 1 else case[0], id=" ".join(case),
                     marks=[pytest.mark.slow] * (case[0] not in QUICK))
        for case in cases
    ]  # fmt: skip


def skip_without_instructions(path: str) -> None:
    """Skip a test of one of PRODUCT_PATHS that this processor cannot run."""
    needed = NEEDS.get(path)
    if needed is not None and needed not in machine.cpu_instructions().split():
        pytest.skip(f"a processor without {needed}")


@cache
def built(path: str, element: c_library.Element) -> c_library.Library:
    """The library as compiled for one of PRODUCT_PATHS; skips the test where that cannot be."""
    skip_without_instructions(path)
    try:
        flags = *PRODUCT_PATHS[path], *DIVIDED
        return c_library.load(c_library.find_or_build(element, flags, folder()))
    except c_library.NoLibrary as reason:
        pytest.skip(str(reason))


def skip_without_simde() -> None:
    """Skip a test of EMULATED_PATHS on machines without SIMDe or AVX2, or with AVX-512 itself."""
    known = machine.cpu_instructions().split()
    if "avx2" not in known or "avx512f" in known:
        pytest.skip("emulates AVX-512 on a processor with AVX2 only")
    if not any((Path(each) / "simde").is_dir() for each in ("/usr/include", "/usr/local/include")):
        pytest.skip("SIMDe is not installed; CONTRIBUTING.md names its Debian package")


def patiently() -> AbstractContextManager[object]:
    """Let a compiler run for 15 minutes: each instruction is a function, or many tests compile."""
    return patch.object(c_library, "BUILD_SECONDS", 900)


@cache
def emulated(path: str, element: c_library.Element) -> c_library.Library:
    """The library for one of EMULATED_PATHS. It is an error if it cannot be built."""
    skip_without_simde()
    # GCC would contract some sums of products of these long vectors and not others.
    flags = *EMULATED_PATHS[path], *DIVIDED, "-O1", "-ffp-contract=off"
    with patiently():
        return c_library.load(c_library.find_or_build(element, flags, folder()))


class Mixed:
    """A library of which one function, and the threads, are those of another one."""

    def __init__(self, right: c_library.Library, name: str, wrong: c_library.Library):
        self._right, self.threads = right, wrong.threads
        setattr(self, name, getattr(wrong, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._right, name)


@contextmanager
def with_threads(found: c_library.Library, count: int) -> Iterator[None]:
    """Compute with this number of threads, then with one."""
    found.threads.set(count)
    try:
        yield
    finally:
        found.threads.set(1)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Compute with this number of torch's threads, then with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Guarded:
    """A tensor in the middle of a longer one, with MARK on both sides: for outputs."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, fill: float = float("nan")):
        size = torch.Size(shape).numel()
        self.memory = torch.full((size + 2 * BAND,), MARK, dtype=dtype)
        self.inside = self.memory[BAND : BAND + size].view(shape)
        self.inside.fill_(fill)

    def checked(self) -> Tensor:
        """The tensor, whose neighbours were not written."""
        size = self.inside.numel()
        assert self.memory[:BAND].eq(MARK).all(), "written in front of the output"
        assert self.memory[BAND + size :].eq(MARK).all(), "written behind the output"
        return self.inside


def poisoned(x: Tensor) -> Tensor:
    """The same tensor between NaN: what is read outside shows in the result."""
    guarded = torch.full((x.numel() + 2 * BAND,), float("nan"), dtype=x.dtype)
    inside = guarded[BAND : BAND + x.numel()].view(x.shape)
    inside.copy_(x)
    return inside


def ulps(got: Tensor, exact: Tensor) -> Tensor:
    """How far float32 numbers are from exact ones in float64, in units of the last place."""
    _, exponent = torch.frexp(exact)
    unit = torch.ldexp(torch.ones_like(exact), exponent.clamp(min=-125) - 24)
    return (got.double() - exact).abs() / unit
