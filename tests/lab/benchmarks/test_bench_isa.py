"""--isa: all engines are limited to one instruction set."""

import os
from contextlib import suppress

import pytest
import torch

from minillm.errors import ConfigError
from minillm.lab.benchmarks.engine_process import environment
from minillm.lab.benchmarks.peers import vllm_engine
from minillm.lab.benchmarks.processor import (
    FLAGS,
    ISA,
    check_isa,
    limited,
    processor_class,
    variables_of,
)
from minillm.lab.commands.bench_compare import isa_of

HASWELL = "fpu sse2 avx avx2 fma bmi2"
SKYLAKE = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
ZEN5 = f"{SKYLAKE} avx512_bf16 avx512_vnni"
SAPPHIRE_RAPIDS = f"{ZEN5} amx_bf16 amx_tile amx_int8"


@pytest.mark.parametrize(
    ("flags", "name"),
    [(HASWELL, "avx2"), (SKYLAKE, "avx512"), (ZEN5, "avx512_bf16"), (SAPPHIRE_RAPIDS, "amx"),
     ("fp asimd bf16", "neon"), ("fpu sse2", "other"), ("", "other")],
)  # fmt: skip
def test_the_class_of_a_processor_is_that_of_its_flags(flags: str, name: str) -> None:
    assert processor_class(flags) == name


@pytest.mark.parametrize(("name", "own", "sentence"), [
    ("avx3", "amx", "--isa is 'avx3'; it must be one of avx2, avx512, avx512_bf16, amx."),
    ("avx512bf16", "amx", "Did you mean 'avx512_bf16'?"),
    ("amx", "avx512", "--isa is 'amx'; this processor has avx2, avx512."),
    ("avx2", "neon", "--isa is for x86 processors; this one (neon) needs no --isa."),
])  # fmt: skip
def test_a_set_that_is_not_there_is_one_sentence(name: str, own: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_isa(name, own)
    assert sentence in str(refused.value)


def test_the_variables_are_set_in_the_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.delenv(ISA, raising=False)
    with suppress(KeyboardInterrupt), limited("avx2"):
        told = environment("vllm", 2)
        raise KeyboardInterrupt
    assert {name: told[name] for name in variables_of("avx2")} == variables_of("avx2")
    assert ISA not in os.environ
    assert os.environ["ATEN_CPU_CAPABILITY"] == "default"


def test_the_variable_of_the_c_functions_limits_the_others_too(monkeypatch):
    monkeypatch.setenv(ISA, "avx2")
    assert isa_of(None, "cpu") == "avx2"
    monkeypatch.setenv(ISA, "")
    assert isa_of(None, "cpu") is None


def test_vllm_is_told_of_no_higher_set(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for each in vllm_engine.REPORTS.values() for name in each]
    for name in names:
        assert hasattr(torch.cpu, name)
        monkeypatch.setattr(torch.cpu, name, lambda: True)
    assert list(vllm_engine.REPORTS) == list(FLAGS)
    vllm_engine.limit_detection(None)
    vllm_engine.limit_detection("amx")
    assert all(getattr(torch.cpu, name)() for name in names)
    vllm_engine.limit_detection("avx512")
    assert [name for name in names if getattr(torch.cpu, name)()] == ["_is_avx512_supported"]
    vllm_engine.limit_detection("avx2")
    assert not any(getattr(torch.cpu, name)() for name in names)
