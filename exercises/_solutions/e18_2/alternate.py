"""Another way: a heap gives out the spares and the slots, and fractions compare loads exactly."""

import heapq
from collections import Counter, defaultdict
from fractions import Fraction
from itertools import cycle


def copies(loads: list[int], spares: int) -> list[int]:
    """The heap has (minus load per copy, expert), so the lowest of equal experts comes first."""
    counts = Counter(range(len(loads)))
    heap = [(-Fraction(load), expert) for expert, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(spares):
        expert = heap[0][1]
        counts[expert] += 1
        heapq.heapreplace(heap, (-Fraction(loads[expert], counts[expert]), expert))
    return [counts[expert] for expert in range(len(loads))]


def pack(loads: list[int], counts: list[int], gpus: int) -> list[list[int]]:
    """A GPU leaves the heap when its slots are full."""
    slots = sum(counts) // gpus
    parcels = sorted(
        (-Fraction(load, count), expert)
        for expert, (load, count) in enumerate(zip(loads, counts, strict=True))
        for _ in range(count)
    )
    heap = [(Fraction(0), gpu) for gpu in range(gpus)]
    held: list[list[int]] = [[] for _ in range(gpus)]
    for minus, expert in parcels:
        load, gpu = heapq.heappop(heap)
        held[gpu].append(expert)
        if len(held[gpu]) < slots:
            heapq.heappush(heap, (load - minus, gpu))
    return held


def send(chosen: list[int], placement: list[list[int]]) -> list[int]:
    """A wheel of GPUs for each expert."""
    where = defaultdict(list)
    for gpu, experts in enumerate(placement):
        for expert in experts:
            where[expert].append(gpu)
    wheels = {expert: cycle(gpus) for expert, gpus in where.items()}
    return [next(wheels[expert]) for expert in chosen]


def balance(rows: list[int], gpus: int) -> float:
    """By the largest count there is."""
    if not rows:
        return 1.0
    return len(rows) / (gpus * max(Counter(rows).values()))
