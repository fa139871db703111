"""--isa: all engines are limited to one instruction set, and what they used is checked."""

import os
import platform
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from minillm.cli.terminal import Terminal
from minillm.errors import ConfigError
from minillm.lab.benchmarks import compare, contest, processor
from minillm.lab.benchmarks.ceiling import SUMS, Ceiling
from minillm.lab.benchmarks.compare import Work
from minillm.lab.benchmarks.compare_table import class_of, limits, show
from minillm.lab.benchmarks.contest import Case
from minillm.lab.benchmarks.engine_process import environment
from minillm.lab.benchmarks.peers import vllm_engine
from minillm.lab.benchmarks.processor import (
    FLAGS,
    ISA,
    avx512_used,
    check_isa,
    limited,
    obedience,
    onednn_says,
    processor_class,
    variables_of,
)
from minillm.lab.commands import bench
from minillm.models.presets import preset
from tests.lab.benchmarks.test_bench_beside import FakeEngine

ROOT = Path(__file__).resolve().parents[3]
HASWELL = "fpu sse2 avx avx2 fma bmi2"
SKYLAKE = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
ZEN5 = f"{SKYLAKE} avx512_bf16 avx512_vnni"
SAPPHIRE_RAPIDS = f"{ZEN5} amx_bf16 amx_tile amx_int8"
# Lines that oneDNN 3.13 wrote on a Zen 5, limited by ONEDNN_MAX_CPU_ISA.
ONEDNN_LINES = {
    "AVX2": "onednn_verbose,v1,info,cpu,isa:Intel AVX2",
    "AVX512_CORE": "onednn_verbose,v1,info,cpu,isa:Intel AVX-512 with AVX512BW, AVX512VL, and "
    "AVX512DQ extensions",
    "AVX512_CORE_BF16": "onednn_verbose,v1,info,cpu,isa:Intel AVX-512 with Intel DL Boost and "
    "bfloat16 support",
}
PROBE = """
import torch
from tests.lab.benchmarks.test_bench_isa import torch_uses_avx512
print(torch.backends.cpu.get_cpu_capability(), torch_uses_avx512())
"""


@pytest.mark.parametrize(
    ("flags", "name"),
    [(HASWELL, "avx2"), (SKYLAKE, "avx512"), (ZEN5, "avx512_bf16"), (SAPPHIRE_RAPIDS, "amx"),
     ("fp asimd bf16", "neon"), ("fpu sse2", "other"), ("", "other")],
)  # fmt: skip
def test_the_class_of_a_processor_is_that_of_its_flags(flags: str, name: str) -> None:
    assert processor_class(flags) == name


@pytest.mark.parametrize(
    ("name", "own", "sentence"),
    [
        ("avx3", "amx", "--isa is 'avx3'; it must be one of avx2, avx512, avx512_bf16, amx."),
        ("avx512bf16", "amx", "Did you mean 'avx512_bf16'?"),
        ("amx", "avx512", "--isa is 'amx'; this processor has avx2, avx512."),
        ("avx2", "neon", "--isa is for x86 processors; this one (neon) needs no --isa."),
    ],
)
def test_a_set_that_is_not_there_is_one_sentence(name: str, own: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_isa(name, own)
    assert sentence in str(refused.value)


def test_each_class_can_be_limited_to_itself_and_below() -> None:
    for place, own in enumerate(FLAGS):
        for name in list(FLAGS)[: place + 1]:
            check_isa(name, own)


def test_the_variables_are_set_in_the_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.delenv(ISA, raising=False)
    with suppress(KeyboardInterrupt), limited("avx2"):
        told = environment("vllm", 2)
        raise KeyboardInterrupt
    assert {name: told[name] for name in variables_of("avx2")} == variables_of("avx2")
    assert told["ONEDNN_VERBOSE"].startswith("dispatch")
    assert ISA not in os.environ
    assert os.environ["ATEN_CPU_CAPABILITY"] == "default"
    with limited(None):
        assert "ONEDNN_VERBOSE" not in environment("vllm", 2)


def test_the_variable_of_the_c_functions_limits_the_others_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ISA, "avx2")
    assert bench.isa_of(None, None) == "avx2"
    monkeypatch.setenv(ISA, "")
    assert bench.isa_of(None, None) is None


@pytest.mark.parametrize(("limit", "line"), ONEDNN_LINES.items())
def test_what_onednn_says_is_its_limit(limit: str, line: str) -> None:
    said = onednn_says(f"Loading.\n{line}\nonednn_verbose,v1,info,gpu,runtime:none\n")
    assert said is not None
    assert variables_of(said)["ONEDNN_MAX_CPU_ISA"] == limit


def test_the_highest_set_of_several_libraries_counts() -> None:
    both = f"{ONEDNN_LINES['AVX2']}\n{ONEDNN_LINES['AVX512_CORE']}"
    assert onednn_says(both) == "avx512"
    assert onednn_says("isa:Intel AVX2") is None


@pytest.mark.parametrize(
    ("isa", "line", "facts", "registers", "obeyed"),
    [
        ("avx2", "AVX2", {}, None, True),
        ("avx2", "AVX2", {}, True, True),  # used registers prove nothing
        ("avx2", "AVX512_CORE", {}, False, False),
        ("avx2", None, {}, None, None),
        ("avx2", None, {}, True, None),
        ("avx2", None, {}, False, True),
        ("avx2", "AVX2", {"uses": {"torch": "avx512"}}, None, False),
        ("avx2", None, {"uses": {"torch": "avx2"}}, None, True),
        ("avx2", "AVX2", {"exempt": "its products"}, None, False),
        ("avx512", "AVX512_CORE", {"exempt": ""}, True, True),
        ("avx512", "AVX512_CORE_BF16", {}, None, False),
        ("avx512_bf16", "AVX2", {}, None, True),
    ],
)
def test_an_engine_obeyed_if_all_evidence_says_so(
    isa: str, line: str | None, facts: dict, registers: bool | None, obeyed: bool | None
) -> None:
    found = obedience(isa, ONEDNN_LINES[line] if line else "", facts, registers)
    assert (found["asked"], found["obeyed"]) == (isa, obeyed)
    (said,) = limits({"engines": {"vllm": found}})
    words = {True: "and obeyed:", False: "and did not obey:", None: "and shows no evidence"}
    assert f"vllm was asked for {isa} {words[obeyed]}" in said


def test_threads_that_computed_count(tmp_path: Path) -> None:
    def thread(pid: int, tid: int, group: int, elapsed: int, ticks: int = 20) -> None:
        folder = tmp_path / str(pid) / "task" / str(tid)
        folder.mkdir(parents=True, exist_ok=True)
        fields = f"S 1 {group} {'0 ' * 8} {ticks} 0"
        (folder / "stat").write_text(f"{tid} (a) b) {fields}")
        (folder / "arch_status").write_text(f"AVX512_elapsed_ms:\t{elapsed}\n")

    assert avx512_used([5], 2.0, tmp_path) is None
    thread(11, 12, 5, 1, ticks=0)  # it has not computed
    assert avx512_used([5], 2.0, tmp_path) is None
    thread(11, 11, 5, -1)
    thread(11, 13, 5, 2500)
    thread(14, 15, 6, 4)  # of another group
    assert avx512_used([5], 2.0, tmp_path) is False
    assert avx512_used([5], 3.0, tmp_path) is True
    assert avx512_used([5, 6], 2.0, tmp_path) is True


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/arch_status").exists(), reason="the kernel does not say")
@pytest.mark.skipif(
    platform.machine() != "x86_64" or processor_class() == "avx2", reason="needs AVX-512"
)
def test_torch_obeys_and_the_kernel_confirms_it() -> None:
    """torch uses AVX-512 in this process, which has no limit, and not in one with --isa avx2."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("torch is limited here")
    assert torch_uses_avx512()
    with limited("avx2"):
        told = subprocess.run([sys.executable, "-c", PROBE], env=environment("minillm", 1),
                              text=True, capture_output=True, check=True, cwd=ROOT,
                              start_new_session=True)  # fmt: skip
    assert told.stdout.split() == ["AVX2", "False"]


def torch_uses_avx512() -> bool | None:
    """Whether AVX-512 registers are used while two threads of torch work."""
    threads, start = torch.get_num_threads(), time.perf_counter()
    torch.set_num_threads(2)
    try:
        x = torch.randn(512, 512)
        while (taken := time.perf_counter() - start) < 1.0:
            torch.softmax(x @ x.T, -1)
        return avx512_used([os.getpgrp()], taken / 2)
    finally:
        torch.set_num_threads(threads)


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


def test_the_json_and_the_table_say_who_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """minillm's fake oneDNN used AVX-512; vllm's did not, and its threads used no registers."""
    groups = {"minillm": 1, "vllm": 2}
    monkeypatch.setattr(contest, "avx512_used", lambda asked, seconds: asked == [1])
    monkeypatch.setattr(compare, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compare, "measure_ceiling", lambda *ask: Ceiling({SUMS: 1e9}, 1e9, 1e9))
    (tmp_path / "logs").mkdir()
    for name, limit in (("minillm", "AVX512_CORE"), ("vllm", "AVX2")):
        (tmp_path / "logs" / f"{name}.log").write_text(ONEDNN_LINES[limit] + "\n")

    def start(name: str, work: Work, log: Path) -> FakeEngine:
        engine = FakeEngine(name, [0])
        engine.group = groups[name]
        return engine

    work = Work("decode", "m", "m", preset("smollm2-135m"), (Case(1, 8, 3),), 1,
                ("minillm", "vllm"), 2, "bfloat16", isa="avx2")  # fmt: skip
    found = compare.measure(work, start=start)
    assert found["settings"]["isa"] == "avx2"
    engines = found["processor"]["engines"]
    assert {name: one["obeyed"] for name, one in engines.items()} == {
        "minillm": False, "vllm": True,
    }  # fmt: skip
    show(found, Terminal())
    shown = " ".join(capsys.readouterr().out.split())
    assert "minillm was asked for avx2 and did not obey: oneDNN uses avx512." in shown
    assert "vllm was asked for avx2 and obeyed: oneDNN uses avx2, no thread used AVX-512" in shown
    assert "all engines limited to avx2)" in shown


def test_the_json_names_the_class_and_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor.machine, "cpu_instructions", lambda: ZEN5)
    plain, forced = processor.processor(None), processor.processor("avx2")
    assert (plain["class"], plain["forced_isa"], plain["variables"]) == ("avx512_bf16", None, {})
    assert (forced["class"], forced["own_class"]) == ("avx2", "avx512_bf16")
    assert class_of(plain) == "avx512_bf16"
    assert class_of(forced) == "avx512_bf16, all engines limited to avx2"
