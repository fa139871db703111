"""The C sources compile without a warning with GCC and Clang, for every set of instructions that a
library is built for, and for systems that these tests do not run on."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from minillm.ops import c_library

WARNINGS = (
    "-Werror",
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Wshadow",
    "-Wstrict-prototypes",
    "-Wvla-larger-than=65536",
)
STUBS = Path(__file__).with_name("apple_headers")
ELEMENTS = ("BF16", "F32")


@dataclass(frozen=True)
class Target:
    """Instructions: the compiler's flags, and what makes it compile for this processor."""

    flags: tuple[str, ...]
    gcc: str = "gcc"
    clang: tuple[str, ...] = ()


V4 = "-march=x86-64-v4"
AMX = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
ARM = ("--target=aarch64-linux-gnu",)
TARGETS = {
    "x86-64-v2": Target(("-march=x86-64-v2",)),
    "x86-64-v3": Target(("-march=x86-64-v3",)),
    "x86-64-v4": Target((V4, "-mprefer-vector-width=512")),
    "x86-64-v4 with bf16": Target((V4, "-mprefer-vector-width=512", "-mavx512bf16")),
    "x86-64-v4 with AMX": Target((V4, "-mprefer-vector-width=512", "-mavx512bf16", *AMX)),
    "armv8-a": Target(("-march=armv8-a",), "aarch64-linux-gnu-gcc", ARM),
    "armv8.2-a with bf16": Target(("-march=armv8.2-a+bf16",), "aarch64-linux-gnu-gcc", ARM),
}
