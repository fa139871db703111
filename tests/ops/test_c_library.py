"""The library is built once, and where it cannot be, torch does the work and says why."""

import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minillm.ops import c_library, instruction_sets
from minillm.ops.c_library import NoLibrary, find_or_build
from minillm.plan import machine

try:
    COMPILER = c_library.find_compiler()
except NoLibrary as reason:
    pytest.skip(str(reason), allow_module_level=True)

COUNTING = """#!/bin/sh
echo run >> {log}
exec {compiler} "$@"
"""
SOURCE = "int answer(void) {{ return {number}; }}\n"


@pytest.fixture(autouse=True)
def nothing_switched_off(monkeypatch) -> None:
    """Whatever the environment of this test run leaves alone."""
    for name in (c_library.SWITCH, instruction_sets.VARIABLE, instruction_sets.LIMIT):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    """Sources of one line, which compile at once."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.c").write_text(SOURCE.format(number=41))
    monkeypatch.setattr(c_library, "SOURCES", folder)
    return folder


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """$CC is a compiler that is counted: how often it was started."""
    log = tmp_path / "log"
    write_compiler(tmp_path / "counted", COUNTING.format(log=log, compiler=COMPILER))
    monkeypatch.setenv("CC", str(tmp_path / "counted"))
    return lambda: len(log.read_text().splitlines()) if log.exists() else 0


def write_compiler(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def answer(path: Path) -> int:
    return c_library.load(path).answer()


# ---- what is built, and when ---------------------------------------------------------------------


def test_it_is_built_once(sources, runs, tmp_path):
    first = find_or_build("F32", folder=tmp_path / "cache")
    assert answer(first) == 41
    assert runs() == 2  # it compiles, and links
    assert find_or_build("F32", folder=tmp_path / "cache") == first
    assert runs() == 2


def test_whatever_changes_it_has_another_name(sources, runs, tmp_path, monkeypatch):
    def build(element="F32", flags=()) -> Path:
        return find_or_build(element, flags, tmp_path / "cache")

    made = [build(), build("BF16"), build(flags=["-DSOMETHING"])]
    (sources / "one.c").write_text(SOURCE.format(number=42))
    made.append(build())
    assert answer(made[-1]) == 42
    (sources / "other.h").write_text("")
    made.append(build())
    monkeypatch.setattr(machine, "cpu_instructions", lambda: "another processor")
    made.append(build())
    counted = Path(os.environ["CC"])
    os.utime(counted, ns=(0, 0))  # the compiler was replaced
    made.append(build())
    assert len(set(made)) == len(made)
    assert runs() == 2 * len(made)


PROGRAM = """
from minillm.ops import c_library, instruction_sets
from pathlib import Path
c_library.SOURCES = Path({sources!r})
print(c_library.find_or_build("F32"))
"""


@pytest.mark.slow
def test_two_processes_may_build_at_once_and_a_third_finds_it(sources, runs, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    command = [sys.executable, "-c", PROGRAM.format(sources=str(sources))]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {Path(each.communicate()[0].strip()) for each in both}
    assert len(paths) == 1
    (path,) = paths
    assert path.parent == tmp_path / "home/minillm"
    assert answer(path) == 41
    before = runs()
    assert subprocess.check_output(command, text=True).strip() == str(path)
    assert runs() == before
    assert list(path.parent.iterdir()) == [path]


def test_what_a_killed_builder_left_is_removed_and_a_working_one_is_left_alone(sources, tmp_path):
    killed, working = tmp_path / "build-killed", tmp_path / "build-working"
    for folder in (killed, working):
        folder.mkdir()
        (folder / "one.o").write_text("")
    ago = time.time() - c_library.STALE_SECONDS
    os.utime(killed, (ago - 60, ago - 60))
    os.utime(working, (ago + 60, ago + 60))
    path = find_or_build("F32", folder=tmp_path)
    assert {path, working, sources} == set(tmp_path.iterdir())
    assert list(working.iterdir())


# ---- why there is none ---------------------------------------------------------------------------


@pytest.fixture
def reason(monkeypatch):
    """Why there is no library for float32, asked anew."""

    def ask() -> str:
        found = c_library.library.__wrapped__("F32")
        assert isinstance(found, NoLibrary)
        return str(found)

    return ask


def test_no_compiler(monkeypatch, tmp_path, reason):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert reason() == "no C compiler (cc) was found"


FAILING = {
    "an error": (
        "echo 'a.c:1: note: x' >&2; echo 'a.c:2: error: y' >&2; exit 1",
        "a.c:2: error: y",
    ),
    "a line that says nothing": ("echo odd >&2; exit 3", "odd"),
    "no word": ("exit 4", "exit code 4"),
    "nothing made": ("exit 0", ""),
    "a signal": ("kill -9 $$", "exit code -9"),
    "it cannot be started": ("\0\0 not a program", ""),
}


@pytest.mark.parametrize("what", FAILING)
def test_a_compiler_that_fails(monkeypatch, tmp_path, reason, what):
    does, says = FAILING[what]
    script = does if does.startswith("\0") else f"#!/bin/sh\n{does}\n"
    compiler = write_compiler(tmp_path / "failing", script)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    expected = f"the C compiler failed: {says}" if says else "the library cannot be built: "
    assert reason().startswith(expected)
    assert not list((tmp_path / "home/minillm").iterdir())


@pytest.mark.parametrize("system", ["win32", "emscripten"])
def test_a_system_that_is_not_supported(monkeypatch, runs, reason, system):
    monkeypatch.setattr(sys, "platform", system)
    assert reason() == "it is for Linux and macOS"
    assert runs() == 0


@pytest.mark.parametrize(
    ("system", "kind", "flags"),
    [
        ("darwin", "arm64", ["-march=armv8-a"]),
        ("darwin", "x86_64", ["-march=native", "-mprefer-vector-width=512"]),
        ("linux", "aarch64", ["-march=armv8-a"]),
    ],
)
def test_flags_of_a_system(monkeypatch, sources, tmp_path, system, kind, flags):
    """The compiler gets them; a script instead of a compiler writes them down."""
    log = tmp_path / "log"
    text = f'#!/bin/sh\necho "$@" >> {log}\nwhile [ $1 != -o ]; do shift; done\necho > $2\n'
    monkeypatch.setenv("CC", str(write_compiler(tmp_path / "clang", text)))
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: kind)
    monkeypatch.setattr(machine, "cpu_instructions", lambda: "")  # there is no /proc/cpuinfo
    find_or_build("F32", folder=tmp_path / "made")
    compiling, linking = log.read_text().splitlines()
    assert [each for each in compiling.split() if each.startswith("-m")] == flags
    assert "-pthread" in compiling
    assert {"-pthread", "-shared"} <= set(linking.split())


def test_gcc_comes_before_clang_and_other_compilers(monkeypatch, tmp_path):
    for name in ("cc", "clang", "gcc", "mine"):
        write_compiler(tmp_path / name, "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert c_library.find_compiler() == tmp_path / "gcc"
    (tmp_path / "gcc").unlink()
    assert c_library.find_compiler() == tmp_path / "clang"
    monkeypatch.setenv("CC", "mine")
    assert c_library.find_compiler() == tmp_path / "mine"


@pytest.mark.slow
def test_the_library_needs_no_other_threads_than_the_system_s(tmp_path):
    """An OpenMP runtime of its own would compete with torch's."""
    found = find_or_build("F32", folder=tmp_path).read_bytes()
    assert b"pthread_create" in found
    assert not any(name in found for name in (b"libgomp", b"libomp", b"libiomp", b"GOMP_"))


def test_a_compiler_that_never_ends(monkeypatch, tmp_path, reason):
    compiler = write_compiler(tmp_path / "slow", "#!/bin/sh\nexec sleep 1000\n")
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(c_library, "BUILD_SECONDS", 0.2)
    assert reason() == "the C compiler took over 0.2 s"


@pytest.mark.parametrize("name", ["file", "too long" * 40])
def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path, reason, name):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
    assert reason().startswith("the library cannot be built: ")
    assert str(tmp_path / name) in reason()


def test_sources_that_are_not_there(monkeypatch, tmp_path, reason):
    monkeypatch.setattr(c_library, "SOURCES", tmp_path)
    assert reason() == "its sources are missing"


def test_a_file_that_is_no_library_is_built_again(sources, runs, tmp_path, monkeypatch):
    """A disk that was full, or a computer that was turned off."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = find_or_build("F32")
    path.write_bytes(b"")
    found = c_library.library.__wrapped__("F32")
    assert not isinstance(found, NoLibrary), found
    assert found.answer() == 41
    assert runs() == 4


def test_the_switch(monkeypatch, reason):
    monkeypatch.setenv("MINILLM_C", "0")
    assert reason() == "MINILLM_C is 0"


def test_no_bf16_instructions(monkeypatch):
    """A processor whose instructions are unknown, or older than AVX2."""
    monkeypatch.setattr(machine, "cpu_instructions", lambda *_: "sse4_2 avx")
    assert str(c_library.library.__wrapped__("BF16")) == "no bf16 instructions"


# ---- processes that are forked -------------------------------------------------------------------

FORK = """
import os
import torch
from minillm.ops import cpu

torch.set_num_threads(2)
x, weight = torch.randn(512, 512), torch.randn(512, 512)

def compute():
    right = torch.equal(cpu.rms_norm(x, weight[0], 1e-5), normed)
    return right and torch.allclose(x @ weight, product, atol=1e-3)

normed, product = cpu.rms_norm(x, weight[0], 1e-5), x @ weight
assert compute()
child = os.fork()
if child == 0:
    os._exit(10 * torch.get_num_threads() + compute())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), torch.get_num_threads(), compute())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@pytest.mark.slow
def test_a_forked_process_computes_with_one_thread():
    """The threads of its parent do not exist there. Those of C would be started anew, but torch's
    OpenMP would wait for its own."""
    command = [sys.executable, "-c", FORK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as running:
        try:
            said, _ = running.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            pytest.fail("the forked process waits for ever")
    assert said.split() == ["11", "2", "True"]


# ---- the whole engine ----------------------------------------------------------------------------

GENERATE = """
from minillm import LLM, SamplingParams
from minillm.ops import cpu, dispatch
import torch
llm = LLM("tiny", num_gpu_blocks_override=64)
said = llm.generate("def add(a, b):", SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
print(len(said[0].outputs[0].token_ids))
print(dispatch.explain(torch.device("cpu")))
print(cpu.describe(torch.float32))
"""
WITHOUT = {
    "the switch": ({"MINILLM_C": "0"}, "plain torch: MINILLM_C is 0"),
    "no compiler": ({"PATH": ""}, "plain torch: no C compiler (cc) was found"),
    "no folder": (
        {"XDG_CACHE_HOME": "/dev/null"},
        "plain torch: the library cannot be built: [Errno 20] Not a directory: '/dev/null/minillm'",
    ),
}


def generate(**environment: str) -> list[str]:
    """Tokens, path of what is computed, path of float32; in a process of its own."""
    env = {**os.environ, **environment}
    env.pop("CC", None)
    command = [sys.executable, "-c", GENERATE]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("what", WITHOUT)
def test_generation_goes_on_without_it(what):
    environment, why = WITHOUT[what]
    assert generate(**environment) == ["8", why, why]


@pytest.mark.slow
def test_generation_on_processors_that_can_less():
    """float32 in C, where torch was told to leave wide vectors alone."""
    tokens, path, path_of_float32 = generate(ATEN_CPU_CAPABILITY="avx2")
    assert tokens == "8"
    assert path == path_of_float32
    assert path.startswith("C functions of our own")


IMPORT = """
import sys
import torch
def refuse(event, arguments):
    if event == "subprocess.Popen":
        raise RuntimeError("a process was started")
sys.addaudithook(refuse)
import minillm.ops
from minillm.ops import cpu
from minillm.ops.c_library import library
assert library.cache_info().currsize == cpu.functions.cache_info().currsize == 0
"""


@pytest.mark.slow
def test_importing_builds_nothing():
    subprocess.run([sys.executable, "-c", IMPORT], check=True)
