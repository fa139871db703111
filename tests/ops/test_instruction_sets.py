"""Which instruction set the C functions are compiled for, and what a model answers on each."""

import os
import platform
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.config import MLAConfig, MoEConfig
from minillm.engine import setup
from minillm.errors import ConfigError
from minillm.ops import c_library, instruction_sets
from minillm.plan import machine
from tests.ops import c_variants, small_decoders

V3 = "sse4_2 avx avx2 fma f16c bmi1 bmi2 movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
BF16 = f"{V4} avx512_vnni avx512_bf16"
AMX = f"{BF16} amx_tile amx_bf16 amx_int8"


@pytest.fixture
def processor(monkeypatch):
    """Sets the processor's kind and flags, in an environment that limits nothing."""
    for name in (instruction_sets.VARIABLE, instruction_sets.LIMIT):
        monkeypatch.delenv(name, raising=False)

    def become(flags: str, kind: str = "x86_64") -> None:
        monkeypatch.setattr(machine, "cpu_instructions", lambda *_: flags)
        monkeypatch.setattr(platform, "machine", lambda: kind)

    return become


@pytest.mark.parametrize(
    ("flags", "kind", "names"),
    [
        (AMX, "x86_64", ["amx", "avx512_bf16", "avx512", "avx2"]),
        (BF16, "x86_64", ["avx512_bf16", "avx512", "avx2"]),
        (V4, "AMD64", ["avx512", "avx2"]),
        (V3, "x86_64", ["avx2"]),
        (V3.replace("fma", ""), "x86_64", ["other"]),
        ("fp asimd bf16", "aarch64", ["neon_bf16", "neon"]),
        ("fp asimd", "aarch64", ["neon"]),
        ("", "arm64", ["neon"]),
        ("", "riscv64", ["other"]),
    ],
)
def test_sets_of_a_processor(processor, flags, kind, names):
    processor(flags, kind)
    assert [each.name for each in instruction_sets.available()] == names
    chosen = instruction_sets.chosen()
    assert chosen is not None
    assert chosen.name == names[0]


def test_a_lower_set_can_be_chosen(processor, monkeypatch):
    processor(BF16)
    for name in ("avx2", "avx512", "avx512_bf16"):
        monkeypatch.setenv(instruction_sets.VARIABLE, name)
        chosen = instruction_sets.chosen()
        assert chosen is not None
        assert chosen.name == name
    monkeypatch.setenv(instruction_sets.VARIABLE, "none")
    assert instruction_sets.chosen() is None
    assert str(c_library.library.__wrapped__("F32")) == "MINILLM_C_ISA is none"


def test_macos_reports_bf16_by_sysctl(processor, monkeypatch):
    """A name of sysctl instead of a flag of /proc/cpuinfo, asked of the system's own library."""
    processor("", "arm64")
    asked = []

    class System:
        def __init__(self, answer: int, failure: int):
            self.answer, self.failure = answer, failure

        def sysctlbyname(self, name, value, size, *rest) -> int:
            asked.append(name)
            value._obj.value = self.answer
            return self.failure

    monkeypatch.setattr(sys, "platform", "darwin")
    for system, best in (
        (System(1, 0), "neon_bf16"),
        (System(0, 0), "neon"),
        (System(1, -1), "neon"),
    ):
        monkeypatch.setattr(machine.ctypes, "CDLL", lambda name, system=system: system)
        assert instruction_sets.available()[0].name == best
    assert set(asked) == {b"hw.optional.arm.FEAT_BF16"}
    monkeypatch.setattr(sys, "platform", "linux")
    assert instruction_sets.available() == (instruction_sets.NEON,)


def test_a_limit_of_torch_leaves_bf16_of_arm_alone(processor, monkeypatch):
    processor("asimd bf16", "aarch64")
    monkeypatch.setenv(instruction_sets.LIMIT, "default")
    assert instruction_sets.available() == (instruction_sets.NEON,)


@pytest.mark.parametrize("limit", ["avx2", "default", "AVX2"])
def test_limits_of_torch_hold_for_c(processor, monkeypatch, limit):
    processor(AMX)
    monkeypatch.setenv(instruction_sets.LIMIT, limit)
    assert [each.name for each in instruction_sets.available()] == ["avx2"]
    monkeypatch.setenv(instruction_sets.VARIABLE, "avx512")
    with pytest.raises(ConfigError) as error:
        instruction_sets.chosen()
    assert str(error.value) == (
        f"MINILLM_C_ISA is 'avx512'; with ATEN_CPU_CAPABILITY={limit}, this processor allows "
        "avx2, none."
    )


@pytest.mark.parametrize("name", ["amx", "neon", "sse", "AVX2"])
def test_unknown_and_missing_sets_are_errors(processor, monkeypatch, name):
    processor(BF16)
    monkeypatch.setenv(instruction_sets.VARIABLE, name)
    with pytest.raises(ConfigError) as error:
        instruction_sets.chosen()
    assert str(error.value) == (
        f"MINILLM_C_ISA is {name!r}; this processor allows avx512_bf16, avx512, avx2, none."
    )


@pytest.mark.parametrize(
    ("change", "eager", "dtype"),
    [
        ({}, False, "bfloat16"),
        ({}, True, "float32"),
        ({"hidden_size": 48}, False, "float32"),
        ({"head_dim": 8}, False, "float32"),
        ({"moe": MoEConfig(4, 2, 64)}, False, "bfloat16"),
        ({"moe": MoEConfig(4, 2, 48)}, False, "float32"),
        ({"mla": MLAConfig(32, 32, 16, 32)}, False, "bfloat16"),
        ({"mla": MLAConfig(32, 24, 16, 32)}, False, "float32"),
    ],
)
def test_auto_without_bf16_instructions(processor, monkeypatch, change, eager, dtype):
    """bf16 where all products and attention are ours, float32 where torch computes a part."""
    c_variants.built("AVX2", "BF16")
    processor(V3)
    monkeypatch.setattr(setup.cpu, "panels_are_fast", lambda dtype: dtype == torch.bfloat16)
    config = replace(small_decoders.BASE, **change)
    assert setup.choose_dtype("auto", config, torch.device("cpu"), eager) == dtype


GENERATE = """
import sys
import torch
from minillm.ops import cpu
from tests.ops.test_instruction_sets import greedy
print(cpu.describe(getattr(torch, sys.argv[1])))
print(greedy(sys.argv[1]))
"""
TITLES = {"avx512": "AVX-512", "avx2": "AVX2"}


def greedy(dtype: str) -> list[list[int]]:
    """Tokens of a short and a longer prompt."""
    llm = LLM("tiny", num_gpu_blocks_override=64, dtype=dtype)
    parameters = SamplingParams(temperature=0.0, max_tokens=12)
    prompts = ["def add(a, b):", "Once upon a time there was a little dog. " * 8]
    return [
        list(each.outputs[0].token_ids)
        for each in llm.generate(prompts, parameters, use_tqdm=False)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["avx2", "avx512"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_text_is_that_of_the_best_set(name, dtype):
    if name not in [each.name for each in instruction_sets.available()]:
        pytest.skip(f"a processor without {name}")
    c_variants.built("AVX2", "F32")  # skips without a compiler
    env = {**os.environ, instruction_sets.VARIABLE: name}
    command = [sys.executable, "-c", GENERATE, dtype]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path, tokens = done.stdout.splitlines()
    assert path == f"C functions of our own, {TITLES[name]} products"
    assert tokens == str(greedy(dtype))
