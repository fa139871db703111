"""e20: programs that strangers wrote, right and wrong ones, and what the checks say of them."""

from typing import Any

import pytest
from submissions import Graded, failed, said

EXERCISES = ("e20.1", "e20.2")  # for the fixture `graded`

# With a grid and a loop over names; every blank is a place where people go wrong.
SCHEDULE = """
import math

def bubble(stages, chunks):
    return BUBBLE

def ends(stages, costs):
    grid = [[0] * (stages + 1) for _ in range(len(costs) + 1)]
    for i, cost in enumerate(costs, 1):
        for s in range(1, stages + 1):
            grid[i][s] = max(grid[i - 1][s], grid[i][s - 1]) + cost
    return [row[-1] for row in grid[1:]]

def next_plan(requests, in_flight, stages, budget):
    if LIMIT:
        return {}
    plan = {}
    n = SHARE
    for name, left in requests:
        busy = any(name in p for p in in_flight)
        if left == 0 and n > 0 and sum(plan.values()) < budget and KNOWN:
            plan[name] = 1
            n -= 1
    for name, left in requests:
        tokens = min(left, budget - sum(plan.values()))
        if tokens > 0 and CHUNK:
            plan[name] = tokens
    return plan
"""
SCHEDULE_RIGHT = {
    "BUBBLE": "1 - chunks / (chunks + stages - 1)",
    "LIMIT": "len(in_flight) == stages",
    "SHARE": "math.ceil(len(requests) / stages)",
    "KNOWN": "not busy",
    "CHUNK": "True",
}

# Halving the largest cost that is allowed.
CUT = """
def times(counts, layers, embedding, head):
    out, layers = [], list(layers)
    for n in counts:
        out.append(sum(layers[:n]))
        layers = layers[n:]
    out[0] += embedding
    out[-1] += head
    return out

def fill(costs, stages, limit):
    counts = []
    rest = list(costs)
    for s in range(stages, 0, -1):
        n = load = 0
        while rest and len(rest) > s - 1 and (load + rest[0] <= limit or STUCK):
            load += rest.pop(0)
            n += 1
        counts.append(n)
    return counts if not rest and min(counts) > 0 else None

def cut(layers, embedding, head, stages):
    costs = list(layers)
    FIRST
    LAST
    low, high = 0, sum(costs)
    while low < high:
        middle = (low + high) // 2
        if fill(costs, stages, middle):
            high = middle
        else:
            low = middle + 1
    return fill(costs, stages, low)

def tables(stages, table, tied):
    out = [0] * stages
    out[0] += table
    if stages > 1 or not tied:
        out[-1] += TABLE
    return out
"""
CUT_RIGHT = {
    "STUCK": "False",
    "FIRST": "costs[0] += embedding",
    "LAST": "costs[-1] += head",
    "TABLE": "table",
}


def written(template: str, right: dict[str, str], **changes: str) -> str:
    for name, text in (right | changes).items():
        template = template.replace(name, text)
    return template


def test_another_schedule_is_right(graded: Graded) -> None:
    assert graded("e20.1", source=written(SCHEDULE, SCHEDULE_RIGHT)).status == "pass"


@pytest.mark.parametrize(
    ("changes", "mutant"),
    [
        ({"SHARE": "len(requests)"}, "all_in_one_plan"),
        ({"SHARE": "len(requests) // stages"}, "rounds_down"),
        ({"KNOWN": "True"}, "decodes_in_flight"),
        ({"CHUNK": "not busy_now(name, in_flight)"}, "chunks_wait"),
        ({"LIMIT": "False"}, "no_limit"),
        ({"BUBBLE": "chunks / (chunks + stages - 1)"}, "busy_share"),
    ],
)
def test_a_schedule_in_other_words_is_named(graded: Graded, changes: Any, mutant: str) -> None:
    source = written(SCHEDULE, SCHEDULE_RIGHT, **changes)
    source += "\n\ndef busy_now(name, plans):\n    return any(name in p for p in plans)\n"
    verdict = graded("e20.1", source=source)
    assert verdict.status == "fail"
    assert verdict.mutant == mutant


def test_a_schedule_that_never_stops_planning_is_told_the_rule(graded: Graded) -> None:
    source = written(SCHEDULE, SCHEDULE_RIGHT, LIMIT="False")
    assert "The plan of the example" in said(graded("e20.1", source=source))


def test_requests_that_are_changed_are_noticed(graded: Graded) -> None:
    source = written(SCHEDULE, SCHEDULE_RIGHT, LIMIT="requests.sort() or False")
    verdict = graded("e20.1", source=source)
    assert "next_plan may not change the requests" in said(verdict)


def test_another_cut_is_right(graded: Graded) -> None:
    assert graded("e20.2", source=written(CUT, CUT_RIGHT)).status == "pass"


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"FIRST": "pass"}, "test_embedding"),
        ({"LAST": "pass"}, "test_head"),
        ({"LAST": "costs[0] += head"}, "test_head"),
        ({"TABLE": "0 if tied else table"}, "test_tables"),
    ],
)
def test_a_wrong_cut_fails(graded: Graded, changes: Any, check: str) -> None:
    assert check in failed(graded("e20.2", source=written(CUT, CUT_RIGHT, **changes)))


def test_a_tied_table_that_is_held_once_is_named(graded: Graded) -> None:
    source = written(CUT, CUT_RIGHT, TABLE="0 if tied else table")
    assert graded("e20.2", source=source).mutant == "one_copy"


@pytest.mark.parametrize(
    "result", ["None", "[0, len(layers)]", "[1.0, 2.0]", "'ab'", "[len(layers)]"]
)
def test_what_is_no_cut_is_said(graded: Graded, result: str) -> None:
    source = written(CUT, CUT_RIGHT).replace("return fill(costs, stages, low)", f"return {result}")
    verdict = graded("e20.2", source=source)
    assert "test_by_hand" in failed(verdict)
    assert "cut(" in said(verdict)


@pytest.mark.slow
def test_trying_all_cuts_takes_too_long(graded: Graded) -> None:
    source = (
        written(CUT, CUT_RIGHT)
        + """
from itertools import combinations

def cut(layers, embedding, head, stages):
    def ends(places):
        all_ = (0, *places, len(layers))
        return [b - a for a, b in zip(all_, all_[1:])]
    every = map(ends, combinations(range(1, len(layers)), stages - 1))
    return min(every, key=lambda counts: max(times(counts, layers, embedding, head)))
"""
    )
    verdict = graded("e20.2", source=source)
    assert verdict.status != "pass"
