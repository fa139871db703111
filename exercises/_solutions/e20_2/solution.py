"""A best cut of the first layers is part of a best cut of more of them: dynamic programming.

For each number of layers, the table has the cheapest slowest stage of a cut into so many stages,
and the cut. One more stage takes the last few of the layers, and the rest has been solved. So all
cuts are compared in stages x layers x layers steps. What the ends of the model cost belongs to two
stages, so it enters at the first row of the table and at the last.
"""

from itertools import accumulate


def times(counts: list[int], layers: list[int], embedding: int, head: int) -> list[int]:
    """Sums of neighbours, and the two ends."""
    found, first = [], 0
    for count in counts:
        found.append(sum(layers[first : first + count]))
        first += count
    found[0] += embedding
    found[-1] += head
    return found


def cut(layers: list[int], embedding: int, head: int, stages: int) -> list[int]:
    """best[n] is for the first n layers: the cost of the slowest stage, and the counts."""
    total = len(layers)
    before = [0, *accumulate(layers)]
    best = {n: (embedding + before[n], [n]) for n in range(1, total - stages + 2)}
    for stage in range(1, stages):
        end = head if stage == stages - 1 else 0
        best = {
            n: min(
                (max(slowest, before[n] - before[m] + end), [*counts, n - m])
                for m, (slowest, counts) in best.items()
                if m < n
            )
            for n in range(stage + 1, total - stages + stage + 2)
        }
    return best[total][1]


def tables(stages: int, table: int, tied: bool) -> list[int]:
    """The ends of the pipeline; where they are one stage, tied tables are one."""
    if stages == 1:
        return [table if tied else 2 * table]
    return [table, *[0] * (stages - 2), table]
