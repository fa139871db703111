"""e18: programs that strangers wrote, right and wrong ones, and what the checks say of them."""

from typing import Any

import pytest
from submissions import Graded, failed, said

EXERCISES = ("e18.1", "e18.2")  # for the fixture `graded`

# With indices and a dictionary; every word in capitals is a place where people go wrong.
LAYER = """
def route(scores, bias, k):
    order = list(range(len(scores)))
    order.sort(key=lambda e: SORTED)
    best = order[:k]
    total = 0
    for e in best:
        total += scores[e]
    return [(e, WEIGHT) for e in best]

def dispatch(routes, num_experts):
    found = {e: [] for e in range(num_experts)}
    for t in range(len(routes)):
        for e, w in routes[t]:
            KEEP found[e].append((t, w))
    return [found[e] for e in range(num_experts)]

def combine(x, batches, run):
    out = []
    for row in x:
        out.append([0.0 for _ in row])
    for e, batch in enumerate(batches):
        if WORK:
            rows = ROWS
            for i in range(len(batch)):
                t, w = batch[i]
                for j in range(len(rows[i])):
                    out[t][j] += w * rows[i][j]
    return out
"""
LAYER_RIGHT = {
    "SORTED": "(-(scores[e] + bias[e]), e)",
    "WEIGHT": "scores[e] / total",
    "KEEP": "",
    "WORK": "batch",
    "ROWS": "run(e, [x[t] for t, w in batch])",
}

PLACES = """
def copies(loads, spares):
    n = [1 for _ in loads]
    while spares:
        best = 0
        for e in range(len(loads)):
            if LOAD(e) > LOAD(best):
                best = e
        n[best] += 1
        spares -= 1
    return n

def pack(loads, counts, gpus):
    parcels = [(loads[e] / counts[e], e) for e in range(len(loads)) for _ in range(counts[e])]
    parcels.sort(key=lambda p: (ORDER, p[1]))
    held, total = [[] for _ in range(gpus)], [0] * gpus
    for load, e in parcels:
        g = min((g for g in range(gpus) if FREE), key=lambda g: total[g])
        held[g].append(e)
        total[g] += load
    return held

def send(chosen, placement):
    turn = {}
    out = []
    for e in chosen:
        where = [g for g in range(len(placement)) for c in placement[g] if c == e]
        turn[e] = turn.get(e, -1) + 1
        out.append(where[TURN % len(where)])
    return out

def balance(rows, gpus):
    if len(rows) == 0:
        return 1.0
    return MEAN / max(rows.count(g) for g in range(gpus))
"""
PLACES_RIGHT = {
    "LOAD(e)": "loads[e] / n[e]",
    "LOAD(best)": "loads[best] / n[best]",
    "ORDER": "-p[0]",
    "FREE": "len(held[g]) < len(parcels) / gpus",
    "TURN": "turn[e]",
    "MEAN": "(len(rows) / gpus)",
}


def written(template: str, right: dict[str, str], changes: Any) -> str:
    for name, text in (right | changes).items():
        template = template.replace(name, text)
    return template


def test_another_layer_is_right(graded: Graded) -> None:
    assert graded("e18.1", source=written(LAYER, LAYER_RIGHT, {})).status == "pass"


@pytest.mark.parametrize(
    ("changes", "mutant"),
    [
        ({"WEIGHT": "scores[e]"}, "not_normalised"),
        ({"WEIGHT": "scores[e] / sum(scores)"}, "normalised_over_all"),
        ({"SORTED": "(-(scores[e] + bias[e]), -e)"}, "higher_tie"),
        ({"SORTED": "(-scores[e], e)"}, "bias_ignored"),
        ({"ROWS": "run(e, [[w * v for v in x[t]] for t, w in batch])"}, "weights_twice"),
        ({"ROWS": "[run(e, [x[t]])[0] for t, w in batch]"}, "one_call_per_token"),
        ({"WORK": "True"}, "idle_experts"),
    ],
)
def test_a_layer_in_other_words_is_named(graded: Graded, changes: Any, mutant: str) -> None:
    verdict = graded("e18.1", source=written(LAYER, LAYER_RIGHT, changes))
    assert verdict.status == "fail"
    assert verdict.mutant == mutant


def test_another_capacity_drops_tokens_too(graded: Graded) -> None:
    keep = {"KEEP": "if len(found[e]) < 4:\n                "}
    verdict = graded("e18.1", source=written(LAYER, LAYER_RIGHT, keep))
    assert "test_dispatch" in failed(verdict)


def test_rows_that_are_no_lists_are_said(graded: Graded) -> None:
    rows = {"ROWS": "run(e, [t for t, w in batch])"}
    assert "run takes an expert and a list of rows" in said(
        graded("e18.1", source=written(LAYER, LAYER_RIGHT, rows))
    )


def test_routes_that_are_no_pairs_are_said(graded: Graded) -> None:
    source = written(LAYER, LAYER_RIGHT, {}).replace("[(e, scores[e] / total) for", "[e for")
    assert "route returns a list of pairs" in said(graded("e18.1", source=source))


def test_another_placement_is_right(graded: Graded) -> None:
    assert graded("e18.2", source=written(PLACES, PLACES_RIGHT, {})).status == "pass"


@pytest.mark.parametrize(
    ("changes", "mutant"),
    [
        ({"LOAD(e)": "loads[e]", "LOAD(best)": "loads[best]"}, "all_to_the_hottest"),
        ({"TURN": "len(out)"}, "no_turns"),
        ({"TURN": "0"}, "all_to_the_first_copy"),
        ({"MEAN": "min(rows.count(g) for g in range(gpus))"}, "least_over_largest"),
    ],
)
def test_a_placement_in_other_words_is_named(graded: Graded, changes: Any, mutant: str) -> None:
    verdict = graded("e18.2", source=written(PLACES, PLACES_RIGHT, changes))
    assert verdict.status == "fail"
    assert verdict.mutant == mutant


@pytest.mark.parametrize(
    ("changes", "check"),
    [({"ORDER": "p[0]"}, "test_small"), ({"FREE": "True"}, "test_slots")],
)
def test_a_placement_that_is_not_good_enough(graded: Graded, changes: Any, check: str) -> None:
    verdict = graded("e18.2", source=written(PLACES, PLACES_RIGHT, changes))
    assert check in failed(verdict)


def test_a_copy_that_is_lost_is_counted(graded: Graded) -> None:
    source = written(PLACES, PLACES_RIGHT, {}).replace("    return held", "    return held[:-1]")
    assert "The copies on each GPU" in said(graded("e18.2", source=source))


def test_a_better_placement_than_largest_first_passes(graded: Graded) -> None:
    """Swaps of copies between the busiest GPU and another one, as long as they help."""
    better = """
    def load(g):
        return sum(loads[e] / counts[e] for e in held[g])
    for _ in range(50):
        top = max(range(gpus), key=load)
        for g in range(gpus):
            for i in range(len(held[g])):
                for j in range(len(held[top])):
                    before = max(load(top), load(g))
                    held[g][i], held[top][j] = held[top][j], held[g][i]
                    if max(load(top), load(g)) >= before - 1e-9:
                        held[g][i], held[top][j] = held[top][j], held[g][i]
    return held
"""
    source = written(PLACES, PLACES_RIGHT, {}).replace("    return held\n", better, 1)
    assert graded("e18.2", source=source).status == "pass"
