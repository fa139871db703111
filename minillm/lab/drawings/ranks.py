"""The lanes of the drawings: how long each rank computed in each step, and how long it
communicated with the others or waited for them."""

from collections.abc import Sequence
from typing import Any

from minillm.scheduling.record import StepRecord


def rank_lanes(records: Sequence[StepRecord]) -> list[dict[str, Any]]:
    """Of each rank, by its number: seconds `computing` and `communicating`, one of each per step.

    A step without times of ranks, such as an interrupted one, counts as 0 seconds. The list is
    empty where there are fewer than two ranks: one rank communicates with none.
    """
    number = max((each.rank + 1 for record in records for each in record.ranks), default=0)
    if number < 2:
        return []
    lanes = [{name: [0.0] * len(records) for name in ("computing", "communicating")}
             for _ in range(number)]  # fmt: skip
    for column, record in enumerate(records):
        for each in record.ranks:
            lane = lanes[each.rank]
            lane["computing"][column] = max(each.seconds - each.communicating, 0.0)
            lane["communicating"][column] = each.communicating
    return [{"rank": rank} | lane for rank, lane in enumerate(lanes)]
