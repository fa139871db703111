"""What this process may use of the machine: processors, memory, instructions.

A container sees the whole host in /proc; its own limits are in the control group files (version
1 or 2). Every function reads them below `root`, which is "/" except in tests, and falls back to
what Python knows where those files do not exist (macOS, Windows).
"""

import os
import platform
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
UNKNOWN_MEMORY = 4 * 2**30  # assumed free where nothing tells (Windows): what a small laptop has
UNKNOWN_CACHE = 32 * 2**20


def available_memory_bytes(root: Path = ROOT) -> int:
    """Memory that this process can still allocate: the least of what the system has available
    and what is left of each enclosing container's limit.

    Elsewhere than on Linux half of the physical memory, because how much of it others use is
    not known.
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
    """Processors this process can keep busy: its affinity, capped by the container's CPU quota
    (rounded down, because one thread too many makes every parallel section wait for the quota).
    """
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    for directory in _group_directories("cpu", root):
        quota, period = _cpu_quota(directory)
        if quota > 0 and period > 0:
            count = min(count, quota // period)
    return max(1, count)


def cpu_has_bf16(root: Path = ROOT) -> bool:
    """Whether the processor multiplies bf16 matrices in hardware (AVX-512 BF16, AMX, or Arm's
    BF16), so that bf16 is faster than float32. False where it is not known, and where torch was
    told through ATEN_CPU_CAPABILITY to leave these instructions alone."""
    if os.environ.get("ATEN_CPU_CAPABILITY", "").lower() in ("default", "avx2"):
        return False
    flags = set(cpu_instructions(root).split())
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def cpu_instructions(root: Path = ROOT) -> str:
    """The sets of instructions that the processor has; empty where it is not known."""
    return _cpuinfo("flags", root) or _cpuinfo("Features", root)


def cpu_name(root: Path = ROOT) -> str:
    """The processor's model name."""
    return _cpuinfo("model name", root) or platform.processor() or platform.machine()


def seconds_waited(root: Path = ROOT) -> float:
    """Seconds that the threads of this process were ready to run while other programs ran
    instead, since they started. 0 where the kernel does not tell."""
    texts = [_read(path).split() for path in (root / "proc/self/task").glob("*/schedstat")]
    return sum(int(text[1]) for text in texts if len(text) == 3) / 1e9


def last_level_cache_bytes(root: Path = ROOT) -> int:
    """Size of the first processor's largest cache (32 MiB where it is not known)."""
    caches = (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    texts = [_read(path) for path in caches]
    sizes = [int(text[:-1]) * 1024 for text in texts if text[:-1].isdigit() and text[-1] == "K"]
    return max(sizes, default=UNKNOWN_CACHE)


def _read(path: Path) -> str:
    """The file's text, empty when it cannot be read."""
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
    """This process's control group and those around it, for version 2 and then version 1.

    Inside a container the path in /proc/self/cgroup is often the host's and does not exist in
    the mounted tree, whose top is then the container's own group: hence every parent is listed.
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
    """Every enclosing memory limit in bytes; with `left`, less what is in use. File pages that
    can be dropped at once do not count as used."""
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
    """(Microseconds allowed per period, period); (0, 0) for no limit."""
    fields = _read(directory / "cpu.max").split() or [
        _read(directory / "cpu.cfs_quota_us"),
        _read(directory / "cpu.cfs_period_us"),
    ]
    if len(fields) == 2 and all(field.isdigit() for field in fields):
        return int(fields[0]), int(fields[1])
    return 0, 0
