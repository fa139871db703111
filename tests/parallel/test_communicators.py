"""Every kind of communicator: what it gives, and how it fails."""

import gc
import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from minillm.errors import UnsupportedFeatureError
from minillm.ops.c_library import NoLibrary
from minillm.parallel import shared_memory
from minillm.parallel.communicator import Alone, CommunicationError
from minillm.parallel.shared_memory import SharedGroup, SharedMemoryCommunicator
from tests.parallel.rank_groups import (
    COUNTS,
    DTYPES,
    KINDS,
    call,
    on_all,
    ordered_sum,
    parts_of,
    ranks,
    same_bits,
)

ROOT = Path(__file__).parents[2]
OTHER_TYPES = (torch.int64, torch.int32, torch.uint8, torch.bool)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


# ---- results -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_sums_are_ordered_and_rounded_once(kind, size):
    group = ranks(kind, size)
    for dtype in DTYPES:
        for count in COUNTS:
            parts = parts_of(size, (count,), dtype)
            wanted = ordered_sum(parts)
            for got in call(group, "sum", parts):
                assert same_bits(got, wanted), (dtype, count)


def test_one_rank_alone():
    for name, wanted in (("sum", [0, 1, 2]), ("gather", [[0, 1, 2]])):
        assert getattr(Alone(), name)(torch.arange(3.0)).tolist() == wanted


def test_a_row_has_the_same_sum_alone_and_among_others(kind):
    group = ranks(kind, 4)
    parts = parts_of(4, (9, 600), torch.bfloat16)
    (among, *_), (alone, *_) = (
        call(group, "sum", parts),
        call(group, "sum", [each[7:8] for each in parts]),
    )
    assert same_bits(alone, among[7:8])


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (5, 7), (3, 1025)])
def test_gathers_are_in_rank_order(kind, shape):
    group = ranks(kind, 3)
    for dtype in DTYPES + OTHER_TYPES:
        generator = torch.Generator().manual_seed(0)
        parts = [torch.randint(0, 99, shape, generator=generator).to(dtype) for _ in range(3)]
        for got in call(group, "gather", parts):
            assert same_bits(got, torch.stack(parts)), dtype


def test_a_sum_is_in_place(kind):
    group, parts = ranks(kind, 2), parts_of(2, (3000,), torch.float32)
    wanted = ordered_sum(parts)
    got = on_all([lambda c=c: c.sum(parts[c.rank]) for c in group])
    assert all(result is part for result, part in zip(got, parts, strict=True))
    assert all(same_bits(part, wanted) for part in parts)


def test_two_groups_at_once(kind):
    one, two = (ranks(kind, 2) for _ in range(2))
    parts = [parts_of(2, (2000,), torch.float32, seed=seed) for seed in range(2)]

    def both(rank):
        order = ((one, 0), (two, 1))
        return [group[rank].sum(parts[i][rank].clone()) for _ in range(20) for group, i in order]

    for got in on_all([lambda rank=rank: both(rank) for rank in range(2)]):
        for i, each in enumerate(got):
            assert same_bits(each, ordered_sum(parts[i % 2]))


def test_traffic_is_counted(kind):
    (first, second) = group = ranks(kind, 2)
    call(group, "sum", [torch.zeros(100)] * 2)
    call(group, "sum", [torch.zeros(50, dtype=torch.bfloat16)] * 2)
    call(group, "gather", [torch.zeros(3, dtype=torch.int64)] * 2)
    assert first.traffic == second.traffic == {"sum": (2, 500), "gather": (1, 24)}
    first.forget_traffic()
    assert first.traffic == {}


def test_a_tensor_that_is_not_contiguous_is_refused(kind):
    (first, _) = ranks(kind, 2, patience=5)
    for name in ("sum", "gather"):
        with pytest.raises(ValueError, match=r"shape \[3, 2\] that is not contiguous"):
            getattr(first, name)(torch.zeros(2, 3).T)


# ---- failures ----------------------------------------------------------------------------------


def test_a_rank_that_does_not_come_is_named(kind):
    group = ranks(kind, 3, patience=1)
    errors = on_all([lambda c=c: c.gather(torch.zeros(3)) for c in group[:2]])
    for rank, error in enumerate(errors):
        assert isinstance(error, CommunicationError)
        assert str(error).startswith(f"Rank {rank} of 3 ")
        with pytest.raises(CommunicationError):  # nor may a call follow
            group[rank].gather(torch.zeros(3))
    named = [error for error in errors if "waited 1 s for rank 2." in str(error)]
    assert kind == "threads" or named


def test_no_call_follows_one_that_failed():
    """Or the next one would meet a call of another step."""
    first, second = ranks("shared", 2, patience=0.5)
    with pytest.raises(CommunicationError, match=r"waited 0\.5 s for rank 1"):
        first.gather(torch.zeros(3))
    second.gather(torch.ones(3))  # finds the part that was brought
    (error, _) = on_all([lambda: first.gather(torch.zeros(3)), lambda: second.sum(torch.zeros(3))])
    assert "Rank 0 of 2 stopped" in str(error)


@pytest.mark.parametrize("waits", [False, True])
def test_abort_wakes_those_who_wait(kind, waits):
    group = ranks(kind, 3)  # which would wait for minutes
    done = threading.Event()

    def gather(communicator):
        try:
            communicator.gather(torch.zeros(3))
        finally:
            done.set()

    def end():
        assert not done.wait(0.5)
        group[int(not waits) * 2].abort()  # of a rank that waits itself, or of another one

    first, second, third = on_all([lambda c=c: gather(c) for c in group[:2]] + [end])
    assert third is None
    for rank, error in enumerate((first, second)):
        assert isinstance(error, CommunicationError), error
        assert str(error).startswith(f"Rank {rank} of 3 stopped, because another rank has failed")
    for each in group:
        each.close()


def test_parts_of_unequal_size_are_refused():
    errors = on_all([lambda c=c: c.gather(torch.zeros(c.rank)) for c in ranks("shared", 3)])
    for rank, error in enumerate(errors):
        assert isinstance(error, CommunicationError), error
        assert f"Rank {rank} of 3 found that the parts of the ranks differ: 0 bytes" in str(error)
        assert "8 bytes" in str(error)


def test_sockets_refuse_unequal_parts_and_other_calls():
    """Where the bytes of one call would be taken for those of another."""
    group = ranks("sockets", 2)
    errors = on_all([lambda c=c: c.gather(torch.zeros(c.rank + 1)) for c in group])
    assert any("call 1 with 4 bytes" in str(each) and "8 bytes" in str(each) for each in errors)
    assert all(isinstance(each, CommunicationError) for each in errors)
    group = ranks("sockets", 2)
    group[0]._num_calls += 1
    errors = on_all([lambda c=c: c.gather(torch.zeros(2)) for c in group])
    assert any("call 2 with 8 bytes" in str(each) and "call 1" in str(each) for each in errors)


def test_a_sum_does_not_meet_a_gather():
    group = ranks("shared", 2, patience=5)
    calls = [lambda: group[0].sum(torch.zeros(2)), lambda: group[1].gather(torch.zeros(2))]
    for error in on_all(calls):
        assert "differ: 8 bytes to a sum, 8 bytes to a gather." in str(error)


# ---- what is left behind -----------------------------------------------------------------------


def held() -> tuple[int, int, set[str]]:
    """Open files, maps of shared memory, and names in /dev/shm but passing ones of any process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("memfd:minillm-ranks")
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    shm = {name for name in names if not name.startswith("sem.mp-")}
    return len(os.listdir("/proc/self/fd")), maps, shm


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_nothing_is_left_of_a_closed_group(kind):
    before = held()
    group = ranks(kind, 2)
    call(group, "sum", [torch.zeros(10)] * 2)
    if kind == "shared":
        assert held()[1] == before[1] + 2
    for each in group:
        each.close()
    files, maps, shm = held()
    assert files <= before[0]
    assert maps <= before[1]
    assert not shm - before[2]


# ---- where memory cannot be shared -------------------------------------------------------------


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(shared_memory, "functions", lambda *_: NoLibrary("no C compiler"))
    assert not shared_memory.shared_memory_works()
    with pytest.raises(
        UnsupportedFeatureError, match=r"memory here: no C compiler; use sockets\.$"
    ):
        SharedGroup(2)


def test_without_memory_files(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert not shared_memory.shared_memory_works()
    with pytest.raises(UnsupportedFeatureError, match=r"no memory files .* use sockets\.$"):
        SharedGroup(2)


def test_a_file_that_is_not_a_group_is_refused(tmp_path):
    ranks("shared", 1)
    (tmp_path / "other").write_bytes(bytes(8192))
    not_a_rank = "not that of a group with a rank"
    with (
        (tmp_path / "other").open("r+b") as file,
        pytest.raises(UnsupportedFeatureError, match=f"{not_a_rank} 0"),
    ):
        SharedMemoryCommunicator(0, file.fileno())
    group = SharedGroup(2)
    with pytest.raises(UnsupportedFeatureError, match=f"{not_a_rank} 2"):
        SharedMemoryCommunicator(2, group.fd)
    with pytest.raises(PermissionError):  # or ranks would be killed that read behind the end
        os.ftruncate(group.fd, 4096)
    group.close()
    with pytest.raises(UnsupportedFeatureError, match=r"memory here: .*; use sockets"):
        SharedMemoryCommunicator(0, group.fd)


def test_a_type_that_c_does_not_add(monkeypatch):
    """As on a processor without bf16 instructions."""
    known = shared_memory.functions

    def only_float32(dtype=torch.float32):
        return known(dtype) if dtype == torch.float32 else NoLibrary("no bf16 instructions")

    monkeypatch.setattr(shared_memory, "functions", only_float32)
    parts = parts_of(3, (5003,), torch.bfloat16)
    for got in call(ranks("shared", 3), "sum", parts):
        assert same_bits(got, ordered_sum(parts))
