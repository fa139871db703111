"""The public checks of e05.2: one limit at a time, each at its edge, then all of them."""

import bisect
import random
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from minillm_exercises.checking import check, equal, seeds

MICRO = 10**6
BIG = 10**18


@dataclass(frozen=True)
class Costs:
    """A model and a machine."""

    weight_bytes: int
    token_bytes: int
    context: int
    flops: int
    memory: int
    bandwidth: int
    peak: int
    overhead: int


HAND = Costs(600, 2, 10, 60, 1000, MICRO, MICRO, 100)
# One of its limits at a time is made to bind; 7 bytes per token, 11 tokens, no factor is another.
WIDE = Costs(5000, 7, 11, 13, BIG, BIG, BIG, 0)


def microseconds(costs: Costs, batch: int) -> Fraction:
    """How long a step takes."""
    num_bytes = costs.weight_bytes + batch * costs.context * costs.token_bytes
    reading = Fraction(num_bytes * MICRO, costs.bandwidth)
    return costs.overhead + max(reading, Fraction(batch * costs.flops * MICRO, costs.peak))


def largest(costs: Costs, target: int) -> int:
    """The largest batch, by halving."""
    cache = costs.context * costs.token_bytes

    def too_many(batch: int) -> bool:
        full = costs.weight_bytes + batch * cache > costs.memory
        return full or microseconds(costs, batch) > target

    most = costs.memory // cache + 1
    return bisect.bisect_left(range(1, most + 1), True, key=too_many)


def compute_bound(costs: Costs) -> int | None:
    """The first batch whose operations take longer, by doubling and halving."""
    cache = costs.context * costs.token_bytes

    def is_longer(batch: int) -> bool:
        num_bytes = costs.weight_bytes + batch * cache
        operations = Fraction(batch * costs.flops, costs.peak)
        return operations > Fraction(num_bytes, costs.bandwidth)

    most = 1
    while not is_longer(most):
        most *= 2
        if most > 2**300:
            return None
    return bisect.bisect_left(range(1, most + 1), True, key=is_longer) + 1


def batch_is(impl: Any, want: int, what: str, costs: Costs, target: int) -> None:
    """`largest_batch` must be `want`."""
    equal(impl.largest_batch(costs, target), want, what, f"target={target}, {costs}")


def rate_is(impl: Any, want: int, what: str, costs: Costs, batch: int) -> None:
    """`throughput` must be `want`."""
    equal(impl.throughput(costs, batch), want, what, f"batch={batch}, {costs}")


def knee_is(impl: Any, want: int | None, what: str, costs: Costs) -> None:
    """`compute_bound_from` must be `want`."""
    equal(impl.compute_bound_from(costs), want, what, str(costs))


@check(1, "The worked example of the README: the largest batch")
def test_by_hand(impl: Any) -> None:
    """Four targets."""
    for target, want in ((1000, 15), (999, 14), (5000, 20), (719, 0), (720, 1)):
        batch_is(impl, want, "The largest batch of the worked example", HAND, target)


@check(1, "The worked example of the README: throughput and knee")
def test_rates_by_hand(impl: Any) -> None:
    """The rows of the table."""
    for batch, want in ((16, 15094), (20, 15384), (15, 15000), (1, 1388)):
        rate_is(impl, want, "Tokens per second of the worked example", HAND, batch)
    knee_is(impl, 16, "The first batch whose operations take longer", HAND)


@check(2, "The limit of memory, with a large target")
def test_memory(impl: Any) -> None:
    """Full to the last byte, one byte short, room for the weights alone, and less than that."""
    what = "5000 bytes of weights, 77 per sequence and {} bytes of memory"
    cases = ((5000 + 77 * 9, 9), (5000 + 77 * 9 - 1, 8), (5076, 0), (5000, 0), (100, 0))
    for memory, want in cases:
        batch_is(impl, want, what.format(memory), replace(WIDE, memory=memory), 10**6)


@check(2, "The limit of the bytes of a step")
def test_reading(impl: Any) -> None:
    """A target that is met exactly, one that is missed by a microsecond, one for the weights."""
    costs = replace(WIDE, bandwidth=MICRO)
    what = "5000 bytes of weights, 77 per sequence, a byte per microsecond and {} microseconds"
    for target, want in ((5000 + 77 * 4, 4), (5000 + 77 * 4 - 1, 3), (5076, 0), (5000, 0), (9, 0)):
        batch_is(impl, want, what.format(target), costs, target)
    slow = replace(costs, bandwidth=1_500_000)  # 100 microseconds are 150 bytes
    batch_is(impl, 1, "The same at 1.5 bytes per microsecond", slow, 3400)


@check(1, "The limit of the operations of a step")
def test_computing(impl: Any) -> None:
    """The same for operations, of which none are shared."""
    costs = replace(WIDE, peak=MICRO)
    what = "13 operations per sequence, one per microsecond, and {} microseconds"
    for target, want in ((13 * 6, 6), (13 * 6 - 1, 5), (13, 1), (12, 0)):
        batch_is(impl, want, what.format(target), costs, target)


@check(1, "The overhead is added to every step")
def test_overhead(impl: Any) -> None:
    """It is taken from the target, also when it is all of it, or more."""
    costs = replace(WIDE, peak=MICRO, overhead=50)
    what = "13 operations per sequence, one per microsecond, 50 microseconds of overhead"
    for target, want in ((50 + 13 * 3, 3), (50 + 13 * 3 - 1, 2), (50, 0), (20, 0)):
        batch_is(impl, want, what, costs, target)


@check(2, "The slower of bytes and operations decides")
def test_slower(impl: Any) -> None:
    """Near the knee both take about as long: neither their sum nor the faster one is the step."""
    costs = replace(WIDE, bandwidth=MICRO, peak=MICRO, flops=327)  # equal at a batch of 20
    for target, want in ((6540, 20), (6539, 19), (6700, 20), (6867, 21), (5300, 3)):
        what = "5000 + 77 b bytes and 327 b operations, one of each per microsecond"
        batch_is(impl, want, what, costs, target)
    for batch in (1, 19, 20, 21, 60):
        want = int(batch / (microseconds(costs, batch) / MICRO))
        rate_is(impl, want, "Tokens per second near the knee", costs, batch)


@check(2, "Tokens per second, of all sequences together")
def test_throughput(impl: Any) -> None:
    """Bound by bytes, by operations, by overhead; memory and a target have no say."""
    reads = Costs(10**6, 10, 100, 1, 10**6, 10**9, BIG, 0)  # 1000 us and 1 more per sequence
    rate_is(impl, 999, "1000 microseconds for the weights, 1 per sequence", reads, 1)
    rate_is(impl, 500_000, "1000 microseconds for the weights, 1 per sequence", reads, 1000)
    computes = Costs(1000, 1, 1, 10**6, 10**6, BIG, 10**9, 0)  # 1000 us per sequence
    for batch in (1, 7, 4096):
        rate_is(impl, 1000, "1000 microseconds of operations per sequence", computes, batch)
    waits = Costs(1, 1, 1, 1, 10**6, BIG, BIG, 7000)
    rate_is(impl, 999, "7000 microseconds of overhead, and almost nothing else", waits, 7)


@check(2, "The batch from which the operations take longer")
def test_knee(impl: Any) -> None:
    """A tie, no tie, at once, far away, and never; overhead and memory have no say."""
    what = "The first batch whose operations take longer"
    knee_is(
        impl, 21, f"{what} (equal at 20, to the last digit)", Costs(5000, 7, 11, 327, 9, 10, 10, 0)
    )
    knee_is(impl, 20, f"{what} (longer by 1 at 20)", Costs(4999, 7, 11, 327, 9, 10, 10, 80))
    knee_is(impl, 1, f"{what} (at once)", Costs(50, 7, 11, 327, 9, 10, 10, 0))
    knee_is(impl, 1251, f"{what} (ten operations per byte)", Costs(5000, 1, 1, 50, 9, 2, 20, 30))
    knee_is(impl, 5001, f"{what} (they gain 1)", Costs(5000, 7, 11, 78, 9, 1, 1, 0))
    what = "No batch is bound by operations: a sequence's cache takes as long as they do, or longer"
    knee_is(impl, None, what, Costs(5000, 7, 11, 77, 10**9, 10, 10, 0))
    knee_is(impl, None, what, Costs(5000, 7, 11, 76, 10**9, 10, 10, 0))
    knee_is(impl, None, what, Costs(1, 10**5, 10**5, 10**6, 10**9, 10, 10, 0))


@check(1, "Numbers that a float cannot hold")
def test_exact(impl: Any) -> None:
    """Bytes above 2**53, and batches too large to be tried one by one."""
    huge = Costs(10**17 + 1, 3, 10**6, 1, 4 * 10**17, BIG, BIG, 0)
    batch_is(impl, 10**11 - 1, "One byte too little for 10**11 sequences", huge, 10**9)
    exact = replace(huge, memory=huge.memory + 1)
    batch_is(impl, 10**11, "Room for 10**11 sequences to the last byte", exact, 10**9)
    slow = Costs(10**17 + 1, 3, 10**6, 1, BIG, MICRO, BIG, 0)
    what = "One microsecond too little for ten times 3 * 10**6 bytes behind 10**17 + 1 of weights"
    batch_is(impl, 9, what, slow, 10**17 + 30 * 10**6)
    busy = Costs(1, 1, 1, 10**17 + 1, BIG, BIG, MICRO, 0)
    what = "One microsecond too little for three times 10**17 + 1 operations"
    batch_is(impl, 2, what, busy, 3 * 10**17 + 2)
    far = Costs(10**17, 1, 10**8, 10**8 + 1, BIG, 10**9, 10**9, 0)
    knee_is(impl, 10**17 + 1, "The operations gain one on 10**17 per sequence", far)
    rate = Costs(10**17 - 1, 1, 1, 1, BIG, 10**17, BIG, 0)  # a second for a batch of 1
    rate_is(impl, 1, "10**17 bytes at 10**17 per second", rate, 1)
    rate_is(impl, 1, "10**17 + 1 bytes at 10**17 per second", rate, 2)


@check(2, "Twenty machines")
def test_machines(impl: Any) -> None:
    """Random models on random machines, with targets that allow some, many or none."""
    for seed in seeds(20):
        draw = random.Random(seed)
        weights = draw.randint(10**8, 10**11)
        costs = Costs(
            weight_bytes=weights,
            token_bytes=draw.choice((9, 320, 1000)) * 64,
            context=draw.randint(1, 8000),
            flops=2 * weights * draw.randint(1, 3),
            memory=draw.randint(1, 10**12),
            bandwidth=draw.randint(10**9, 10**12),
            peak=draw.randint(10**11, 10**15),
            overhead=draw.choice((0, 300, 20_000)),
        )
        target = int(microseconds(costs, draw.randint(1, 300))) + draw.randint(0, 1)
        batch_is(impl, largest(costs, target), "The largest batch", costs, target)
        batch = draw.randint(1, 1000)
        want = int(batch / (microseconds(costs, batch) / MICRO))
        rate_is(impl, want, "Tokens per second", costs, batch)
        knee_is(impl, compute_bound(costs), "The first batch bound by operations", costs)
