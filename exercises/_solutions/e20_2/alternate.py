"""Another way: guess the answer. It is easy to test whether every stage can keep a limit.

Fill each stage as far as the limit allows, and see whether the stages are enough. If a limit can be
kept, so can a larger one, so the smallest is found by halving. The candidates are all possible
costs of a stage.
"""

from bisect import bisect_left
from itertools import accumulate, pairwise


def times(counts: list[int], layers: list[int], embedding: int, head: int) -> list[int]:
    """By differences of running sums."""
    ends = [0, *accumulate(counts)]
    found = [sum(layers[start:end]) for start, end in pairwise(ends)]
    for stage, more in ((0, embedding), (len(found) - 1, head)):
        found[stage] += more
    return found


def filled(limit: int, costs: list[int], stages: int) -> list[int] | None:
    """Counts with which no stage costs more, or None; each stage takes as much as it may."""
    counts, load, left = [0], 0, len(costs)
    for cost in costs:
        if cost > limit:
            return None
        must_leave = counts[-1] > 0 and left <= stages - len(counts)
        if counts[-1] and (load + cost > limit or must_leave):
            counts.append(0)
            load = 0
        counts[-1] += 1
        load += cost
        left -= 1
    return counts if len(counts) == stages else None


def cut(layers: list[int], embedding: int, head: int, stages: int) -> list[int]:
    """The ends of the model are added to its first and last layer, which are on these stages."""
    costs = list(layers)
    costs[0] += embedding
    costs[-1] += head
    before = [0, *accumulate(costs)]
    sums = sorted({b - a for i, a in enumerate(before) for b in before[i + 1 :]})
    place = bisect_left(sums, True, key=lambda limit: filled(limit, costs, stages) is not None)
    return filled(sums[place], costs, stages) or []


def tables(stages: int, table: int, tied: bool) -> list[int]:
    """What each stage needs, as a set: tied tables have one name."""
    found = []
    for stage in range(stages):
        needs = {"embedding"} if stage == 0 else set()
        if stage == stages - 1:
            needs.add("embedding" if tied else "head")
        found.append(table * len(needs))
    return found
