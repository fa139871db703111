"""Which ranks communicate with each other, and over what."""

import os
from contextlib import ExitStack
from dataclasses import asdict

import pytest
import torch

from minillm.parallel import groups
from minillm.parallel.groups import connect_ranks, join
from minillm.parallel.place import Topology, thread_places
from minillm.parallel.shared_memory import shared_memory_works
from tests.parallel.rank_groups import on_all


def test_stages_of_several_ranks():
    topology = Topology(size=2, num_stages=3)
    assert topology.num_ranks == 6
    assert [topology.group(rank) for rank in (0, 1, 4)] == [range(2), range(2), range(4, 6)]
    assert [topology.after(rank) for rank in range(6)] == [2, 3, 4, 5, None, None]


@pytest.mark.parametrize("shares", [True, False])
def test_copies(shares):
    topology = Topology(num_copies=3, share_experts=shares)
    assert topology.group(1) == (range(3) if shares else range(1, 2))
    assert [topology.after(rank) for rank in range(3)] == [None] * 3
    for rank, place in enumerate(thread_places(topology, 5)):
        assert (place.rank, place.copy, place.split.size) == (rank, rank, 1)
        assert place.expert_split.size == (3 if shares else 1)


@pytest.mark.parametrize("memory", [True, False])
def test_connections_of_processes(memory, monkeypatch):
    """Four ranks in two stages, as threads that take their descriptors as processes would."""
    if memory and not shared_memory_works():
        pytest.skip("memory cannot be shared here")
    monkeypatch.setattr(groups, "shared_memory_works", lambda: memory)
    opened, topology = ExitStack(), Topology(size=2, num_stages=2)
    fds = connect_ranks(topology, opened)
    assert all(("memory" in each) is memory for each in fds)
    fds = [{name: os.dup(fd) for name, fd in each.items()} for each in fds]  # as processes inherit
    opened.close()
    plain = {"topology": asdict(topology), "patience": 20}
    places = [join(plain | {"rank": rank, "fds": each}) for rank, each in enumerate(fds)]
    assert [each.rank for each in places] == [0, 1, 2, 3]

    def run(rank):
        place, x = places[rank], torch.full((1, 3), 1.0 + rank)
        if place.before is not None:
            x = place.before.receive((1, 3), torch.float32) + x
        x = place.communicator.sum(x)
        if place.after is not None:
            place.after.send(x)
        return x[0, 0].item()

    assert on_all([lambda rank=rank: run(rank) for rank in range(4)]) == [3, 3, 13, 13]
    for each in places:
        each.close()
    for each in fds if memory else ():
        os.close(each["memory"])
