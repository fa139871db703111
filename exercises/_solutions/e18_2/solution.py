"""A copy halves a load only for the first spare, so what counts is the load per copy.

Both halves are greedy. Spares go where one copy still has the most to do. Then copies are packed
like parcels: the large ones first, because the small ones can still even out what these leave. Each
GPU has a fixed number of slots, since its memory has. Nothing here looks at a token's values: which
copy computes a row depends only on how many rows of that expert came before.
"""


def copies(loads: list[int], spares: int) -> list[int]:
    """Ask again after each spare: the hottest expert may be another one."""
    counts = [1] * len(loads)
    for _ in range(spares):
        hottest = max(range(len(loads)), key=lambda expert: loads[expert] / counts[expert])
        counts[hottest] += 1
    return counts


def pack(loads: list[int], counts: list[int], gpus: int) -> list[list[int]]:
    """Largest first, each to the GPU with the least load that has a slot left."""
    slots = sum(counts) // gpus
    each = [load / count for load, count in zip(loads, counts, strict=True)]
    order = [expert for expert, count in enumerate(counts) for _ in range(count)]
    placement: list[list[int]] = [[] for _ in range(gpus)]
    for expert in sorted(order, key=lambda expert: -each[expert]):
        free = [gpu for gpu in placement if len(gpu) < slots]
        least = min(free, key=lambda gpu: sum(each[held] for held in gpu))
        least.append(expert)
    return placement


def send(chosen: list[int], placement: list[list[int]]) -> list[int]:
    """The copies of an expert in turn."""
    seen: dict[int, int] = {}
    rows = []
    for expert in chosen:
        holders = [gpu for gpu, held in enumerate(placement) for each in held if each == expert]
        turn = seen.get(expert, 0)
        seen[expert] = turn + 1
        rows.append(holders[turn % len(holders)])
    return rows


def balance(rows: list[int], gpus: int) -> float:
    """What share of the time the GPUs compute on average, if all wait for the last one."""
    counts = [rows.count(gpu) for gpu in range(gpus)]
    return len(rows) / gpus / max(counts) if rows else 1.0
