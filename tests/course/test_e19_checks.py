"""e19: programs that strangers wrote, right and wrong ones, and what the checks say of them."""

from collections.abc import Callable
from typing import Any

import pytest
from submissions import Graded, failed, said

from minillm_exercises.checking import CheckFailedError
from minillm_exercises.ranks import MOST, together

EXERCISES = ("e19.1", "e19.2")  # for the fixture `graded`

# With numbered shares and index arithmetic; every blank is a place where people go wrong.
LAYER = """
def heads(rank, size, num_heads, num_kv_heads):
    n = num_heads // size
    mine = [rank * n + i for i in range(n)]
    return mine, KV

def shard(layer, rank, size):
    u = len(layer["gate_up"]) // 2
    a, b = rank * u // size, (rank + 1) * u // size
    pick = [i for i in range(2 * u) if a <= i % u < b]
    return {
        "gate_up": [layer["gate_up"][i] for i in pick],
        "gate_up_bias": [layer["gate_up_bias"][i] for i in pick],
        "down": [r[a:b] for r in layer["down"]],
        "down_bias": layer["down_bias"],
    }

def dot(a, b):
    return sum(x * y for x, y in zip(a, b))

def forward(mine, x, rank, add_up):
    u = len(mine["gate_up"]) // 2
    part = []
    for row in x:
        s = [dot(row, w) + b for w, b in zip(mine["gate_up"], mine["gate_up_bias"])]
        h = [max(0, s[i]) * s[u + i] for i in range(u)]
        part.append([dot(h, w) + START for w, b in zip(mine["down"], mine["down_bias"])])
    SUM
    return [[v + END for v, b in zip(r, mine["down_bias"])] for r in out]
"""
LAYER_RIGHT = {
    "KV": "sorted({q * num_kv_heads // num_heads for q in mine})",
    "START": "0",
    "SUM": "out = add_up(part)",
    "END": "b",
}

TOKEN = """
import math

def share(vocab_size, rank, size):
    m = (vocab_size + size - 1) // size
    return range(vocab_size)[rank * m : rank * m + m]

def best(values, tokens):
    top = (-math.inf, -1)
    for place, token in enumerate(tokens):
        if top[1] < 0 or values[place] COMPARE top[0]:
            top = (values[place], token)
    return top

def winner(pairs):
    found = pairs[0]
    for value, token in pairs[1:]:
        if value > found[0] or value == found[0] and token < found[1]:
            found = (value, token)
    return found

def choose(logits, tokens, temperature, noise, gather):
    top, token = winner(gather(best(logits, tokens)))
    if temperature == 0:
        return token
    scores = []
    for place, each in enumerate(tokens):
        scores.append((logits[place] - SUBTRACTED) / temperature + noise(NUMBER))
    return winner(gather(best(scores, tokens)))[1]
"""
TOKEN_RIGHT = {"COMPARE": ">", "SUBTRACTED": "top", "NUMBER": "each"}


def written(template: str, right: dict[str, str], **changes: str) -> str:
    for name, text in (right | changes).items():
        template = template.replace(name, text)
    return template


def test_another_layer_is_right(graded: Graded) -> None:
    assert graded("e19.1", source=written(LAYER, LAYER_RIGHT)).status == "pass"


@pytest.mark.parametrize(
    ("changes", "mutant"),
    [
        ({"START": "b", "END": "0"}, "bias_everywhere"),
        ({"END": "(b if rank == 0 else 0)"}, "bias_on_rank_0"),
        ({"SUM": "out = [add_up([r])[0] for r in part]"}, "sum_for_each_row"),
        ({"SUM": "out = part"}, "no_sum"),
        (
            {"KV": "[rank % num_kv_heads] if size > num_kv_heads else "
                   + LAYER_RIGHT["KV"]},
            "kv_heads_in_turn",
        ),
    ],
)  # fmt: skip
def test_a_layer_in_other_words_is_named(graded: Graded, changes: Any, mutant: str) -> None:
    verdict = graded("e19.1", source=written(LAYER, LAYER_RIGHT, **changes))
    assert verdict.status == "fail"
    assert verdict.mutant == mutant


def test_a_rank_that_returns_early_is_said_not_waited_for(graded: Graded) -> None:
    """With threads or processes this would hang."""
    source = written(LAYER, LAYER_RIGHT, SUM="out = add_up(part) if rank else part")
    verdict = graded("e19.1", source=source)
    assert "Rank 1 waits in add_up number 1, and rank 0 has returned without it" in said(verdict)


def test_ranks_that_add_up_other_shapes_are_told(graded: Graded) -> None:
    source = written(LAYER, LAYER_RIGHT, SUM="out = add_up(part + part[:rank])")
    assert "The shape of what ranks add up" in said(graded("e19.1", source=source))


def test_a_sum_of_numbers_is_no_list_of_rows(graded: Graded) -> None:
    verdict = graded("e19.1", source=written(LAYER, LAYER_RIGHT, SUM="out = add_up(part[0])"))
    assert "add_up takes a list of rows" in said(verdict)


def test_another_choice_is_right(graded: Graded) -> None:
    assert graded("e19.2", source=written(TOKEN, TOKEN_RIGHT)).status == "pass"


@pytest.mark.parametrize(
    ("changes", "mutant"),
    [
        ({"NUMBER": "place"}, "local_noise"),
        ({"SUBTRACTED": "best(logits, tokens)[0]"}, "local_best"),
        ({"COMPARE": ">="}, "higher_tie"),
        ({"SUBTRACTED": "0"}, "raw_logits"),
    ],
)
def test_a_choice_in_other_words_is_named(graded: Graded, changes: Any, mutant: str) -> None:
    verdict = graded("e19.2", source=written(TOKEN, TOKEN_RIGHT, **changes))
    assert verdict.status == "fail"
    assert verdict.mutant == mutant


def test_all_logits_to_all_ranks_is_the_right_token_for_too_many_numbers(graded: Graded) -> None:
    source = written(TOKEN, TOKEN_RIGHT)
    source = source.replace("gather(best(logits, tokens))", "[best(each, share(V, r, len(all_)))"
                            " for r, each in enumerate(all_ := gather(logits))]")  # fmt: skip
    source = source.replace("V, r", "24 if len(logits) == 8 else 5, r")
    verdict = graded("e19.2", source=source)
    assert "test_counts" in failed(verdict)


# What runs the ranks -------------------------------------------------------------------------


def test_together_gives_each_rank_the_answers_in_order() -> None:
    def call(rank: int, meet: Callable[[Any], Any]) -> list[Any]:
        first = meet(rank)
        return [first, meet(10 * rank)]

    done = together(3, call, sum, "meet")
    assert done.results == [[3, 30]] * 3
    assert done.meetings == [[0, 1, 2], [0, 10, 20]]
    assert together(2, lambda rank, meet: rank, sum, "meet").results == [0, 1]


def test_a_solution_that_catches_every_exception_still_meets() -> None:
    def call(rank: int, meet: Callable[[Any], Any]) -> Any:
        try:
            return meet(rank)
        except Exception:
            return None

    assert together(2, call, sum, "meet").results == [1, 1]


def test_ranks_that_never_end_are_stopped() -> None:
    def call(rank: int, meet: Callable[[Any], Any]) -> None:
        while True:
            meet(rank)

    with pytest.raises(CheckFailedError, match=f"After {MOST} calls of meet"):
        together(2, call, sum, "meet")
