"""The public checks of e01.1: first each part alone, by growing one number, then everything."""

import random
from dataclasses import dataclass, replace
from typing import Any

from minillm_exercises.checking import check, equal, expect, number, seeds


@dataclass(frozen=True)
class Shape:
    """A llama-shaped model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool


# No two of the factors are equal, so that a wrong one cannot hide: 12 * 20 is not 96, 3 is not 4.
SMALL = Shape(5, 96, 12, 3, 20, 224, 1000, tied=False)
LARGE = Shape(127, 16381, 136, 17, 127, 53249, 128257, tied=False)  # about 405B, all odd


def pairs(tokens: int, past: int) -> int:
    """How many (query, key) pairs there are, one by one."""
    return sum(past + i + 1 for i in range(tokens))


def expected(shape: Shape, tokens: int, past: int) -> int:
    """The count, product by product."""
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    products = [(shape.hidden, width) for width in (query, kv, kv)] + [(query, shape.hidden)]
    products += [(shape.hidden, shape.intermediate)] * 2 + [(shape.intermediate, shape.hidden)]
    adds = shape.layers * tokens * sum(rows * columns for rows, columns in products)
    adds += shape.layers * 2 * pairs(tokens, past) * query
    return 2 * (adds + shape.hidden * shape.vocab)


def grown(impl: Any, what: str, tokens: int, past: int, **change: int) -> None:
    """How the count grows when a number of SMALL does: what does not depend on it cancels."""
    larger = replace(SMALL, **change)
    got = counted(impl, larger, tokens, past) - counted(impl, SMALL, tokens, past)
    want = expected(larger, tokens, past) - expected(SMALL, tokens, past)
    name, value = next(iter(change.items()))
    case = f"tokens={tokens}, past={past}, {SMALL}"
    equal(got, want, f"{what}: the increase when {name} grows to {value}", case)


def counted(impl: Any, shape: Shape, tokens: int, past: int) -> int:
    """The learner's count, as a number to compute with."""
    case = f"tokens={tokens}, past={past}, {shape}"
    return number(impl.forward_flops(shape, tokens, past), "All operations", case)


@check(1, "The worked example of the README")
def test_by_hand(impl: Any) -> None:
    """One layer, two tokens."""
    shape = Shape(1, 5, 4, 1, 3, 7, 10, tied=False)
    equal(impl.forward_flops(shape, 2), 1264, "The worked example", f"{shape}, tokens=2")


@check(1, "The MLP")
def test_mlp(impl: Any) -> None:
    """A wider MLP: nothing else changes."""
    grown(impl, "The matrices of the MLP, for 7 tokens", 7, 0, intermediate=225)


@check(2, "Keys and values")
def test_keys_and_values(impl: Any) -> None:
    """More key-value heads: two projections grow, attention itself does not."""
    grown(impl, "The projections to keys and values, for 7 tokens", 7, 0, kv_heads=6)


@check(2, "Queries, outputs and causal attention")
def test_attention(impl: Any) -> None:
    """More query heads: two projections grow, and the work per pair."""
    what = "The query and output projections and the pairs of attention"
    grown(impl, what, 1, 0, heads=24)
    grown(impl, what, 9, 0, heads=24)
    grown(impl, what, 9, 40, heads=24)


@check(1, "The logits of the last token, whether or not the embedding is tied")
def test_logits(impl: Any) -> None:
    """A larger vocabulary; a head that shares its numbers with the embedding."""
    grown(impl, "One row of logits, after 7 tokens", 7, 0, vocab=1001)
    tied, untied = (counted(impl, replace(SMALL, tied=tied), 7, 0) for tied in (True, False))
    equal(tied, untied, "The same model, tied or not", "tokens=7")


@check(1, "A prompt in chunks needs as much work as the whole prompt")
def test_chunks(impl: Any) -> None:
    """Cutting once adds one row of logits and nothing else, wherever the cut is."""
    whole, past = 24, 6
    added = []
    for cut in (1, 7, 20):
        first = counted(impl, SMALL, cut, past)
        rest = counted(impl, SMALL, whole - cut, past + cut)
        added.append(first + rest - counted(impl, SMALL, whole, past))
    expect(
        len(set(added)) == 1,
        f"24 tokens after 6, cut in two after 1, 7 and 20 tokens, cost {added} operations more "
        f"than at once; the cut adds a row of logits, so the three must be equal.",
        added,
    )


@check(2, "Twenty models and a very large one, exact to the last operation")
def test_everything(impl: Any) -> None:
    """Also numbers above 2**53, which a float cannot hold."""
    cases = []
    for seed in seeds(20):
        draw = random.Random(seed)
        kv_heads = draw.randint(1, 16)
        shape = Shape(
            layers=draw.randint(1, 126),
            hidden=draw.randint(2, 16384),
            heads=kv_heads * draw.randint(1, 8),
            kv_heads=kv_heads,
            head_dim=draw.choice((16, 64, 80, 128)),
            intermediate=draw.randint(2, 53248),
            vocab=draw.randint(2, 152064),
            tied=draw.random() < 0.5,
        )
        cases.append((shape, draw.randint(1, 5000), draw.choice((0, draw.randint(1, 5000)))))
    for shape, tokens, past in [*cases, (LARGE, 100_003, 7)]:
        got = impl.forward_flops(shape, tokens, past)
        case = f"tokens={tokens}, past={past}, {shape}"
        equal(got, expected(shape, tokens, past), "All operations", case)
