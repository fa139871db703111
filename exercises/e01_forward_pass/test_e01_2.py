"""The public checks of e01.2: the parts of a step's bytes one by one, then the search."""

import bisect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minillm_exercises.checking import check, equal, expect, number, seeds

CALLS = 200  # of each function in one search: enough to search twice, not to try them all


@dataclass(frozen=True)
class Shape:
    """A llama-shaped model whose layers, but for every `global_every`-th, see a window."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    window: int
    global_every: int


# Eight layers, the third and the sixth global; no two factors are equal.
SMALL = Shape(8, 96, 12, 3, 20, 224, 1000, window=32, global_every=3)


def expected(shape: Shape, lengths: Sequence[int], value_bytes: int) -> int:
    """The count, layer by layer."""
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    values = shape.hidden * shape.vocab + len(lengths) * shape.hidden
    for layer in range(shape.layers):
        values += shape.hidden * (query + kv + kv) + query * shape.hidden
        values += 3 * shape.hidden * shape.intermediate
        sees_all = (layer + 1) % shape.global_every == 0
        values += sum((n if sees_all else min(n, shape.window)) * 2 * kv for n in lengths)
    return values * value_bytes


def right(impl: Any, what: str, shape: Shape, lengths: list[int], value_bytes: int = 2) -> None:
    """The learner's count must be the expected one."""
    case = f"lengths={lengths}, value_bytes={value_bytes}, {shape}"
    got = impl.step_bytes(shape, lengths, value_bytes)
    equal(got, expected(shape, lengths, value_bytes), what, case)


def longer(impl: Any, what: str, before: list[int], after: list[int]) -> None:
    """How the bytes grow from one batch to another: the weights cancel."""
    case = f"from lengths={before} to {after}, value_bytes=2, {SMALL}"
    got = [number(impl.step_bytes(SMALL, lengths, 2), what, case) for lengths in (after, before)]
    want = expected(SMALL, after, 2) - expected(SMALL, before, 2)
    equal(got[0] - got[1], want, what, case)


@check(1, "The worked example of the README")
def test_by_hand(impl: Any) -> None:
    """Two layers, one sequence of three tokens; then with values twice as wide."""
    shape = Shape(2, 5, 4, 1, 3, 7, 10, window=2, global_every=2)
    equal(impl.step_bytes(shape, [3]), 1190, "The worked example", f"lengths=[3], {shape}")
    what = "The worked example with values of four bytes"
    equal(impl.step_bytes(shape, [3], 4), 2380, what, f"lengths=[3], value_bytes=4, {shape}")


@check(2, "Another sequence adds its own cache, but no weights")
def test_batch(impl: Any) -> None:
    """A second sequence of four tokens, inside the window."""
    longer(impl, "What a second sequence of 4 tokens adds", [9], [9, 4])


@check(2, "Beyond the window only global layers read more")
def test_window(impl: Any) -> None:
    """One longer sequence; then two of different lengths, of which one is beyond."""
    longer(impl, "From 20 tokens to 21, inside the window of 32", [20], [21])
    longer(impl, "From 40 tokens to 50, beyond the window of 32", [40], [50])
    longer(impl, "From 10 tokens to 60, across the window of 32", [60, 10], [60, 60])
    for layers, every in ((3, 3), (2, 3), (1, 6)):
        shape = replace(SMALL, layers=layers, global_every=every)
        right(impl, f"A model with layers={layers}, global_every={every}", shape, [60])


@check(2, "Twenty models and batches, exact")
def test_models(impl: Any) -> None:
    """Random shapes, windows, batches and widths of a value."""
    for seed in seeds(20):
        draw = random.Random(seed)
        kv_heads = draw.randint(1, 16)
        shape = Shape(
            layers=draw.randint(1, 80),
            hidden=draw.randint(2, 8192),
            heads=kv_heads * draw.randint(1, 8),
            kv_heads=kv_heads,
            head_dim=draw.choice((16, 64, 80, 128)),
            intermediate=draw.randint(2, 28672),
            vocab=draw.randint(2, 152064),
            window=draw.choice((16, 128, 1024)),
            global_every=draw.randint(1, 6),
        )
        lengths = [draw.randint(1, 2000) for _ in range(draw.randint(1, 6))]
        right(impl, "All bytes of the step", shape, lengths, draw.choice((1, 2, 4)))


def search(
    impl: Any,
    flops: Callable[[int], int],
    num_bytes: Callable[[int], int],
    peak: int,
    bandwidth: int,
    most: int,
) -> object:
    """What the learner's search finds, with at most CALLS calls of each function."""
    calls = {"flops": 0, "num_bytes": 0}

    def counted(name: str, function: Callable[[int], int]) -> Callable[[int], int]:
        def call(tokens: int) -> int:
            calls[name] += 1
            if calls[name] > CALLS:
                expect(
                    False,
                    f"{name}() was called more than {CALLS} times with most={most}: halve the "
                    f"range in every step instead of trying one number after the other.",
                    "too many calls",
                )
            return function(tokens)

        return call

    return impl.knee(
        counted("flops", flops), counted("num_bytes", num_bytes), peak, bandwidth, most
    )


@check(1, "The knee of a small model, found in a few calls")
def test_knee(impl: Any) -> None:
    """2,000 operations per token at 3,000 per second, 2,001 bytes and 4 per token at 10."""
    what = "flops(t) = 2000 * t at 3000 per second, num_bytes(t) = 2001 + 4 * t at 10 per second"
    for most in (1000, 10**9):
        got = search(impl, lambda t: 2000 * t, lambda t: 2001 + 4 * t, 3000, 10, most)
        equal(got, 751, what, f"most={most}")


@check(1, "The first number, the last one, and none")
def test_ends(impl: Any) -> None:
    """A knee at 1, one at `most`, one above it."""
    what = "flops(t) = 10 * t at 1 per second, num_bytes(t) = {} at 1 per second"
    for size, most, want in ((9, 50, 1), (499, 50, 50), (509, 50, None), (99, 1, None)):
        got = search(impl, lambda t: 10 * t, lambda t, size=size: size, 1, 1, most)
        equal(got, want, what.format(size), f"most={most}")


@check(2, "Equal times are not longer, and times that are almost equal are not equal")
def test_exact(impl: Any) -> None:
    """A tie; then a difference of one operation in 10**17, which two rounded quotients lose."""
    what = "flops(t) = 6 * t at 30 per second, num_bytes(t) = 40 at 2 per second"
    got = search(impl, lambda t: 6 * t, lambda t: 40, 30, 2, 10_000)
    equal(got, 101, what, "at t = 100 both take 20 seconds")
    big = 10**17
    what = "flops(t) = 10**17 * t + 1 at 3 per second, num_bytes(t) = 10**18 at 1 per second"
    got = search(impl, lambda t: big * t + 1, lambda t: 10 * big, 3, 1, 10_000)
    equal(got, 30, what, "at t = 30 the operations take a third of a second longer")


@check(1, "Twenty machines")
def test_machines(impl: Any) -> None:
    """Random peaks and bandwidths, and operations that also grow with the square."""
    for seed in seeds(20):
        draw = random.Random(seed)
        weights, square = draw.randint(10**6, 10**9), draw.randint(0, 1000)
        peak, bandwidth = draw.randint(10**10, 10**13), draw.randint(10**9, 10**11)
        most = draw.choice((10, 10**5, 10**8))

        def flops(t: int, weights: int = weights, square: int = square) -> int:
            return 2 * weights * t + square * t * (t + 1)

        def num_bytes(t: int, weights: int = weights) -> int:
            return 2 * weights + 1000 * t

        def is_longer(t: int, peak: int = peak, bandwidth: int = bandwidth) -> bool:
            return flops(t) * bandwidth > num_bytes(t) * peak

        place = bisect.bisect_left(range(1, most + 1), True, key=is_longer)
        case = (
            f"flops(t) = 2 * {weights} * t + {square} * t * (t + 1), num_bytes(t) = "
            f"2 * {weights} + 1000 * t, peak={peak}, bandwidth={bandwidth}, most={most}"
        )
        got = search(impl, flops, num_bytes, peak, bandwidth, most)
        equal(got, place + 1 if place < most else None, "The knee", case)
