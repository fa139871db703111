"""The instruction sets that the C functions are compiled for: the best that the processor has, or a
lower one, which the environment variable `MINILLM_C_ISA` names."""

import os
import platform
from dataclasses import dataclass

from minillm.errors import ConfigError
from minillm.plan import machine

VARIABLE = "MINILLM_C_ISA"
NONE = "none"  # no C functions, as with MINILLM_C=0
LIMIT = "ATEN_CPU_CAPABILITY"  # the instruction sets of torch, which also limit C


@dataclass(frozen=True)
class InstructionSet:
    """A name, the flags of /proc/cpuinfo that it needs, and the compiler's flags for it."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


V3 = frozenset(["avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"])
V4 = V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
WIDE = ("-march=x86-64-v4", "-mprefer-vector-width=512")  # the default is 256 bits
BF16 = (*WIDE, "-mavx512bf16", "-mavx512vnni")
X86 = (  # best first
    InstructionSet(
        "amx",
        V4 | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"},
        (*BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    ),
    InstructionSet("avx512_bf16", V4 | {"avx512_bf16", "avx512_vnni"}, BF16),
    InstructionSet("avx512", V4, WIDE),
    InstructionSet("avx2", V3, ("-march=x86-64-v3",)),
)
NEON = InstructionSet("neon", frozenset(), ("-march=armv8-a",))  # every 64-bit Arm, and every Mac
NEON_BF16 = InstructionSet("neon_bf16", frozenset({"bf16"}), ("-march=armv8.2-a+bf16",))
OTHER = InstructionSet("other", frozenset(), ("-march=native",))  # another kind of processor
OTHER_X86 = InstructionSet("other", frozenset(), ("-march=native", *WIDE[1:]))  # old, or a Mac


def available() -> tuple[InstructionSet, ...]:
    """The sets of this processor, best first; limited to those of torch (`LIMIT`)."""
    kind = platform.machine()
    if kind in ("arm64", "aarch64"):
        return (NEON_BF16, NEON) if machine.arm_has_bf16() and not limited() else (NEON,)
    flags = set(machine.cpu_instructions().split())
    sets = [isa for isa in X86 if isa.needs <= flags]
    if limited():
        sets = [isa for isa in sets if isa.name == "avx2"]
    return tuple(sets) or (OTHER_X86 if kind in ("x86_64", "AMD64") else OTHER,)


def limited() -> bool:
    """Whether torch is limited to AVX2 or less, or on Arm to instructions without bf16."""
    return os.environ.get(LIMIT, "").lower() in ("default", "avx2")


def chosen() -> InstructionSet | None:
    """The set to compile for; None if C is turned off.

    Raises:
        ConfigError: `MINILLM_C_ISA` is unknown, or this processor does not have it.
    """
    name = os.environ.get(VARIABLE, "")
    sets = {isa.name: isa for isa in available()}
    if not name:
        return next(iter(sets.values()))
    if name == NONE:
        return None
    if name not in sets:
        known = [*(isa for isa in sets if isa != OTHER.name), NONE]
        why = f"with {LIMIT}={os.environ[LIMIT]}, " if limited() else ""
        raise ConfigError(f"{VARIABLE} is {name!r}; {why}this processor allows {', '.join(known)}.")
    return sets[name]
