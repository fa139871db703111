"""Limits of containers, read from made-up /proc and /sys trees of both control group versions."""

import os
from pathlib import Path

import pytest

from minillm.plan import machine

GIB = 2**30


@pytest.fixture
def tree(tmp_path):
    """A function that writes files below a root with 16 GiB in all, 12 GiB of them available."""

    def write(**files: str) -> Path:
        files = {
            "proc/meminfo": f"MemTotal: {16 * 2**20} kB\nMemAvailable: {12 * 2**20} kB"
        } | files
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return tmp_path

    return lambda files=None: write(**(files or {}))


def test_without_a_container_the_system_decides(tree):
    assert machine.available_memory_bytes(tree()) == 12 * GIB
    assert machine.total_memory_bytes(tree()) == 16 * GIB


def test_version_2_limit_of_an_outer_group(tree):
    root = tree(
        {
            "proc/self/cgroup": "0::/outer/inner",
            "sys/fs/cgroup/outer/inner/memory.max": "max",
            "sys/fs/cgroup/outer/inner/memory.current": f"{1 * GIB}",
            "sys/fs/cgroup/outer/memory.max": f"{8 * GIB}",
            "sys/fs/cgroup/outer/memory.current": f"{5 * GIB}",
            "sys/fs/cgroup/outer/memory.stat": f"anon {4 * GIB}\ninactive_file {1 * GIB}",
        }
    )
    assert machine.available_memory_bytes(root) == 4 * GIB
    assert machine.total_memory_bytes(root) == 8 * GIB


def test_version_1_limit_when_the_path_is_the_hosts(tree):
    root = tree(
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{6 * GIB}",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2 * GIB}",
            "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB}",
        }
    )
    assert machine.available_memory_bytes(root) == 5 * GIB


def test_version_1_without_a_limit(tree):
    root = tree(
        {
            "proc/self/cgroup": "4:memory:/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2 * GIB}",
        }
    )
    assert machine.available_memory_bytes(root) == 12 * GIB


def test_a_full_container_has_nothing_left(tree):
    root = tree(
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": f"{GIB}",
            "sys/fs/cgroup/memory.current": f"{GIB + 4096}",
        }
    )
    assert machine.available_memory_bytes(root) == 0


def test_without_proc_half_of_the_physical_memory(tmp_path):
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine.available_memory_bytes(tmp_path) == physical // 2


def test_without_sysconf_a_small_laptop(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sysconf")
    assert machine.total_memory_bytes(tmp_path) == machine.UNKNOWN_MEMORY


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("cpu.max", "250000 100000", 2),
        ("cpu.max", "50000 100000", 1),
        ("cpu.max", "max 100000", 8),
        ("cpu.max", "1600000 100000", 8),
    ],
)
def test_version_2_cpu_quota(tree, monkeypatch, name, text, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    root = tree({"proc/self/cgroup": "0::/a", f"sys/fs/cgroup/a/{name}": text})
    assert machine.cpu_count(root) == expected


@pytest.mark.parametrize(("quota", "expected"), [("300000", 3), ("-1", 8)])
def test_version_1_cpu_quota(tree, monkeypatch, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    root = tree(
        {
            "proc/self/cgroup": "1:cpu,cpuacct:/a",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": quota,
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
        }
    )
    assert machine.cpu_count(root) == expected


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


def test_unknown_processor(tmp_path):
    assert machine.cpu_has_bf16(tmp_path) is False
    assert machine.cpu_name(tmp_path)
    assert machine.last_level_cache_bytes(tmp_path) == machine.UNKNOWN_CACHE


def test_last_level_cache(tree):
    base = "sys/devices/system/cpu/cpu0/cache/index"
    root = tree({f"{base}0/size": "48K", f"{base}3/size": "32768K"})
    assert machine.last_level_cache_bytes(root) == 32 * 2**20


def test_seconds_waited(tree):
    task = "proc/self/task"
    root = tree({f"{task}/1/schedstat": "5 2500000000 7", f"{task}/2/schedstat": "5 500000000 7"})
    assert machine.seconds_waited(root) == 3.0
    assert machine.seconds_waited(root / "nothing") == 0


def test_this_machine():
    assert machine.seconds_waited() >= 0
    assert 0 < machine.available_memory_bytes() <= machine.total_memory_bytes()
    assert 1 <= machine.cpu_count() <= os.cpu_count()
