"""Resources of the machine that this process may use: processors, memory, instruction sets.

In a container /proc shows the whole host; the container's limits are in the control group files
(version 1 or 2). Functions read both below `root` ("/" except in tests). Where these files do not
exist (macOS, Windows), they use Python's own information.
"""

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
UNKNOWN_MEMORY = 4 * 2**30  # assumed where it cannot be read (Windows): that of a small laptop
UNKNOWN_CACHE = 32 * 2**20  # assumed where it cannot be read
NO_QUOTA = 2.0**20  # processors


def cache_folder() -> Path:
    """Where minillm keeps files between runs: ``$XDG_CACHE_HOME/minillm``, or ``~/.cache/minillm``.
    Raises RuntimeError if this user has no home folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "minillm"


def available_memory_bytes(root: Path = ROOT) -> int:
    """Memory that this process can still allocate: the system's available memory, or what is left
    of the limit of an enclosing container if that is less.

    On other systems than Linux it is half of the physical memory, as its use is unknown.
    """
    system = _meminfo("MemAvailable", root)
    if system is None:
        return _physical_memory() // 2
    return max(0, min([system, *_container_memory(root, left=True)]))


def total_memory_bytes(root: Path = ROOT) -> int:
    """Physical memory, or the container's limit when that is less."""
    system = _meminfo("MemTotal", root)
    if system is None:
        return _physical_memory()
    return min([system, *_container_memory(root, left=False)])


def cpu_count(root: Path = ROOT) -> int:
    """Processors of this process: its CPU affinity, limited by the container's CPU quota. The quota
    is rounded down, because one thread too many delays every parallel section."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(count, int(cpu_quota(root))))


def cpu_quota(root: Path = ROOT) -> float:
    """Processors that the container's CPU quota is worth, for example 1.5; a large number if there
    is no quota."""
    quotas = [_cpu_quota(directory) for directory in _group_directories("cpu", root)]
    shares = [quota / period for quota, period in quotas if quota > 0 and period > 0]
    return min(shares, default=NO_QUOTA)


def cpu_has_bf16(root: Path = ROOT) -> bool:
    """Whether the processor multiplies bf16 matrices in hardware (AVX-512 BF16, AMX, or Arm's
    BF16), which makes bf16 faster than float32. False if it is unknown, or if ATEN_CPU_CAPABILITY
    disables these instructions in torch."""
    if os.environ.get("ATEN_CPU_CAPABILITY", "").lower() in ("default", "avx2"):
        return False
    flags = set(cpu_instructions(root).split())
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def arm_has_bf16() -> bool:
    """Whether an Arm processor has the BF16 instructions, as Linux or macOS reports it. False if it
    is unknown."""
    return "bf16" in cpu_instructions().split() or _sysctl("hw.optional.arm.FEAT_BF16") == 1


def cpu_instructions(root: Path = ROOT) -> str:
    """The processor's instruction sets, as in /proc/cpuinfo; empty if unknown."""
    return _cpuinfo("flags", root) or _cpuinfo("Features", root)


def cpu_name(root: Path = ROOT) -> str:
    """The processor's model name."""
    return _cpuinfo("model name", root) or platform.processor() or platform.machine()


def seconds_waited(root: Path = ROOT) -> float:
    """Seconds that this process's threads, since they started, were ready to run but waited for a
    processor. 0 if the kernel does not report it."""
    texts = [_read(path).split() for path in (root / "proc/self/task").glob("*/schedstat")]
    return sum(int(text[1]) for text in texts if len(text) == 3) / 1e9


def last_level_cache_bytes(root: Path = ROOT) -> int:
    """Size of the first processor's largest cache (32 MiB if unknown)."""
    caches = (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    texts = [_read(path) for path in caches]
    sizes = [int(text[:-1]) * 1024 for text in texts if text[:-1].isdigit() and text[-1] == "K"]
    return max(sizes, default=UNKNOWN_CACHE)


def _read(path: Path) -> str:
    """The file's text; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _cpuinfo(field: str, root: Path) -> str:
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""


def _sysctl(name: str) -> int:
    """An integer of the system on macOS; 0 if it is unknown, and on other systems."""
    ask = getattr(ctypes.CDLL(None), "sysctlbyname", None) if sys.platform == "darwin" else None
    if ask is None:
        return 0
    value, size = ctypes.c_int32(), ctypes.c_size_t(4)
    failed = ask(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return 0 if failed else value.value


def _meminfo(field: str, root: Path) -> int | None:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return UNKNOWN_MEMORY


def _group_directories(controller: str, root: Path) -> Iterator[Path]:
    """Directories of this process's control group and all its parents, version 2 before version 1.

    In a container the path in /proc/self/cgroup is often the host's and does not exist in the
    mounted tree. The container's own group is then the root of that tree, which is listed as a
    parent.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, names, path = line.split(":", 2)
        if number == "0" and not names:
            base = root / "sys/fs/cgroup"
        elif controller in names.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        group = base / path.lstrip("/")
        yield from (d for d in (group, *group.parents) if d.is_relative_to(base))


def _container_memory(root: Path, left: bool) -> Iterator[int]:
    """Every enclosing memory limit in bytes; with `left`, minus the memory in use. Inactive file
    pages do not count as in use."""
    for directory in _group_directories("memory", root):
        for limit_file, usage_file, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = _read(directory / limit_file), _read(directory / usage_file)
            if limit.isdigit() and usage.isdigit():
                used = int(usage) - _stat(directory / "memory.stat", cached)
                yield int(limit) - used if left else int(limit)


def _stat(path: Path, field: str) -> int:
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name == field and value.isdigit():
            return int(value)
    return 0


def _cpu_quota(directory: Path) -> tuple[int, int]:
    """(quota, period) in microseconds; (0, 0) for no limit."""
    fields = _read(directory / "cpu.max").split() or [
        _read(directory / "cpu.cfs_quota_us"),
        _read(directory / "cpu.cfs_period_us"),
    ]
    if len(fields) == 2 and all(field.isdigit() for field in fields):
        return int(fields[0]), int(fields[1])
    return 0, 0
