"""Deliberate mistakes in decode.c about several queries of a sequence, parts and tiles. A test must
find each; none reads or writes far outside."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.ops import test_c_decode as decode
from tests.ops.test_c_mutants import Mutant, check_found, on

BITS = decode.test_bits_know_nothing_of_threads_queries_and_neighbours
windows = on(decode.Attend, BITS, 700, 100)
unused = on(decode.Attend, decode.test_a_query_before_the_first_position_is_zero)
limits = on(decode.Attend, decode.test_how_many_queries_are_taken)


def random(c) -> None:
    for seed in range(8):
        decode.test_several_queries_are_attention_and_each_what_it_is_alone(
            decode.Attend(*c), seed, 5
        )


def parts(c) -> None:
    for length in (700, 2100):
        BITS(decode.Attend(*c), length, None)


def planted(pattern: str, mistake: str, found_by: Callable = random) -> Mutant:
    """A pattern that decode.c has once, and what takes its place."""
    pairs = "load_vec" in pattern and "q" in pattern
    return Mutant(pattern, mistake, found_by, "decode_attention", "BF16" if pairs else "F32")


MISTAKES = {
    "a query sees the next one": planted(r"p->queries \+ query \+ 1;", "p->queries + query + 2;"),
    "a query does not see itself": planted(r"p->queries \+ query \+ 1;", "p->queries + query;"),
    "all see what the last one sees": planted(r"p->length - p->queries \+ query \+ 1", "p->length"),
    "a query's window is too wide": planted(
        r"end > p->window \? end - p->window", "end > p->window ? end - p->window - 1", windows
    ),
    "heads of the query before": planted(r"q\[r\] = p->q \+ \(\(query \*", "q[r] = p->q + ((0 *"),
    "queries in the heads' order": planted(
        r"\(\(query \* p->kv_heads \+ head\) \* group \+ g\)",
        "((g % p->queries * p->kv_heads + head) * group + g)",
    ),
    "results in the first query's place": planted(
        r"\(query \* p->kv_heads \+ head\) \* p->group \* dv", "head * p->group * dv"
    ),
    "states of the first query": planted(r"\(query \* p->group \+ g\) \* STATE", "g * STATE"),
    "edges are those of all rows": planted(r"int whole = .*;", "int whole = 1;"),
    "the last query's window is not looked at": planted(
        r"seen_in\(p, p->queries - 1, t\)\.begin == 0 && ", "", windows
    ),
    "values from the tile's first position": planted(
        r"t->values \+ seen\.begin", "t->values", windows
    ),
    "what is before a window counts": planted(
        r"(i < seen\.begin; i\+\+\) scores\[i\]) = -INFINITY", r"\1 = 0", windows
    ),
    "tiles begin at the window": planted(
        r"begin \+ first / size \* size", "begin + first", windows
    ),
    "a part begins where the last one ended, less one": planted(
        r"part - FIRST_PARTS;", "part - FIRST_PARTS - (part > FIRST_PARTS);", parts
    ),
    "parts are joined as they are": planted(r"\+ part\[j\] \* new", "+ part[j]", parts),
    "nothing is weighed": planted(
        r"part\[dim\] == -INFINITY \? 0\.f : fast_exp\(part\[dim\] - best\)", "1.f", parts
    ),
    "undivided sequences are one part": planted(
        r"(static void attend_all[^}]*?)part < parts\.end;", r"\1part < parts.begin + 1;", parts
    ),
    "a query without positions": planted(r"end = end > 0 \? end : 0;", "", unused),
    "one query too many": planted(
        r"queries > decode_queries\(p\.group\)", "queries > 1 + decode_queries(p.group)", limits
    ),
    "a second head's scores in the first one's place": planted(r"scores \+ h \* TILE", "scores"),
    "a second head's query is the first one's": planted(
        r"load_vec\(q\[h\] \+ j\)", "load_vec(q[0] + j)"
    ),
}


@pytest.mark.mutation
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str, tmp_path: Path) -> None:
    if MISTAKES[name].element == "BF16" and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("a processor without instructions for pairs of bf16")
    check_found(MISTAKES[name], tmp_path)
