"""Builds the C sources beside this file when they are first needed, and loads what was built.

A library is kept in the user's cache, under a name that says what it was made from: the sources,
the compiler, the flags, and the processor's instructions. So it is built once, in a second, and
again when any of them changes. Where it cannot be built, the reason is kept instead, and torch does
the work.
"""

import ctypes
import hashlib
import mmap
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal

from minillm.plan import machine

Element = Literal["BF16", "F32"]

SOURCES = Path(__file__).parent / "c"
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-fopenmp",
    # Neither changes a result: nobody reads errno or floating-point exceptions here.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
)
WIDE = ("-mprefer-vector-width=512",)  # GCC takes half as much by itself
BUILD_SECONDS = 60
LEFT_BEHIND = 3600  # seconds after which nobody builds any more: a dozen compilers, one by one
OTHER_RUNTIMES = (b"libomp", b"libiomp")  # OpenMP by LLVM and Intel; torch's is by GNU
LARGE_PAGE = 2**21
WORKSHOP = "build-"
SWITCH = "MINILLM_C"  # 0: never build, always torch


class NoLibrary(Exception):
    """Why there is none, in a sentence without its full stop."""


@cache
def library(element: Element) -> ctypes.CDLL | NoLibrary:
    """The library for one element type, built if need be; or why there is none."""
    if os.environ.get(SWITCH) == "0":
        return NoLibrary(f"{SWITCH} is 0")
    if element == "BF16" and not machine.cpu_has_bf16():
        return NoLibrary("no bf16 instructions")
    try:
        return load(find_or_build(element))
    except NoLibrary as reason:
        return reason
    except OSError as error:  # a folder that may not even be looked into
        return NoLibrary(f"the library cannot be built: {error}")


def load(path: Path) -> ctypes.CDLL:
    """Load a library. torch comes first, so that both use the OpenMP runtime that it brings: two
    would each keep a thread per processor, and wait for each other."""
    import torch  # noqa: F401

    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise NoLibrary(f"the library cannot be loaded: {error}") from error
    one_thread_after_fork()
    return loaded


@cache
def one_thread_after_fork() -> None:
    """From now on, a process that is forked from this one computes with one thread. It has none of
    its parent's, and GNU's OpenMP would wait for them for ever."""
    import torch

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def find_or_build(element: Element, flags: Sequence[str] = (), folder: Path | None = None) -> Path:
    """The file of a library; `flags` come behind the usual ones.

    Raises:
        NoLibrary: there is no compiler, or it failed.
    """
    compiler = find_compiler()
    options = [*FLAGS, *wide_vectors(), f"-DELEMENT_{element}", *flags]
    sources = sorted(SOURCES.glob("*.[ch]"))
    if not sources:
        raise NoLibrary("its sources are missing")
    name = f"{element.lower()}-{fingerprint(compiler, options, sources)}.so"
    folder = folder or cache_folder()
    path = folder / name
    if not path.exists() or not path.stat().st_size:  # empty: a computer went off meanwhile
        build([str(compiler), *options], [each for each in sources if each.suffix == ".c"], path)
    return path


def find_compiler() -> Path:
    """The C compiler: $CC, GCC, or what the system calls one."""
    if sys.platform != "linux":
        raise NoLibrary("it is for Linux, where GCC and torch share one OpenMP runtime")
    for name in (os.environ.get("CC"), "gcc", "cc"):
        found = shutil.which(name) if name else None
        if found:
            return Path(found)
    raise NoLibrary("no C compiler (cc) was found")


def wide_vectors() -> Sequence[str]:
    """The flag for vectors of 512 bits, where a processor has them."""
    return WIDE if platform.machine() in ("x86_64", "AMD64") else ()


def fingerprint(compiler: Path, options: Sequence[str], sources: Sequence[Path]) -> str:
    """A name for all that a library depends on. The processor is in it, because a home folder may
    be shared by machines of several kinds."""
    digest = hashlib.sha256()
    parts = [str(compiler), str(compiler.stat().st_mtime_ns), *options, machine.cpu_instructions()]
    for part in parts:
        digest.update(part.encode() + b"\0")
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Where libraries are kept: ``$XDG_CACHE_HOME/minillm`` (``~/.cache/minillm``)."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "minillm"
    except RuntimeError as error:
        raise NoLibrary("this user has no home folder to keep a library in") from error


def build(command: Sequence[str], sources: Sequence[Path], path: Path) -> None:
    """Compile into `path`, which appears whole or not at all: two processes may build at once.
    The files are compiled beside each other, and then linked."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=WORKSHOP) as name:
            folder = Path(name)
            remove_left_behind(folder)
            objects = [folder / f"{source.stem}.o" for source in sources]
            compiling = [
                start([*command, "-c", str(source), "-o", str(made)])
                for source, made in zip(sources, objects, strict=True)
            ]
            finish(compiling)
            finish([start([*command, "-shared", *map(str, objects), "-o", f"{folder}/lib", "-lm"])])
            check_runtime(folder / "lib")
            (folder / "lib").replace(path)
    except OSError as error:
        raise NoLibrary(f"the library cannot be built: {error}") from error


def remove_left_behind(mine: Path) -> None:
    """Remove what builders left that were killed: their folders, if much older than `mine`."""
    now = mine.stat().st_mtime
    for folder in mine.parent.glob(f"{WORKSHOP}*"):
        with suppress(OSError):  # another one removes it, too
            if now - folder.stat().st_mtime > LEFT_BEHIND:
                shutil.rmtree(folder, ignore_errors=True)


def check_runtime(built: Path) -> None:
    """Refuse a library with an OpenMP of its own. Clang's beside torch's took 1.4 times as long for
    small products and norms in turn, and 200 ms now and then."""
    content = built.read_bytes()
    for name in OTHER_RUNTIMES:
        if name in content:
            found = name.decode()
            raise NoLibrary(
                f"the C compiler brings {found} beside torch's OpenMP; install GCC or set CC"
            )


def start(command: Sequence[str]) -> subprocess.Popen[str]:
    """A compiler at work."""
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)


def finish(running: Sequence[subprocess.Popen[str]]) -> None:
    """Wait for compilers, and say what the first of them that failed has to say."""
    try:
        for process in running:
            _, said = process.communicate(timeout=BUILD_SECONDS)
            if process.returncode != 0:
                lines = said.strip().splitlines() or [f"exit code {process.returncode}"]
                what = next((line for line in lines if "error" in line), lines[0])
                raise NoLibrary(f"the C compiler failed: {what[:200]}")
    except subprocess.TimeoutExpired as error:
        raise NoLibrary(f"the C compiler took over {BUILD_SECONDS} s") from error
    finally:
        for process in running:
            process.kill()
            process.wait()


def use_large_pages(address: int, num_bytes: int) -> None:
    """Ask Linux to use pages of 2 MiB for memory that was not written to yet. It may decline."""
    if sys.platform != "linux":
        return
    begin = -(-address // LARGE_PAGE) * LARGE_PAGE
    length = (address + num_bytes) // LARGE_PAGE * LARGE_PAGE - begin
    if length > 0:
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        advise(begin, length, mmap.MADV_HUGEPAGE)


def return_freed_memory() -> None:
    """Give the system back what was freed; glibc keeps it otherwise, where it lies between other
    things."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim.argtypes = [ctypes.c_size_t]
        trim(0)
