"""Limits all engines of a comparison to one instruction set (`--isa`).

Each library reads its own environment variable:

    MINILLM_C_ISA            minillm's C functions
    ONEDNN_MAX_CPU_ISA       oneDNN, in torch, vLLM and OpenVINO
    ATEN_CPU_CAPABILITY      torch's own functions
    TORCHINDUCTOR_CPP_MARCH  functions that torch.compile generates, which vLLM uses
    OV_CPU_MAX_ISA           OpenVINO's CPU plugin, in addition to its oneDNN
    GLIBC_TUNABLES           memory copies of the C library (AVX2 only)

vLLM chooses its functions by ``torch.cpu``, which reads no variable: `peers/vllm_engine.py` changes
what it reports. OpenVINO's products of float32 weights (MLAS) obey no variable.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from minillm.errors import ConfigError, did_you_mean
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


def processor_class(flags: str | None = None) -> str:
    """The class of this processor: the highest of `FLAGS`, neon, or other."""
    known = set((machine.cpu_instructions() if flags is None else flags).split())
    settings = [name for name, needed in FLAGS.items() if needed <= known]
    return settings[-1] if settings else "neon" if known & {"asimd", "neon"} else "other"


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
    settings = {
        ISA: isa,
        "ONEDNN_MAX_CPU_ISA": ONEDNN[isa],
        "OV_CPU_MAX_ISA": ONEDNN[isa],
        "ATEN_CPU_CAPABILITY": "avx2" if isa == "avx2" else "avx512",
    }
    if isa in MARCH:
        settings["TORCHINDUCTOR_CPP_MARCH"] = MARCH[isa]
    if isa == "avx2":
        settings["GLIBC_TUNABLES"] = f"glibc.cpu.hwcaps={NO_AVX512}"
    return settings


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
