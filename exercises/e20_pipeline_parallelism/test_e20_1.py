"""The public checks of e20.1: bubbles, timetables, single plans, then whole schedules."""

import copy
import random
from typing import Any

from minillm_exercises.checking import accept, check, close, equal, expect, number, seeds

Plan = dict[str, int]


def timetable(stages: int, costs: list[int]) -> list[int]:
    """When each plan has left the last stage."""
    free, found = [0] * stages, []
    for cost in costs:
        for stage in range(stages):
            free[stage] = max(free[stage], free[stage - 1] if stage else 0) + cost
        found.append(free[-1])
    return found


def right_plan(
    requests: list[tuple[str, int]], in_flight: list[Plan], stages: int, budget: int
) -> Plan:
    """The rules of the README, one after the other."""
    if len(in_flight) >= stages:
        return {}
    share = min((len(requests) + stages - 1) // stages, budget)
    ready = [n for n, left in requests if not left and all(n not in p for p in in_flight)]
    found = {name: 1 for name in ready[:share]}
    for name, left in requests:
        tokens = min(left, budget - sum(found.values()))
        found |= {name: tokens} if tokens else {}
    return found


def planned(
    impl: Any, what: str, requests: list[tuple[str, int]], flying: list[Plan], stages: int,
    budget: int,
) -> Plan:  # fmt: skip
    """One plan, which must be the right one and leave its arguments as they are."""
    given, flown = copy.deepcopy(requests), copy.deepcopy(flying)
    case = f"requests {requests}, in flight {flying}, {stages} stages, budget {budget}"
    got = accept(impl.next_plan(given, flown, stages, budget), "next_plan returns a dict")
    equal(given, requests, "next_plan may not change the requests", case)
    equal(flown, flying, "next_plan may not change the plans in flight", case)
    equal(got, right_plan(requests, flying, stages, budget), what, case)
    return dict(got)


@check(1, "The README's example")
def test_by_hand(impl: Any) -> None:
    """Three plans, three costs and a bubble."""
    equal(impl.ends(2, [1, 3, 1]), [2, 7, 8], "ends(2, [1, 3, 1])")
    close(impl.bubble(2, 4), 0.2, "bubble(2, 4)")
    one, two = {"a": 1, "b": 1, "c": 2}, {"c": 4}
    rest = [("a", 0), ("b", 0)]
    what = "The plan of the example"
    planned(impl, what, [*rest, ("c", 7)], [], 2, 4)
    planned(impl, what, [("c", 5), *rest], [one], 2, 4)
    planned(impl, what, [("c", 1), *rest], [one, two], 2, 4)


@check(1, "Bubbles")
def test_bubble(impl: Any) -> None:
    """One chunk, as many as stages, many; and one stage, which never waits."""
    for stages in (1, 2, 4, 8):
        for chunks in (1, 2, 4, 7, 64):
            time = timetable(stages, [1] * chunks)[-1]
            want = 1 - stages * chunks / (stages * time)
            close(impl.bubble(stages, chunks), want, "bubble", f"bubble({stages}, {chunks})")


@check(2, "When plans leave the last stage")
def test_ends(impl: Any) -> None:
    """Equal costs, a slow plan at each place, random ones."""
    cases = [(1, [2, 3]), (3, [1]), (4, [1] * 4), (2, [])]
    cases += [(3, [1] * place + [5] + [1] * (3 - place)) for place in range(4)]
    dice = random.Random(1)
    cases += [(dice.randint(1, 5), [dice.randint(1, 6) for _ in range(6)]) for _ in range(10)]
    for stages, costs in cases:
        given = list(costs)
        equal(impl.ends(stages, given), timetable(stages, costs), f"ends({stages}, {costs})")
        equal(given, costs, "ends may not change the costs")


@check(2, "Requests that need their next token")
def test_decode(impl: Any) -> None:
    """Shares that divide and that do not; some in flight; a small budget."""
    names = [(name, 0) for name in "abcdefg"]
    planned(impl, "Seven requests, none in flight", names, [], 2, 64)
    planned(impl, "Seven requests, some in flight", names, [{"a": 1, "c": 1}], 3, 64)
    planned(impl, "Seven requests, two plans in flight", names, [{"d": 1}, {"e": 1}], 4, 64)
    planned(impl, "One request on four stages", names[:1], [], 4, 64)
    planned(impl, "One request, whose token is not known", names[:1], [{"a": 1}], 4, 64)
    planned(impl, "A budget of two", names, [], 2, 2)
    planned(impl, "One stage", names, [], 1, 64)
    planned(impl, "Nothing to do", [], [], 2, 64)


@check(2, "Chunks of prompts")
def test_chunks(impl: Any) -> None:
    """One prompt in all plans, several in one plan, behind requests that decode."""
    long = [("p", 100)]
    planned(impl, "A prompt that is longer than the budget", long, [], 3, 16)
    planned(impl, "Its next chunk follows", [("p", 84)], [{"p": 16}], 3, 16)
    planned(impl, "Its last chunk is in flight", [("p", 0)], [{"p": 16}, {"p": 4}], 3, 16)
    planned(impl, "Two prompts in one plan", [("p", 5), ("q", 30)], [], 2, 16)
    planned(impl, "Three prompts, the last has no room", [("p", 5), ("q", 11), ("r", 3)], [], 2, 16)
    mixed = [("a", 0), ("p", 40), ("b", 0), ("c", 0)]
    planned(impl, "A prompt among requests that decode", mixed, [], 2, 16)
    planned(impl, "The same, with a plan in flight", mixed, [{"a": 1, "b": 1, "p": 14}], 2, 16)
    planned(impl, "The budget is used up by those that decode", mixed, [], 1, 3)


@check(1, "At most as many plans as stages")
def test_limit(impl: Any) -> None:
    """With one fewer there is room, with as many there is none."""
    requests = [("a", 0), ("b", 0), ("p", 50)]
    for stages in (1, 2, 4):
        flying = [{"p": 8}] * stages
        planned(impl, "As many plans as stages", requests, flying, stages, 8)
        planned(impl, "One plan fewer than stages", requests, flying[1:], stages, 8)


def schedule(impl: Any, prompts: dict[str, int], stages: int, budget: int, steps: int) -> list[int]:
    """Let the plans go round: how many are in flight before each of so many ends."""
    left, order = dict(prompts), list(prompts)
    flying: list[Plan] = []
    counted = []
    for _ in range(steps):
        while True:
            requests = [(name, left[name]) for name in order]
            plan = planned(impl, "A plan of a schedule", requests, flying, stages, budget)
            if not plan:
                break
            flying.append(plan)
            expect(len(flying) <= stages, f"{len(flying)} plans in flight on {stages} stages.")
            for name, tokens in plan.items():
                left[name] -= tokens if left[name] else 0
            order = [name for name in order if name not in plan] + list(plan)
        counted.append(len(flying))
        if flying:
            flying.pop(0)
    return counted


@check(2, "Whole schedules")
def test_schedules(impl: Any) -> None:
    """Stages have work as long as there are as many requests; a prompt alone fills them, too."""
    for stages, users in ((2, 2), (3, 7), (4, 4), (4, 3), (4, 1)):
        prompts = {f"user {user}": 1 for user in range(users)}
        counted = schedule(impl, prompts, stages, 64, 6 * stages)
        case = f"{users} users on {stages} stages"
        want = [min(stages, users)] * (3 * stages)
        equal(counted[3 * stages :], want, "Plans in flight, once all decode", case)
    counted = schedule(impl, {"p": 100}, 4, 10, 6)
    equal(counted, [4, 4, 4, 4, 4, 4], "Plans in flight, chunks of one prompt on 4 stages")
    schedule(impl, {"a": 2, "b": 3, "p": 50, "c": 1, "q": 9}, 3, 8, 20)


@check(1, "Thirty random states")
def test_random(impl: Any) -> None:
    """Any requests, plans and budgets, and the bubble of any prompt."""
    for seed in seeds(30):
        dice = random.Random(seed)
        stages, budget = dice.randint(1, 5), dice.randint(1, 20)
        names = dice.sample("abcdefghij", dice.randint(0, 10))
        requests = [(name, dice.choice((0, 0, 0, 1, 5, 30))) for name in names]
        flying = [
            {name: 1 for name in dice.sample(names, dice.randint(0, len(names)))}
            for _ in range(dice.randint(0, stages))
        ]
        planned(impl, "A plan of a random state", requests, flying, stages, budget)
        costs = [dice.randint(1, 9) for _ in range(dice.randint(1, 8))]
        want = timetable(stages, costs)
        equal(impl.ends(stages, list(costs)), want, f"ends({stages}, {costs})")
        share = number(impl.bubble(stages, len(costs)), "bubble returns a number")
        close(share, (stages - 1) / (len(costs) + stages - 1), f"bubble({stages}, {len(costs)})")
