"""Which rank holds which experts, by their loads (EPLB; DeepSeek-AI, 2024, 3.4).

    loads     8 2 1 1      experts 0 to 3, two spare slots
    copies    2 2 1 1      each spare goes to the largest load per copy
    rank 0    0 1 2        largest first, to the rank with the least load so far
    rank 1    0 1 3        equally many slots per rank, an expert at most once on each

Counting only, without torch. All ranks compute the same placement from the same loads, so it is not
sent. Which copy of an expert a token uses depends on its row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush

from minillm.errors import ConfigError

SHOWN = 4  # allowed values that an error lists


@dataclass(frozen=True)
class Placement:
    """`slots[rank][slot]` is the id of an expert. Each expert has one or more copies, at most one
    per rank."""

    slots: tuple[tuple[int, ...], ...]

    @cached_property
    def copies(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The (rank, slot) of each expert's copies, in rank order."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(1 + max(map(max, self.slots)))]
        for rank, held in enumerate(self.slots):
            for slot, expert in enumerate(held):
                found[expert].append((rank, slot))
        return tuple(map(tuple, found))

    @property
    def num_slots(self) -> int:
        """Of all ranks together, which have equally many."""
        return len(self.slots) * len(self.slots[0])

    def copy_of(self, expert: int, row: int) -> tuple[int, int]:
        """The (rank, slot) that computes this expert for row `row` of a batch."""
        return self.copies[expert][row % len(self.copies[expert])]

    def rank_loads(self, loads: Sequence[float]) -> list[float]:
        """Each rank's load, where an expert's copies share its load evenly."""
        each = [load / len(copies) for load, copies in zip(loads, self.copies, strict=True)]
        return [sum(each[expert] for expert in held) for held in self.slots]

    def balance(self, loads: Sequence[float]) -> float:
        """Mean over largest load of a rank: 1.0 is balanced, as is no load."""
        sums = self.rank_loads(loads)
        return sum(sums) / len(sums) / max(sums) if any(sums) else 1.0

    def settled(self, now: "Placement") -> "Placement":
        """The same experts on each rank; those that it already has `now` keep their slots."""
        slots = []
        for wanted, held in zip(self.slots, now.slots, strict=True):
            come = iter([expert for expert in wanted if expert not in held])
            slots.append(tuple(expert if expert in wanted else next(come) for expert in held))
        return Placement(tuple(slots))

    def sent(self, to: "Placement") -> list[list[int]]:
        """The slots of each rank whose experts other ranks need for the placement `to`: the first
        copy of an expert is sent to all of them."""
        needed = {
            expert
            for wanted, held in zip(to.slots, self.slots, strict=True)
            for expert in set(wanted) - set(held)
        }
        found: list[list[int]] = [[] for _ in self.slots]
        for expert in sorted(needed):
            rank, slot = self.copies[expert][0]
            found[rank].append(slot)
        return found


def first_placement(num_experts: int, num_ranks: int, num_redundant: int = 0) -> Placement:
    """Before loads are known: experts by id, then the redundant copies of expert 0, 1, .."""
    check_redundant(num_experts, num_ranks, num_redundant)
    size = (num_experts + num_redundant) // num_ranks
    every = [place % num_experts for place in range(num_experts + num_redundant)]
    return Placement(
        tuple(tuple(every[rank * size : (rank + 1) * size]) for rank in range(num_ranks))
    )


def place(loads: Sequence[float], num_ranks: int, num_redundant: int = 0) -> Placement:
    """The placement for the experts' loads. Ties go to the lowest id, so the same loads give the
    same placement on all ranks."""
    check_redundant(len(loads), num_ranks, num_redundant)
    known = loads if any(loads) else [1] * len(loads)
    return pack(known, copies(known, num_redundant, num_ranks), num_ranks)


def copies(loads: Sequence[float], spares: int, most: int) -> list[int]:
    """The number of copies of each expert, at most `most`: one, and each spare goes to the expert
    with the largest load per copy."""
    counts = [1] * len(loads)
    line = [(-load, expert) for expert, load in enumerate(loads)]
    heapify(line)
    for _ in range(spares):
        expert = heappop(line)[1]
        counts[expert] += 1
        if counts[expert] < most:
            heappush(line, (-loads[expert] / counts[expert], expert))
    return counts


def pack(loads: Sequence[float], counts: Sequence[int], num_ranks: int) -> Placement:
    """Place copies from the largest load to the smallest, each on the least loaded rank that has a
    free slot and no copy of the same expert."""
    each = [load / count for load, count in zip(loads, counts, strict=True)]
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    size = sum(counts) // num_ranks
    order = [expert for expert, count in enumerate(counts) for _ in range(count)]

    def load_of(rank: int) -> tuple[float, int]:
        return sum(each[expert] for expert in held[rank]), rank

    for expert in sorted(order, key=lambda expert: -each[expert]):
        free = sorted((rank for rank in range(num_ranks) if len(held[rank]) < size), key=load_of)
        fit = [rank for rank in free if expert not in held[rank]]
        held[fit[0] if fit else make_room(held, free[0], expert, each)].append(expert)
    return Placement(tuple(map(tuple, held)))


def make_room(held: list[list[int]], free: int, expert: int, each: Sequence[float]) -> int:
    """Move the smallest possible load from a full rank without `expert` to the rank `free`, which
    already has `expert`; returns the full rank. One exists: an expert has at most one copy per
    rank, and a full rank has an expert that `free`, with fewer, lacks."""
    _, other, rank = min(
        (each[other], other, rank)
        for rank, full in enumerate(held)
        if expert not in full
        for other in full
        if other not in held[free]
    )
    held[rank].remove(other)
    held[free].append(other)
    return rank


def check_redundant(num_experts: int, num_ranks: int, num_redundant: int) -> None:
    """ConfigError unless all ranks get equally many slots, and none two copies of an expert."""
    first, most = -num_experts % num_ranks, num_experts * (num_ranks - 1)
    if num_redundant % num_ranks != first or num_redundant > most:
        fits = [str(num) for num in range(first, most + 1, num_ranks)]
        some = fits if len(fits) <= SHOWN else [*fits[: SHOWN - 1], "..", fits[-1]]
        raise ConfigError(
            f"num_redundant_experts is {num_redundant}; for {num_experts} experts on {num_ranks} "
            f"ranks it can be {', '.join(some).replace(', ..,', ' ..')}."
        )
