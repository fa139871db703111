"""A plan waits for two things on each stage: for itself, and for the plan before it.

`free` remembers the second of them, one number per stage, and the whole timetable follows from it.
What may be in the next plan follows from what is known: a token that is still in the pipeline hides
the position behind it, a chunk hides nothing.
"""

Plan = dict[str, int]


def bubble(stages: int, chunks: int) -> float:
    """The last stage waits stages - 1 times for the first chunk, and so do all others, before or
    after their chunks."""
    return (stages - 1) / (chunks + stages - 1)


def ends(stages: int, costs: list[int]) -> list[int]:
    """`free` has the time at which each stage has done all plans so far."""
    free = [0] * stages
    found = []
    for cost in costs:
        at = 0
        for stage in range(stages):
            at = max(at, free[stage]) + cost
            free[stage] = at
        found.append(at)
    return found


def next_plan(
    requests: list[tuple[str, int]], in_flight: list[Plan], stages: int, budget: int
) -> Plan:
    """First a share of those that decode, then chunks into what is left of the budget."""
    if len(in_flight) >= stages:
        return {}
    flying = {name for plan in in_flight for name in plan}
    most = -(-len(requests) // stages)
    plan: Plan = {}
    for name, left in requests:
        if not left and name not in flying and len(plan) < min(most, budget):
            plan[name] = 1
    room = budget - len(plan)
    for name, left in requests:
        if left and room:
            plan[name] = min(left, room)
            room -= plan[name]
    return plan
