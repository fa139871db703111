"""Limits all engines of a comparison to one instruction set (`--isa`), and checks who obeys.

Each library reads its own environment variable:

    MINILLM_C_ISA            minillm's C functions
    ONEDNN_MAX_CPU_ISA       oneDNN, in torch, vLLM and OpenVINO
    ATEN_CPU_CAPABILITY      torch's own functions
    TORCHINDUCTOR_CPP_MARCH  functions that torch.compile generates, which vLLM uses
    OV_CPU_MAX_ISA           OpenVINO's CPU plugin, in addition to its oneDNN
    GLIBC_TUNABLES           memory copies of the C library (AVX2 only)

vLLM chooses its functions by ``torch.cpu``, which reads no variable: `peers/vllm_engine.py` changes
what it reports. Evidence is what the engine reports, what its oneDNN writes into the log, and what
Linux knows of AVX-512 registers. OpenVINO's products of float32 weights (MLAS) obey no variable.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minillm.errors import ConfigError, did_you_mean
from minillm.lab.benchmarks.others import LEAST_TICKS
from minillm.plan import machine

ISA = "MINILLM_C_ISA"
# Classes of x86 processors, in ascending order, and the flags in /proc/cpuinfo that they need.
FLAGS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "avx2": frozenset({"avx2", "fma"}),
        "avx512": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
        "avx512_bf16": frozenset({"avx512f", "avx512_bf16"}),
        "amx": frozenset({"amx_tile", "amx_bf16"}),
    }
)
ONEDNN: Mapping[str, str] = MappingProxyType(
    {"avx2": "AVX2", "avx512": "AVX512_CORE", "avx512_bf16": "AVX512_CORE_BF16",
     "amx": "AVX512_CORE_AMX"}
)  # fmt: skip
MARCH: Mapping[str, str] = MappingProxyType({"avx2": "x86-64-v3", "avx512": "x86-64-v4"})
NO_AVX512 = "-AVX512F,-AVX512VL,-AVX512BW,-AVX512DQ,-AVX512CD"
# Words in oneDNN's description of an instruction set, highest first.
WORDS = (("AMX", "amx"), ("bfloat16", "avx512_bf16"), ("AVX-512", "avx512"), ("AVX2", "avx2"))
SAID = re.compile(r"^onednn_verbose,.*cpu,isa:(.*)$", re.MULTILINE)
PROC = Path("/proc")


def processor_class(flags: str | None = None) -> str:
    """The class of this processor: the highest of `FLAGS`, neon, or other."""
    known = set((machine.cpu_instructions() if flags is None else flags).split())
    found = [name for name, needed in FLAGS.items() if needed <= known]
    return found[-1] if found else "neon" if known & {"asimd", "neon"} else "other"


def processor(isa: str | None) -> dict[str, Any]:
    """JSON data: the class of this processor, the set that the engines were limited to, and the
    class that the figures stand for."""
    own = processor_class()
    variables = {} if isa is None else variables_of(isa)
    return {"class": isa or own, "own_class": own, "forced_isa": isa, "variables": variables}


def check_isa(name: str, own: str) -> None:
    """Reject an instruction set that does not exist, or that a processor of class `own` lacks."""
    if name not in FLAGS:
        raise ConfigError(
            f"--isa is {name!r}; it must be one of {', '.join(FLAGS)}.{did_you_mean(name, FLAGS)}"
        )
    order = list(FLAGS)
    if own not in order:
        raise ConfigError(f"--isa is for x86 processors; this one ({own}) needs no --isa.")
    if order.index(name) > order.index(own):
        usable = ", ".join(order[: order.index(own) + 1])
        raise ConfigError(f"--isa is {name!r}; this processor has {usable}.")


def variables_of(isa: str) -> dict[str, str]:
    """The environment variables that limit all engines to an instruction set."""
    found = {
        ISA: isa,
        "ONEDNN_MAX_CPU_ISA": ONEDNN[isa],
        "OV_CPU_MAX_ISA": ONEDNN[isa],
        "ATEN_CPU_CAPABILITY": "avx2" if isa == "avx2" else "avx512",
    }
    if isa in MARCH:
        found["TORCHINDUCTOR_CPP_MARCH"] = MARCH[isa]
    if isa == "avx2":
        found["GLIBC_TUNABLES"] = f"glibc.cpu.hwcaps={NO_AVX512}"
    return found


@contextmanager
def limited(isa: str | None) -> Iterator[None]:
    """Set the variables for the block: this process measures the ceilings, and its children are the
    engines. The libraries read them at their first use, so torch must not have been used before."""
    variables = {} if isa is None else variables_of(isa)
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def avx512_used(groups: Iterable[int], seconds: float, proc: Path = PROC) -> bool | None:
    """Whether a thread of the process groups that computed may have used AVX-512 registers within
    the last `seconds`; None if the kernel does not say (Linux on x86 does).

    False is certain. True is not: values that Python or NumPy left in these registers, or that a
    thread inherited, count as used.
    """
    groups, used = frozenset(groups), []
    for folder in (file.parent for file in proc.glob("[0-9]*/task/[0-9]*/arch_status")):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            elapsed = int((folder / "arch_status").read_text().split()[1])  # -1 if never
        except (OSError, LookupError, ValueError):  # the thread has ended
            continue
        if int(fields[2]) in groups and int(fields[11]) + int(fields[12]) >= LEAST_TICKS:
            used.append(0 <= elapsed < 1000 * seconds)
    return any(used) if used else None


def onednn_says(log: str) -> str | None:
    """The highest instruction set that oneDNN names in an engine's log; None without any."""
    said = " ".join(SAID.findall(log))
    return next((isa for word, isa in WORDS if word in said), None)


def obedience(
    isa: str, log: str, facts: Mapping[str, Any], registers: bool | None
) -> dict[str, Any]:
    """Whether an engine kept to `isa` (None: unknown), by the sets in its log and its `facts`, and
    by its use of AVX-512 registers, of which only their absence proves something."""
    order = list(FLAGS)
    said = dict(facts.get("uses", {}))
    if (logged := onednn_says(log)) is not None:
        said["oneDNN"] = logged
    evidence = [f"{part} uses {name}" for part, name in said.items()]
    kept = [order.index(name) <= order.index(isa) for name in said.values()]
    if isa == "avx2" and registers is False:
        evidence.append("no thread used AVX-512 registers")
        kept.append(True)
    if exempt := facts.get("exempt"):
        evidence.append(f"{exempt} cannot be limited")
        kept.append(False)
    return {"asked": isa, "obeyed": all(kept) if kept else None, "evidence": evidence}
