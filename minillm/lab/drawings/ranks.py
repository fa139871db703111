"""The rank lanes of drawings: computing time and communication time of each rank in each step."""

from collections.abc import Sequence
from typing import Any

from minillm.scheduling.record import StepRecord


def rank_lanes(records: Sequence[StepRecord]) -> list[dict[str, Any]]:
    """For each rank its `rank`, and lists of seconds `computing` and `communicating` per step.

    Communication includes waiting for other ranks. A step without rank times, such as an
    interrupted one, has 0 seconds. The list is empty if there are fewer than two ranks.
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
