"""The C sources compile without a warning: with GCC and Clang, for every instruction set, and for
macOS as far as its headers are not needed."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from minillm.ops import c_library, instruction_sets

WARNINGS = (
    "-Werror",
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Wshadow",
    "-Wstrict-prototypes",
    "-Wno-pass-failed",  # a loop that Clang does not vectorise is no mistake
)
SETS = {each.name: each.flags for each in instruction_sets.X86}
SETS |= {"x86-64-v2": ("-march=x86-64-v2",)}
ARM = {each.name: each.flags for each in (instruction_sets.NEON, instruction_sets.NEON_BF16)}
ARM_HEADERS = Path("/usr/aarch64-linux-gnu/include")  # of Debian's cross compiler
ELEMENTS = ("BF16", "F32")


@dataclass(frozen=True)
class Compiler:
    """A compiler, and the options with which it compiles for a system."""

    command: str
    options: tuple[str, ...]
    sets: dict[str, tuple[str, ...]]
    headers: Path | None = None
    only_syntax: bool = False


COMPILERS = {
    "GCC": Compiler("gcc", (), SETS),
    "Clang": Compiler("clang", (), SETS),
    "GCC for Arm": Compiler("aarch64-linux-gnu-gcc", (), ARM),
    "Clang for Arm": Compiler("clang", ("--target=aarch64-linux-gnu",), ARM, ARM_HEADERS),
    # The headers of glibc take the place of Apple's: this checks our code, not its use of theirs.
    "Clang for macOS": Compiler(
        "clang",
        ("--target=arm64-apple-macos13", "-isystem", str(ARM_HEADERS), "-U__nonnull"),
        ARM,
        ARM_HEADERS,
        only_syntax=True,
    ),
}
CELLS = [(name, each) for name, compiler in COMPILERS.items() for each in compiler.sets]


def compile_all(compiler: Compiler, flags: tuple[str, ...], sources: Path, place: Path) -> None:
    """Compile all sources for both element types; skips the test without the compiler."""
    if shutil.which(compiler.command) is None:
        pytest.skip(f"{compiler.command} is not installed")
    if compiler.headers is not None and not compiler.headers.is_dir():
        pytest.skip("the headers of aarch64-linux-gnu-gcc are not installed")
    how = ["-fsyntax-only"] if compiler.only_syntax else ["-c"]
    for element in ELEMENTS:
        command = [compiler.command, *c_library.FLAGS, *WARNINGS, *flags, *compiler.options, *how]
        files = [str(each) for each in sorted(sources.glob("*.c"))]
        done = subprocess.run(
            [*command, f"-DELEMENT_{element}", *files], cwd=place, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{element}: {done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "instructions"), CELLS)
def test_there_is_no_warning(name, instructions, tmp_path):
    compiler = COMPILERS[name]
    compile_all(compiler, compiler.sets[instructions], c_library.SOURCES, tmp_path)


@pytest.mark.parametrize(
    ("name", "instructions"),
    [("Clang", "avx512_bf16"), ("GCC for Arm", "neon"), ("Clang for macOS", "neon_bf16")],
)
def test_there_is_no_warning_of_syntax(name, instructions, tmp_path):
    """The same without code: unknown pragmas, unused and missing names, wrong types."""
    compiler = COMPILERS[name]
    quick = Compiler(
        compiler.command, compiler.options, compiler.sets, compiler.headers, only_syntax=True
    )
    compile_all(quick, quick.sets[instructions], c_library.SOURCES, tmp_path)
