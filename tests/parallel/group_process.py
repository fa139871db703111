"""A rank of a process group on the CPU: ``python -m tests.parallel.group_process PLAIN`` (JSON).

It prints "right" after sums, gathers and exchanges that were right, and then waits for the others;
the last rank ends by a signal instead.
"""

import json
import os
import signal
import sys

import torch
from torch import distributed

from minillm.parallel.communicator import CommunicationError, ThreadGroup
from minillm.parallel.device_groups import join_devices
from tests.parallel.rank_groups import COUNTS, call, ordered_sum, parts_of, same_bits

OTHERS = (torch.int64, torch.uint8, torch.bool, torch.bfloat16)


def main(plain: dict) -> None:
    """Compare, and fail."""
    place = join_devices(plain)
    group, size = place.communicator, place.communicator.size
    assert group.traffic == {}
    for dtype in (torch.float32, torch.bfloat16):
        for count in COUNTS:
            parts = parts_of(size, (count,), dtype)
            got = group.sum(parts[group.rank].clone())
            wanted = ordered_sum(parts)
            if plain["ordered"]:
                assert same_bits(got, wanted), (dtype, count)
            scale = torch.stack(parts).abs().max().item() if count else 0
            assert torch.allclose(got, wanted, atol=scale * 2e-2, rtol=0)
    for shape in ((), (0, 3), (5, 7)):
        for dtype in OTHERS:
            parts = [(torch.arange(35).view(5, 7) * (r + 2) % 5).to(dtype) for r in range(size)]
            parts = [x if shape == (5, 7) else x[0, 3] if not shape else x[:0, :3] for x in parts]
            own = parts[group.rank].contiguous()
            assert same_bits(group.gather(own), torch.stack(parts)), (shape, dtype)
    counts = torch.tensor([[1, 3], [0, 2]])
    rows = [torch.arange(4 * 3).view(4, 3), 50 + torch.arange(2 * 3).view(2, 3)]
    threads = ThreadGroup(2, 60).communicators()
    wanted = call([ToAll(each, counts) for each in threads], "exchange", rows)
    assert same_bits(group.all_to_all(rows[group.rank], counts), wanted[group.rank])
    sizes = [(1, 8), (700, 512), (3, 8)]
    sent = [torch.full(each, i + 0.5, dtype=torch.bfloat16) for i, each in enumerate(sizes)]
    for x in sent:
        if place.after is not None:
            mine = x.T.contiguous().T
            place.after.send(mine)
            mine.zero_()
    for x in sent:
        if place.before is not None:
            assert same_bits(place.before.receive(tuple(x.shape), x.dtype), x)
    distributed.barrier()  # all has arrived
    print("right", flush=True)
    if place.rank == plain["topology"]["size"] * plain["topology"]["num_stages"] - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.gather(torch.zeros(3))
        group.gather(torch.zeros(3))
    except CommunicationError as error:
        print(error, flush=True)
        os._exit(0)  # as ranks end: destroying a broken group may abort the process


class ToAll:
    """`all_to_all` as a call with one argument."""

    def __init__(self, group, counts):
        self.group, self.counts = group, counts

    def exchange(self, rows):
        return self.group.all_to_all(rows, self.counts)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
