"""Limits of containers, read from made-up /proc and /sys trees of both control group versions."""

import os
from pathlib import Path

import pytest

from minillm.plan import machine

GIB = 2**30


@pytest.fixture
def tree(tmp_path):
    """A function that writes files below a root with 16 GiB in all, 12 GiB of them available."""

    def write(files: dict[str, str] | None = None) -> Path:
        memory = f"MemTotal: {16 * 2**20} kB\nMemAvailable: {12 * 2**20} kB"
        for name, text in ({"proc/meminfo": memory} | (files or {})).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return tmp_path

    return write


V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
LIMITS = {  # files, and the GiB that are available and in all
    "no container": ({}, 12, 16),
    "version 2, an outer group": (
        {
            "proc/self/cgroup": "0::/outer/inner",
            f"{V2}/outer/inner/memory.max": "max",
            f"{V2}/outer/inner/memory.current": f"{1 * GIB}",
            f"{V2}/outer/memory.max": f"{8 * GIB}",
            f"{V2}/outer/memory.current": f"{5 * GIB}",
            f"{V2}/outer/memory.stat": f"anon {4 * GIB}\ninactive_file {1 * GIB}",
        },
        *(4, 8),
    ),
    "version 1, the host's path": (
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc",
            f"{V1}/memory.limit_in_bytes": f"{6 * GIB}",
            f"{V1}/memory.usage_in_bytes": f"{2 * GIB}",
            f"{V1}/memory.stat": f"total_inactive_file {GIB}",
        },
        *(5, 6),
    ),
    "version 1, no limit": (
        {
            "proc/self/cgroup": "4:memory:/",
            f"{V1}/memory.limit_in_bytes": "9223372036854771712",
            f"{V1}/memory.usage_in_bytes": f"{2 * GIB}",
        },
        *(12, 16),
    ),
    "a full container": (
        {
            "proc/self/cgroup": "0::/",
            f"{V2}/memory.max": f"{GIB}",
            f"{V2}/memory.current": f"{GIB + 4096}",
        },
        *(0, 1),
    ),
}


@pytest.mark.parametrize(("files", "available", "total"), LIMITS.values(), ids=list(LIMITS))
def test_memory_is_that_of_the_container(tree, files, available, total):
    root = tree(files)
    assert machine.available_memory_bytes(root) == available * GIB
    assert machine.total_memory_bytes(root) == total * GIB


def test_without_proc_half_of_the_physical_memory(tmp_path, monkeypatch):
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine.available_memory_bytes(tmp_path) == physical // 2
    monkeypatch.delattr(os, "sysconf")  # Windows
    assert machine.total_memory_bytes(tmp_path) == machine.UNKNOWN_MEMORY


@pytest.mark.parametrize(
    ("version", "quota", "expected"),
    [(2, "250000 100000", 2), (2, "50000 100000", 1), (2, "max 100000", 8),
     (2, "1600000 100000", 8), (1, "300000", 3), (1, "-1", 8)],
)  # fmt: skip
def test_cpu_quota(tree, monkeypatch, version, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    files = {"proc/self/cgroup": "0::/a", f"{V2}/a/cpu.max": quota}
    if version == 1:
        files = {
            "proc/self/cgroup": "1:cpu,cpuacct:/a",
            f"{V2}/cpu/a/cpu.cfs_quota_us": quota,
            f"{V2}/cpu/a/cpu.cfs_period_us": "100000",
        }
    assert machine.cpu_count(tree(files)) == expected


def test_cpu_count_without_affinity(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    assert machine.cpu_count(tmp_path) == os.cpu_count()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags\t\t: fpu amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("flags\t\t: fpu avx2 avx512f avx512_vnni", False),
    ],
)
def test_bf16_instructions(tree, monkeypatch, line, expected):
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    root = tree({"proc/cpuinfo": f"processor\t: 0\nmodel name\t: Some CPU\n{line}"})
    assert machine.cpu_has_bf16(root) is expected
    assert machine.cpu_name(root) == "Some CPU"


@pytest.mark.parametrize(("limit", "expected"), [("avx2", False), ("default", False), ("", True)])
def test_bf16_instructions_that_torch_may_not_use(tree, monkeypatch, limit, expected):
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", limit)
    assert machine.cpu_has_bf16(tree({"proc/cpuinfo": "flags\t: avx512_bf16"})) is expected


def test_last_level_cache(tree):
    base = "sys/devices/system/cpu/cpu0/cache/index"
    root = tree({f"{base}0/size": "48K", f"{base}3/size": "32768K"})
    assert machine.last_level_cache_bytes(root) == 32 * 2**20


def test_seconds_waited(tree):
    task = "proc/self/task"
    root = tree({f"{task}/1/schedstat": "5 2500000000 7", f"{task}/2/schedstat": "5 500000000 7"})
    assert machine.seconds_waited(root) == 3.0
    assert machine.seconds_waited(root / "nothing") == 0
