"""Another way: the timetable as the longest path through a grid, and a plan as two slices.

A plan leaves the last stage at the end of the longest chain of boxes that have to wait for each
other: the plans before it in order, of which one, the slowest so far, is passed along all stages.
So the end is the sum of all costs so far plus (stages - 1) times the largest of them.
"""

import math
from itertools import accumulate

Plan = dict[str, int]


def bubble(stages: int, chunks: int) -> float:
    """Counted in boxes."""
    boxes = stages * ends(stages, [1] * chunks)[-1]
    return 1 - stages * chunks / boxes


def ends(stages: int, costs: list[int]) -> list[int]:
    """Sums and maxima of the costs so far."""
    sums, largest = accumulate(costs), accumulate(costs, max)
    return [total + (stages - 1) * most for total, most in zip(sums, largest, strict=True)]


def next_plan(
    requests: list[tuple[str, int]], in_flight: list[Plan], stages: int, budget: int
) -> Plan:
    """Those that decode and are known, cut to their share; then prompts, one token less each."""
    if len(in_flight) == stages:
        return {}
    known = [
        name for name, left in requests if left == 0 and not any(name in plan for plan in in_flight)
    ]
    share = math.ceil(len(requests) / stages)
    plan = dict.fromkeys(known[:share][:budget], 1)
    for name, left in requests:
        tokens = min(left, budget - sum(plan.values()))
        if tokens > 0:
            plan[name] = tokens
    return plan
