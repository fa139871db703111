"""The public checks of e08.1: each rule by itself, then steps in which all of them meet."""

import random
from itertools import pairwise
from typing import Any

from minillm_exercises.checking import accept, check, equal, expect, number, seeds

Requests = list[tuple[str, int]]


def said(running: Requests, waiting: Requests, budget: int, seats: int, limit: int | None) -> str:
    """How to repeat a step."""
    return f"running={running}, waiting={waiting}, budget={budget}, seats={seats}, limit={limit}"


def step(
    impl: Any,
    running: Requests,
    waiting: Requests,
    budget: int,
    seats: int,
    limit: int | None = None,
) -> Any:
    """What the learner's plan is; the lists must be as they were."""
    mine, theirs = list(running), list(waiting)
    case = said(running, waiting, budget, seats, limit)
    rest = () if limit is None else (limit,)
    got = impl.plan(mine, theirs, budget, seats, *rest)
    equal([mine, theirs], [running, waiting], "The two lists after the call", case)
    return got


def right(
    impl: Any, what: str, want: dict[str, int], running: Requests, waiting: Requests, *rest: Any
) -> None:
    """The plan is `want`, whatever the order of its entries."""
    budget, seats, limit = (*rest, None)[:3]
    got = step(impl, running, waiting, budget, seats, limit)
    equal(got, want, what, said(running, waiting, budget, seats, limit))


@check(1, "The worked example of the README")
def test_by_hand(impl: Any) -> None:
    """Two decode, one is in its prompt, two wait."""
    running, waiting = [("a", 1), ("b", 700), ("c", 1)], [("d", 300), ("e", 20)]
    base = {"a": 1, "c": 1}
    right(impl, "The worked example", base | {"b": 510}, running, waiting, 512, 8)
    want = base | {"b": 256, "d": 254}
    right(impl, "The worked example", want, running, waiting, 512, 8, 256)
    want = base | {"b": 100, "d": 100, "e": 20}
    right(impl, "The worked example", want, running, waiting, 512, 8, 100)
    want = base | {"b": 100, "d": 100}
    right(impl, "The worked example", want, running, waiting, 512, 4, 100)


@check(1, "Steps without waiting requests, or without any")
def test_running_only(impl: Any) -> None:
    """Decoding only, a prompt that fits exactly, and one that is longer than the budget."""
    right(impl, "No requests", {}, [], [], 8, 4)
    right(impl, "Two decode", {"a": 1, "b": 1}, [("a", 1), ("b", 1)], [], 8, 4)
    right(impl, "A prompt that fits", {"a": 8}, [("a", 8)], [], 8, 4)
    right(impl, "A prompt that does not", {"a": 8}, [("a", 9)], [], 8, 4)


@check(1, "Steps without running requests")
def test_waiting_only(impl: Any) -> None:
    """One prompt, two, and a prompt of a single token."""
    right(impl, "One prompt waits", {"a": 5}, [], [("a", 5)], 8, 4)
    right(impl, "Two prompts wait", {"a": 5, "b": 1}, [], [("a", 5), ("b", 1)], 8, 4)


@check(2, "Decoding comes before prompts, wherever it stands in the list")
def test_decoding_first(impl: Any) -> None:
    """The prompts before it in the list would need the whole budget."""
    running = [("a", 50), ("b", 1), ("c", 60), ("d", 1)]
    want = {"b": 1, "d": 1, "a": 8}
    right(impl, "A prompt is first in the list", want, running, [("e", 9)], 10, 4)
    want = {"b": 1, "c": 1, "d": 1}
    running = [("a", 50), ("b", 1), ("c", 1), ("d", 1)]
    what = "One waiting request has a single token, and is no decoding one"
    right(impl, what, want | {"a": 1}, running, [("e", 1)], 4, 4)
    right(impl, what, want | {"a": 3}, running, [("e", 1)], 6, 5)


@check(2, "Prompts in chunks: running ones, then waiting ones, in their order")
def test_chunks(impl: Any) -> None:
    """The request at the end of the budget gets what is left; later ones get nothing."""
    running, waiting = [("a", 4), ("b", 6)], [("c", 5), ("d", 3)]
    for budget, want in (
        (3, {"a": 3}),
        (4, {"a": 4}),
        (5, {"a": 4, "b": 1}),
        (9, {"a": 4, "b": 5}),
        (10, {"a": 4, "b": 6}),
        (11, {"a": 4, "b": 6, "c": 1}),
        (14, {"a": 4, "b": 6, "c": 4}),
        (15, {"a": 4, "b": 6, "c": 5}),
        (16, {"a": 4, "b": 6, "c": 5, "d": 1}),
        (18, {"a": 4, "b": 6, "c": 5, "d": 3}),
        (19, {"a": 4, "b": 6, "c": 5, "d": 3}),
    ):
        right(impl, f"Prompts with a budget of {budget}", want, running, waiting, budget, 3 + 1)
    for budget in (7, 8):
        what = "The first to wait is longer than what is left; the second would fit"
        right(impl, what, {"c": budget}, [], [("c", 9), ("d", 2)], budget, 4)


@check(1, "Seats")
def test_seats(impl: Any) -> None:
    """Each running request has one; there may be none left, one, or more than requests."""
    running, waiting = [("a", 1), ("b", 3)], [("c", 2), ("d", 2), ("e", 2)]
    base = {"a": 1, "b": 3}
    for seats, names in ((2, ""), (3, "c"), (4, "cd"), (5, "cde"), (9, "cde")):
        want = base | dict.fromkeys(names, 2)
        right(impl, f"Two are running, with {seats} seats", want, running, waiting, 20, seats)


@check(2, "A limit for each request")
def test_limit(impl: Any) -> None:
    """For running and for admitted requests, each by itself; decoding is not touched by it."""
    running, waiting = [("a", 9), ("b", 1), ("c", 3)], [("d", 9), ("e", 4)]
    for limit, want in (
        (1, {"b": 1, "a": 1, "c": 1, "d": 1, "e": 1}),
        (3, {"b": 1, "a": 3, "c": 3, "d": 3, "e": 3}),
        (4, {"b": 1, "a": 4, "c": 3, "d": 4, "e": 4}),
        (20, {"b": 1, "a": 9, "c": 3, "d": 9, "e": 4}),
    ):
        right(impl, f"A limit of {limit}", want, running, waiting, 40, 5, limit)
    right(impl, "A limit of 5", {"b": 1, "a": 5, "c": 3, "d": 2}, running, waiting, 11, 5, 5)


@check(3, "Three hundred random steps")
def test_everything(impl: Any) -> None:
    """Every property by itself, then the whole plan."""
    for seed in seeds(300):
        draw = random.Random(seed)
        size = draw.choice((3, 12, 200))
        names = iter("abcdefghijklmnop")
        running = [(next(names), request(draw, size)) for _ in range(draw.randint(0, 5))]
        waiting = [(next(names), draw.randint(1, size)) for _ in range(draw.randint(0, 5))]
        seats = max(1, len(running) + draw.randint(0, 4))
        budget = seats + draw.randint(0, 3 * size)
        limit = draw.choice((None, draw.randint(1, size)))
        got = step(impl, running, waiting, budget, seats, limit)
        case = said(running, waiting, budget, seats, limit)
        look(got, running, waiting, budget, seats, limit)
        equal(got, reference(running, waiting, budget, seats, limit), "The whole plan", case)


def request(draw: random.Random, size: int) -> int:
    """What a running request has still to compute: often a single token."""
    return 1 if draw.random() < 0.5 else draw.randint(2, size)


def look(
    plan: Any, running: Requests, waiting: Requests, budget: int, seats: int, limit: int | None
) -> None:
    """The properties of a plan, in the order in which one would miss them."""
    case = said(running, waiting, budget, seats, limit)
    accept(plan, "The plan", case)
    form = f"The plan ({case}): expected a dict, got {type(plan).__name__}."
    expect(isinstance(plan, dict), form)
    everybody = dict(running) | dict(waiting)
    for name, count in plan.items():
        expect(name in everybody, f"The plan {plan} ({case}): there is no request {name!r}.")
        number(count, f"The tokens of {name!r}", case)
    promise(plan, everybody, budget, limit, case)
    decoding = [name for name, todo in running if todo == 1]
    missed = [name for name in decoding if name not in plan]
    expect(not missed, f"The plan {plan} ({case}): {missed} decode and get no token.", missed)
    admitted = [name for name, _ in waiting if name in plan]
    wrong = len(running) + len(admitted) > seats
    message = f"{admitted} are admitted to {len(running)} running ones: there are {seats} seats."
    expect(not wrong, f"The plan {plan} ({case}): {message}", ("seats", wrong, admitted))
    serve = decoding + [name for name, todo in running if todo > 1] + [name for name, _ in waiting]
    short = [name for name in serve if plan.get(name, 0) < min(everybody[name], limit or budget)]
    for first, second in pairwise(serve):
        message = f"{second!r} gets tokens although {first!r} could compute more."
        overtaken = second in plan and first in short
        expect(not overtaken, f"The plan {plan} ({case}): {message}", ("turn", overtaken))
    hungry = [name for name in serve[:seats] if name in short]
    left = budget - sum(plan.values())
    message = f"{left} tokens are left, which {hungry} could compute."
    idle = left > 0 and bool(hungry)
    expect(not idle, f"The plan {plan} ({case}): {message}", ("left", left, hungry))


def promise(
    plan: dict[str, int], everybody: dict[str, int], budget: int, limit: int | None, case: str
) -> None:
    """Each request keeps to its todo and the limit, and all together keep to the budget."""
    for name, count in plan.items():
        most = min(everybody[name], limit or budget)
        message = f"{name!r} computes {count} tokens; it should be 1 to {most}, or not be there."
        fits = 1 <= count <= most
        expect(fits, f"The plan {plan} ({case}): {message}", ("share", count, most))
    total = sum(plan.values())
    message = f"{total} tokens in all, and the budget is {budget}."
    expect(total <= budget, f"The plan {plan} ({case}): {message}", ("sum", total))


def reference(
    running: Requests, waiting: Requests, budget: int, seats: int, limit: int | None
) -> dict[str, int]:
    """The plan, token by token: the first in the line who may have one more gets it."""
    line = sorted(running, key=lambda pair: pair[1] > 1) + waiting[: seats - len(running)]
    plan: dict[str, int] = {}
    for _ in range(budget):
        for name, todo in line:
            if plan.get(name, 0) < min(todo, limit or budget):
                plan[name] = plan.get(name, 0) + 1
                break
    return plan
