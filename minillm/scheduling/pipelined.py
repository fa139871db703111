"""Planning for pipeline parallelism: several plans in flight, with different sequences.

    stage 0    plan 1   plan 2   plan 3 .........
    stage 1             plan 1   plan 2   plan 3 ...
                                 commit 1 -> plan 3 may have the sequences of plan 1

With p stages, up to p plans are in flight. A sequence that samples is in at most one of them, since
its next row needs the sampled token (`ahead.py`). The prefill chunks of one prompt may be in
consecutive plans. A plan has decode rows for at most 1 / p of the running sequences, the longest
waiting first.
"""

from collections.abc import Collection, Iterator
from itertools import chain

from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.request import Sequence


def scheduling_order(running: Collection[Sequence], config: SchedulerConfig) -> Iterator[Sequence]:
    """Running sequences in the order in which a plan takes them: decode first, then prefill. With
    several stages, each part is sorted by the age of the last row, the oldest first."""
    if config.num_stages > 1:
        running = sorted(running, key=lambda sequence: sequence.last_step)
    decoding = [sequence for sequence in running if sequence.num_uncomputed == 1]
    prefilling = [sequence for sequence in running if sequence.num_uncomputed > 1]
    return chain(decoding, prefilling)


def most_decoding(num_running: int, config: SchedulerConfig) -> int:
    """Maximum number of decode rows per plan: an equal share for each plan in flight."""
    return -(-num_running // config.num_stages)
