"""Chapter 11: what the compiler makes of kernels, as a table; no GPU is needed for it.

Where it cannot be done (the disassembler comes with Triton's wheels for Linux) the chapter shows
what kernels/README.md has of the engine's kernel.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from minillm_exercises.chapters.ch11_elsewhere import compiled
from minillm_exercises.chapters.common import show_table
from minillm_exercises.errors import ExerciseError
from minillm_exercises.notebook import say
from minillm_kernels import compiled_table

REGISTERS, WARPS = 65_536, 64  # of one of them: registers of 32 bits, and warps that it holds
# Its shared memory in KiB, of which every program takes one more than it asks for (CUDA C++
# Programming Guide, technical specifications by compute capability).
SHARED_KIB: Mapping[int, int] = MappingProxyType({80: 164, 90: 228})
FAMILY, LAUNCH = "paged_attention", "decode, Llama-3.1-8B, pages of 64"  # in kernels/README.md
HEAD = (
    "kernel", "for", "registers per thread", "shared memory (KiB)", "spilled (bytes)",
    "programs per processor", "matrix and copy instructions",
)  # fmt: skip


def show_compiled(
    function: Callable[..., object], arguments: Sequence[Any], names: Sequence[str]
) -> Mapping[str, int]:
    """A table of what the launches of ``function(*arguments)`` compile to for sm_80 and sm_90.

    `names` are theirs in order; those with an empty name are left out, and an architecture with
    fewer launches has the last of them. Returns how many programs of each a Hopper processor
    holds; nothing where nothing can be compiled, with the reason said.
    """
    if os.environ.get("MINILLM_QUICK"):
        say("Nothing is compiled while chapters are only tested.")
        return {}
    try:
        found = compiled(function, *arguments)
    except ExerciseError as error:
        say(f"Kernels cannot be compiled for a GPU here: {error}")
        show_recorded()
        return {}
    named = []
    for arch in dict.fromkeys(each["arch"] for each in found):
        these = [each for each in found if each["arch"] == arch]
        pairs = zip(names[-len(these) :], these, strict=True)
        named += [(name, each) for name, each in pairs if name]
    named.sort(key=lambda pair: names.index(pair[0]))
    show_table(HEAD, [row(name, each) for name, each in named])
    return {name: resident(each) for name, each in named if each["arch"] == 90}


def show_recorded() -> None:
    """What kernels/README.md says of the engine's decode kernel, if this is a checkout."""
    try:
        table = compiled_table.read(compiled_table.README.read_text("utf-8"))[FAMILY]
    except (OSError, ValueError, KeyError):
        return
    rows = [
        (f"engine, {LAUNCH}", f"sm_{arch}", text)
        for arch in (80, 90)
        for kernel, text in compiled_table.stated(table, LAUNCH, arch).items()
        if kernel == "decode_kernel"
    ]
    say("kernels/README.md has, from a machine where they can:")
    show_table(["kernel", "for", "compiles to"], rows)


def row(name: str, found: Mapping[str, Any]) -> tuple[object, ...]:
    """A compiled kernel as a row of the table."""
    shared = f"{found['shared'] / 1024:.1f}"
    arch, registers, stack = f"sm_{found['arch']}", found["registers"], found["stack"]
    return name, arch, registers, shared, stack, resident(found), instructions(found)


def resident(found: Mapping[str, Any]) -> int:
    """Programs that a multiprocessor holds at once, by registers, shared memory and warps."""
    warps, shared = found["num_warps"], found["shared"]
    per_warp = -(-found["registers"] * 32 // 256) * 256  # given away in pieces of 256
    by_shared = SHARED_KIB[found["arch"]] * 1024 // (shared + 1024)
    return min(REGISTERS // (per_warp * warps), by_shared, WARPS // warps)


def instructions(found: Mapping[str, Any]) -> str:
    """The matrix and copy instructions of compiled code, those that occur."""
    names = ("HMMA", "HGMMA", "LDGSTS", "UTMALDG")
    return ", ".join(name for name in names if found["opcodes"].get(name)) or "none of these"
