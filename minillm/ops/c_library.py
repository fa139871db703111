"""Builds and loads the C sources in `c/` at first use.

A library is kept in the user's cache folder. Its name is a hash of the sources, compiler, flags and
CPU instruction set, so it is built once, in about a second, and again when one of them changes. If
it cannot be built, torch is used, and `library` returns the reason.
"""

import ctypes
import hashlib
import math
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ctypes import c_double, c_float, c_int64, c_void_p
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from minillm.ops import instruction_sets
from minillm.plan import machine

Element = Literal["BF16", "F32"]

SOURCES = Path(__file__).parent / "c"
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-pthread",
    "-fopenmp-simd",  # vectorised sums; needs no OpenMP runtime
    # These two do not change results: errno and floating-point exceptions are not used.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
)
COMPILERS = ("gcc", "clang", "cc")
BUILD_SECONDS = 60
STALE_SECONDS = 3600  # age at which a build folder is removed
LARGE_PAGE = 2**21
BUILD_PREFIX = "build-"
SWITCH = "MINILLM_C"  # 0: never build, always torch
P, N, F, D = c_void_p, c_int64, c_float, c_double
ATTENTION = (P, P, P, P, N, P, P, P, N, F, N, P, N, N, N, N, N)
# The result and the arguments of each function in C, in the order of its declaration.
PROTOTYPES: Mapping[str, tuple[Any, ...]] = {
    "rms_norm": (None, P, N, P, P, N, N, F),
    "add_rms_norm": (None, P, P, P, P, P, N, N, F),
    "silu_mul": (None, P, P, N, N),
    "cos_sin": (None, P, P, F, P, P, N, N),
    "norm_rope_write": (N, P, P, P, F, P, P, N, P, P, N, N, N, P, N, P, N, N, N, N, N),
    "decode_attention": (N, *ATTENTION, N, N, N, P),
    "decode_queries": (N, N),
    "prefill_attention": (N, *ATTENTION, N),
    "int8_attention": (N, P, P, P, P, P, N, F, N, P, N, N, N, N, N, N, P),
    "norm_rope_write_int8": (N, P, P, P, F, P, P, N, P, P, N, P, N, N, N, N),
    "pack_panels": (None, P, P, N, N),
    "panel_product": (None, P, P, P, P, N, N, N, N),
    "panel_sums": (None, P, P, P, N, N, N, N),
    "panel_rows": (N, P, P, P, N, N, N),
    "panel_unit": (N,),
    "quantized_product": (N, P, P, P, P, N, N, N, N),
    "head_linear": (None, P, N, N, P, P, N, N, N, N),
    "latent_memory": (N, P, N),
    "expert_memory": (N, P, N),
    "chosen_experts": (N, P, P, P, P, P, P, N, P),
    "run_layers": (N, P, N, N, N, P, P),
    "choose_tokens": (N, P, N, P, N, N, N, P, P),
    "describe_tokens": (N, P, N, N, N, P, N, P, P, P),
    "draw_from_shard": (N, P, N, P, N, N, N, N, P, P, P),
    "set_threads": (None, N),
    "shared_sum": (N, P, N, P, N, D, P),
    "shared_gather": (N, P, N, P, N, P, D, P),
    "shared_abort": (None, P),
    "shared_bytes": (N, N, N),
}


class NoLibrary(Exception):
    """Why there is no library, as a sentence without a full stop."""


@cache
def library(element: Element) -> "Library | NoLibrary":
    """The library for one element type, built if necessary, or why there is none."""
    if os.environ.get(SWITCH) == "0":
        return NoLibrary(f"{SWITCH} is 0")
    chosen = instruction_sets.chosen()
    if chosen is None:
        return NoLibrary(f"{instruction_sets.VARIABLE} is {instruction_sets.NONE}")
    vectors = (*instruction_sets.X86, instruction_sets.NEON_BF16)
    if element == "BF16" and not (chosen in vectors or machine.cpu_has_bf16()):
        return NoLibrary("no bf16 instructions")
    try:
        return load(find_or_build(element))
    except NoLibrary as reason:
        return reason
    except OSError as error:  # a cache folder without permissions
        return NoLibrary(f"the library cannot be built: {error}")


def load(path: Path) -> "Library":
    """Load a library."""
    try:
        loaded = Library(str(path))
    except OSError as error:
        raise NoLibrary(f"the library cannot be loaded: {error}") from error
    one_thread_after_fork()
    return loaded


@cache
def one_thread_after_fork() -> None:
    """Make forked child processes use one thread. The C functions would start their own, but
    torch's OpenMP runtime would wait forever for threads that only the parent has."""
    import torch

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


class Threads:
    """The number of threads of a library: torch's, limited by the container's CPU quota."""

    def __init__(self, built: "Library"):
        self._set = built.set_threads
        self._most = math.ceil(machine.cpu_quota())
        self._wanted = 0

    def follow_torch(self) -> None:
        """Use as many threads as torch now does in the calling thread."""
        import torch

        wanted = torch.get_num_threads()
        if wanted != self._wanted:
            self.set(wanted)

    def set(self, wanted: int) -> None:
        """Use this number of threads, or the quota's if that is less."""
        self._wanted = wanted
        self._set(min(wanted, self._most))


class Library(ctypes.CDLL):
    """A library: its functions, as attributes, and the number of its threads."""

    def __getitem__(self, name: Any) -> Any:
        """A function, with the types of `PROTOTYPES`; called once for each."""
        function = super().__getitem__(name)
        if name in PROTOTYPES:
            function.restype, *function.argtypes = PROTOTYPES[name]
        return function

    @cached_property
    def threads(self) -> Threads:
        """The number of threads."""
        return Threads(self)


def find_or_build(element: Element, flags: Sequence[str] = (), folder: Path | None = None) -> Path:
    """The file of a library, built if necessary; `flags` are added to the usual ones.

    Raises:
        NoLibrary: there is no compiler, or it failed.
    """
    compiler = find_compiler()
    options = [*FLAGS, *for_this_cpu(), f"-DELEMENT_{element}", *flags]
    sources = sorted(SOURCES.glob("*.[ch]"))
    if not sources:
        raise NoLibrary("its sources are missing")
    kind = (instruction_sets.chosen() or instruction_sets.OTHER).name
    name = f"{element.lower()}-{kind}-{fingerprint(compiler, options, sources)}.so"
    folder = folder or cache_folder()
    path = folder / name
    if not path.exists() or not path.stat().st_size:  # empty after a power failure
        build([str(compiler), *options], [each for each in sources if each.suffix == ".c"], path)
    return path


def find_compiler() -> Path:
    """The C compiler: $CC, gcc, clang or cc."""
    if sys.platform not in ("linux", "darwin"):
        raise NoLibrary("it is for Linux and macOS")
    for name in (os.environ.get("CC"), *COMPILERS):
        path = shutil.which(name) if name else None
        if path:
            return Path(path)
    raise NoLibrary("no C compiler (cc) was found")


def for_this_cpu() -> Sequence[str]:
    """The flags for the chosen instruction set."""
    return (instruction_sets.chosen() or instruction_sets.available()[-1]).flags


def fingerprint(compiler: Path, options: Sequence[str], sources: Sequence[Path]) -> str:
    """A hash of everything a library depends on. The options name the instruction set, and those of
    the processor are a part, because of -march=native: machines may share a home folder."""
    digest = hashlib.sha256()
    parts = [str(compiler), str(compiler.stat().st_mtime_ns), *options, machine.cpu_instructions()]
    for part in parts:
        digest.update(part.encode() + b"\0")
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """The folder of built libraries."""
    try:
        return machine.cache_folder()
    except RuntimeError as error:
        raise NoLibrary("this user has no home folder to keep a library in") from error


def build(command: Sequence[str], sources: Sequence[Path], path: Path) -> None:
    """Compile the sources in parallel and link them. The result is moved to `path` atomically, so
    several processes may build at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=BUILD_PREFIX) as name:
            folder = Path(name)
            remove_stale_builds(folder)
            objects = [folder / f"{source.stem}.o" for source in sources]
            compiling = [
                start([*command, "-c", str(source), "-o", str(made)])
                for source, made in zip(sources, objects, strict=True)
            ]
            wait(compiling)
            wait([start([*command, "-shared", *map(str, objects), "-o", f"{folder}/lib", "-lm"])])
            (folder / "lib").replace(path)
    except OSError as error:
        raise NoLibrary(f"the library cannot be built: {error}") from error


def remove_stale_builds(mine: Path) -> None:
    """Remove stale folders of killed builds: those much older than `mine`."""
    now = mine.stat().st_mtime
    for folder in mine.parent.glob(f"{BUILD_PREFIX}*"):
        with suppress(OSError):  # another process may remove it, too
            if now - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def start(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a compiler."""
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)


def wait(running: Sequence[subprocess.Popen[str]]) -> None:
    """Wait for compilers. Raises NoLibrary with the first error message."""
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
    """Request huge pages (2 MiB) for memory that has not been written yet; Linux may not comply."""
    if sys.platform != "linux":
        return
    begin = -(-address // LARGE_PAGE) * LARGE_PAGE
    length = (address + num_bytes) // LARGE_PAGE * LARGE_PAGE - begin
    if length > 0:
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        advise(begin, length, mmap.MADV_HUGEPAGE)


def return_freed_memory() -> None:
    """Return freed memory to the system; glibc may keep it otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim.argtypes = [ctypes.c_size_t]
        trim(0)
