"""A rank that is a process: `python -m tests.parallel.communicator_process RANK SIZE PLACE`.

PLACE is the file descriptor of shared memory. It prints a line after sums
and gathers that were right, and then waits for the others; the last rank ends by a signal instead.
"""

import os
import signal
import sys

import torch

from minillm.parallel.communicator import CommunicationError
from minillm.parallel.shared_memory import SharedMemoryCommunicator
from tests.parallel.rank_groups import COUNTS, DTYPES, ordered_sum, parts_of, same_bits

PATIENCE = 60.0


def main(rank: int, size: int, place: int) -> None:
    """Compare, and fail."""
    communicator = SharedMemoryCommunicator(rank, place, PATIENCE)
    for dtype in DTYPES:
        for count in COUNTS:
            parts = parts_of(size, (count,), dtype)
            right = same_bits(communicator.sum(parts[rank].clone()), ordered_sum(parts))
            right &= same_bits(communicator.gather(parts[rank]), torch.stack(parts))
            if not right:
                print(f"wrong: {dtype}, {count}", flush=True)
                sys.exit(1)
    print("right", flush=True)
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        communicator.gather(torch.zeros(3))
    except CommunicationError as error:
        print(error, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
