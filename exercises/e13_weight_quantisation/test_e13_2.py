"""The public checks of e13.2: the table, the nearest levels, compressed scales, and bits."""

import random
from itertools import pairwise
from typing import Any

from minillm_exercises.checking import accept, check, close, equal, expect, number, seeds

# The table of NF4 as bitsandbytes publishes it.
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
]  # fmt: skip
NEAR = 1e-6  # a random weight that is nearer than this to the middle of two levels is left out


def listed(got: Any, name: str, count: int, case: str = "") -> list[Any]:
    """A list of so many numbers, or a sentence."""
    got = accept(got, f"{name} returns numbers", case)
    expect(isinstance(got, list | tuple), f"{name} are a list; they are {got!r}. ({case})")
    equal(len(got), count, f"The number of {name}", case)
    for each in got:
        number(each, f"One of the {name}", case)
    return list(got)


def parts(got: Any, count: int, name: str) -> Any:
    """Several things at once, or a sentence."""
    good = isinstance(accept(got, f"{name} returns {count} things"), tuple | list)
    expect(good and len(got) == count, f"{name} returns {count} things; it returned {got}.")
    return got


def shown(values: list[float]) -> str:
    return f"[{', '.join(f'{each:g}' for each in values[:6])}{', ...' if len(values) > 6 else ''}]"


def nearest(value: float) -> int:
    """The number of the nearest level."""
    return min(range(16), key=lambda code: abs(NF4[code] - value))


def same_codes(impl: Any, weights: list[float], size: int, what: str) -> None:
    """Codes and scales of blocks; the weights are as they were."""
    given, case = list(weights), f"weights {shown(weights)}, size {size}"
    codes, scales = parts(impl.quantize(given, size), 2, "quantize")
    equal(given, weights, "quantize may not change the weights", case)
    blocks = [weights[at : at + size] for at in range(0, len(weights), size)]
    scales = listed(scales, "scales", len(blocks), case)
    close(scales, [max(map(abs, block)) for block in blocks], "The scales of the blocks", case)
    want = []
    for block in blocks:
        scale = max(map(abs, block))
        want += [nearest(weight / scale) if scale else 7 for weight in block]
    equal(listed(codes, "codes", len(weights), case), want, what, case)


def same_scales(impl: Any, scales: list[float], size: int, what: str) -> None:
    """Mean, steps, and codes within half a step."""
    given, case = list(scales), f"scales {shown(scales)}, size {size}"
    codes, steps, mean = parts(impl.compress(given, size), 3, "compress")
    equal(given, scales, "compress may not change the scales", case)
    middle = sum(scales) / len(scales)
    close(number(mean, "The mean", case), middle, "The mean of the scales", case)
    apart = [scale - middle for scale in scales]
    blocks = [apart[at : at + size] for at in range(0, len(apart), size)]
    steps = listed(steps, "steps", len(blocks), case)
    want = [max(map(abs, block)) / 127 for block in blocks]
    close(steps, want, "The steps of the blocks", case, atol=1e-12)
    codes = listed(codes, "codes", len(scales), case)
    for place, (each, code) in enumerate(zip(apart, codes, strict=True)):
        whole = isinstance(code, int) and -127 <= code <= 127
        expect(whole, f"A code is a whole number from -127 to 127; one is {code}. ({case})", code)
        step = want[place // size]
        error = abs(step * code - each)
        expect(
            error <= 0.5 * step * (1 + 1e-9) + 1e-12,
            f"{what}: scale {scales[place]:g} has the code {code}, whose error {error:.3g} is more "
            f"than half a step ({0.5 * step:.3g}). ({case})",
            code,
        )


@check(1, "The README's example")
def test_by_hand(impl: Any) -> None:
    """Four weights, three scales."""
    same_codes(impl, [0.5, -0.2, 0.1, 0.0], 4, "The codes of the example")
    got = listed(impl.dequantize([15, 3, 9, 7], [0.5], 4), "weights", 4)
    close(got, [0.5, -0.19746, 0.08047, 0.0], "The restored example", atol=1e-4)
    same_scales(impl, [1.0, 2.5, 5.5], 2, "The compressed scales of the example")
    close(impl.bits_per_weight(64), 4.5, "The bits of a weight in blocks of 64")


@check(2, "The 16 levels")
def test_levels(impl: Any) -> None:
    """The published table."""
    close(listed(impl.levels(), "levels", 16), NF4, "The levels of NF4", rtol=0, atol=1e-5)


@check(2, "The nearest level of each weight")
def test_nearest(impl: Any) -> None:
    """Every level and its surroundings, with scales of several sizes."""
    dice = random.Random(1)
    for scale in (1.0, 0.25, 8.0):
        weights = [scale * level for level in NF4]
        for low, high in pairwise(NF4):
            weights += [scale * (low + share * (high - low)) for share in (0.3, 0.45, 0.55, 0.7)]
        dice.shuffle(weights)
        same_codes(impl, weights, len(weights), "The codes of a block")


@check(1, "Blocks with large negative weights, zeros, and a short last block")
def test_blocks(impl: Any) -> None:
    """The scale of a block is its own."""
    same_codes(impl, [-4.0, 1.0, 2.0, 0.5], 4, "The codes beside a large negative weight")
    same_codes(impl, [1.0, 0.2, -0.3, 30.0, 5.0, 20.0], 3, "The codes of two different blocks")
    same_codes(impl, [0.0] * 4, 4, "The codes of a block of zeros")
    same_codes(impl, [1.0, -0.5, 0.0, 0.0, 0.25], 2, "The codes with a short last block")


@check(1, "The restored weights")
def test_dequantize(impl: Any) -> None:
    """Any codes and scales."""
    dice = random.Random(2)
    for size, count in ((4, 12), (5, 12), (64, 64)):
        codes = [dice.randrange(16) for _ in range(count)]
        scales = [dice.uniform(0.1, 3) for _ in range(-(-count // size))]
        want = [NF4[code] * scales[place // size] for place, code in enumerate(codes)]
        got = impl.dequantize(list(codes), list(scales), size)
        case = f"codes {codes[:6]}, size {size}"
        close(listed(got, "weights", count, case), want, "The restored weights", case, atol=1e-4)


@check(2, "Scales in 8 bits")
def test_compress(impl: Any) -> None:
    """Close to each other, far apart, equal, and a short last block."""
    dice = random.Random(3)
    for size, count, spread in ((4, 8, 0.1), (4, 10, 1.0), (256, 100, 0.3)):
        scales = [2 + spread * dice.uniform(-1, 1) for _ in range(count)]
        same_scales(impl, scales, size, "The compressed scales")
    same_scales(impl, [0.5] * 6, 4, "The compressed scales, all equal")
    same_scales(impl, [1.0, 3.0, 2.0, 2.0], 2, "A block of scales that all are the mean")


@check(1, "The restored scales")
def test_restore(impl: Any) -> None:
    """Any codes, steps and mean."""
    dice = random.Random(4)
    for size, count in ((4, 8), (4, 10), (3, 3)):
        codes = [dice.randint(-127, 127) for _ in range(count)]
        steps = [dice.uniform(0.001, 0.1) for _ in range(-(-count // size))]
        mean = dice.uniform(0.5, 2)
        want = [mean + steps[place // size] * code for place, code in enumerate(codes)]
        got = impl.restore(list(codes), list(steps), mean, size)
        case = f"codes {codes[:6]}, size {size}, mean {mean:.3f}"
        close(listed(got, "scales", count, case), want, "The restored scales", case)


@check(1, "The bits of a weight")
def test_bits(impl: Any) -> None:
    """With and without double quantisation."""
    for size, outer in ((64, None), (32, None), (64, 256), (32, 64), (128, 16)):
        want = 4 + (32 / size if outer is None else 8 / size + 32 / (size * outer))
        got = impl.bits_per_weight(size) if outer is None else impl.bits_per_weight(size, outer)
        case = f"blocks of {size}" + (f", scales in blocks of {outer}" if outer else "")
        close(got, want, "The bits of a weight", case, rtol=0, atol=1e-9)


@check(1, "Twenty random lists")
def test_random(impl: Any) -> None:
    """Normal weights; their scales, compressed and restored."""
    for seed in seeds(20):
        dice = random.Random(seed)
        size, count = dice.choice((2, 8, 16)), dice.randint(17, 80)
        weights = [dice.gauss(0, 1) for _ in range(count)]
        for at in range(0, count, size):
            scale = max(map(abs, weights[at : at + size]))
            for place, weight in enumerate(weights[at : at + size], at):
                first, second = sorted(abs(level - weight / scale) for level in NF4)[:2]
                if second - first < NEAR:
                    weights[place] = 0.0
        same_codes(impl, weights, size, "The codes of a random list")
        same_scales(impl, [abs(each) + 0.1 for each in weights], size, "Random scales")
