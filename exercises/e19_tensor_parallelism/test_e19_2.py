"""The public checks of e19.2: shares, pairs, then tokens that must be those of one rank."""

import math
import random
from collections.abc import Callable
from typing import Any

from minillm_exercises.checking import accept, check, equal, expect, seeds
from minillm_exercises.ranks import Together, together

LOGITS = [1.0, 3.0, 2.0, 3.0, -1.0]  # the README's
LUCK = [0.5, -1.5, 1.0, -0.25, 4.0]
PADDING = 0.0  # what a product with rows of zeros gives


class Noise:
    """The noise of each token, and whose noise was asked for."""

    def __init__(self, values: list[float]):
        self.values, self.asked = values, list[int]()

    def __call__(self, token: int) -> float:
        equal(token in range(len(self.values)), True, f"noise({token!r}) is of a token")
        self.asked.append(token)
        return self.values[token]


def gumbel(seed: int, count: int) -> list[float]:
    """Gumbel noise of so many tokens."""
    dice = random.Random(seed)
    return [-math.log(-math.log(dice.uniform(1e-12, 1 - 1e-12))) for _ in range(count)]


def held(vocab_size: int, rank: int, size: int) -> range:
    """Equal shares, rounded up; the last ranks have what is left."""
    each = -(-vocab_size // size)
    return range(vocab_size)[rank * each : (rank + 1) * each]


def on_ranks(
    impl: Any, logits: list[float], luck: list[float], temperature: float, size: int
) -> tuple[Together, list[Noise]]:
    """A token from so many ranks; logits are padded to one length."""
    each = -(-len(logits) // size)
    dice = [Noise(luck) for _ in range(size)]

    def call(rank: int, gather: Callable[[Any], Any]) -> Any:
        tokens = held(len(logits), rank, size)
        own = [logits[token] for token in tokens]
        own += [PADDING] * (each - len(own))
        given, dice[rank] = list(own), Noise(luck)
        got = impl.choose(given, tokens, temperature, dice[rank], gather)
        equal(given, own, "choose may not change the logits", f"rank {rank} of {size}")
        return accept(got, "choose returns a token")

    return together(size, call, list, "gather"), dice


def alone(logits: list[float], luck: list[float], temperature: float) -> int:
    """What one rank with all logits chooses."""
    top = max(logits)
    if temperature == 0:
        return logits.index(top)
    scores = [(x - top) / temperature + g for x, g in zip(logits, luck, strict=True)]
    return scores.index(max(scores))


def same(
    impl: Any, what: str, logits: list[float], luck: list[float], temperature: float, size: int
) -> tuple[Together, list[Noise]]:
    """All ranks return the token of one rank."""
    done, dice = on_ranks(impl, logits, luck, temperature, size)
    want = alone(logits, luck, temperature)
    for rank, got in enumerate(done.results):
        shown = f"{len(logits)} tokens, rank {rank} of {size}, temperature {temperature:g}"
        equal(got, want, what, shown)
    return done, dice


@check(1, "The README's example")
def test_by_hand(impl: Any) -> None:
    """Five tokens on two ranks: drawn, and greedily."""
    same(impl, "The token of the example", LOGITS, LUCK, 1.0, 2)
    same(impl, "The token of the example", LOGITS, LUCK, 0.0, 2)


@check(1, "The tokens of a rank")
def test_share(impl: Any) -> None:
    """Sizes that divide the vocabulary and sizes that do not, down to ranks without a token."""
    for vocab_size, size in ((8, 2), (5, 2), (101, 4), (7, 7), (5, 4), (2, 4), (1, 3)):
        got = [accept(impl.share(vocab_size, rank, size), "share") for rank in range(size)]
        for rank, each in enumerate(got):
            case = f"{vocab_size} tokens, rank {rank} of {size}"
            expect(isinstance(each, range), f"share returns a range ({case}); it returned {each}.")
            equal(list(each), list(held(vocab_size, rank, size)), "The tokens of a rank", case)


@check(2, "The best of a rank, and of all ranks")
def test_best(impl: Any) -> None:
    """Ties, padding, ranks without tokens."""
    equal(impl.best([1.0, 3.0, 2.0], range(0, 3)), (3.0, 1), "The best of tokens 0 to 2")
    equal(impl.best([3.0, -1.0, 0.0], range(3, 5)), (3.0, 3), "The best of tokens 3 and 4")
    equal(impl.best([5.0, 5.0, 4.0], range(6, 9)), (5.0, 6), "Of two equal values the lower token")
    equal(impl.best([-4.0, -2.0, 0.0, 0.0], range(8, 10)), (-2.0, 9), "Two tokens, two of padding")
    equal(impl.best([0.0, 0.0], range(5, 5)), (-math.inf, -1), "A rank that has no token")
    equal(impl.winner([(1.0, 0), (3.0, 4), (2.0, 9)]), (3.0, 4), "The winner of three pairs")
    equal(impl.winner([(3.0, 1), (3.0, 3)]), (3.0, 1), "The winner of two equal values")
    equal(impl.winner([(-9.0, 2), (-math.inf, -1)]), (-9.0, 2), "The winner, a rank without tokens")


@check(2, "Tokens that are drawn")
def test_drawn(impl: Any) -> None:
    """Vocabularies that ranks divide and do not divide, three temperatures."""
    for seed in range(24):
        dice = random.Random(seed)
        vocab_size, size = dice.choice((8, 24, 30, 31)), dice.choice((1, 2, 3, 4))
        logits = [dice.gauss(2, 2) for _ in range(vocab_size)]
        luck = gumbel(seed, vocab_size)
        same(impl, "The token that is drawn", logits, luck, dice.choice((0.5, 1.0, 2.0)), size)


@check(1, "Greedy tokens, and ties")
def test_greedy(impl: Any) -> None:
    """The largest logit wherever it is; of equal ones the lowest token, on every rank."""
    luck = gumbel(1, 12)
    for place in (0, 5, 6, 11):
        logits = [float(token == place) for token in range(12)]
        same(impl, "The greedy token", logits, luck, 0.0, 3)
    ties = [0.0, 2.0, 1.0, 0.0, 2.0, 2.0, 1.0, 2.0]
    same(impl, "The lowest of the best tokens, greedily", ties, luck[:8], 0.0, 4)
    same(impl, "The lowest of the best tokens, noise 0", ties, [0.0] * 8, 1.0, 4)


@check(2, "Padding, and ranks without tokens")
def test_padding(impl: Any) -> None:
    """All logits are negative, and the padding is 0."""
    for vocab_size, size in ((5, 2), (5, 4), (9, 4), (2, 4)):
        for temperature in (0.0, 1.0):
            dice = random.Random(vocab_size)
            logits = [dice.uniform(-9, -3) for _ in range(vocab_size)]
            luck = gumbel(vocab_size, vocab_size)
            what = "The token where all logits are negative"
            same(impl, what, logits, luck, temperature, size)


@check(1, "Large logits")
def test_large(impl: Any) -> None:
    """Beside 1e17 noise is rounded away; beside the best logit it is not."""
    logits, luck = [1e17] * 6, [0.1, -0.4, 0.3, 0.2, 2.5, 0.6]
    same(impl, "Six equal logits of 1e17: the noise decides", logits, luck, 1.0, 2)


@check(2, "The arguments of gather, and the tokens whose noise is drawn")
def test_counts(impl: Any) -> None:
    """One pair per rank, once or twice; the noise of own tokens, each once."""
    logits, luck = [float(token % 7) for token in range(24)], gumbel(3, 24)
    for temperature, gathers in ((0.0, 1), (1.0, 2)):
        done, dice = same(impl, "The token of 24", logits, luck, temperature, 3)
        case = f"temperature {temperature:g}, 3 ranks"
        equal(len(done.meetings), gathers, "Calls of gather for one token", case)
        for parts in done.meetings:
            for rank, part in enumerate(parts):
                equal(numbers(part), 2, "Numbers that a rank brings to gather", f"rank {rank}")
        for rank, each in enumerate(dice):
            want = list(held(24, rank, 3)) if temperature else []
            equal(sorted(each.asked), want, "Tokens whose noise is drawn", f"{case}, rank {rank}")


def numbers(part: Any) -> int:
    """How many numbers there are in what a rank brings."""
    return sum(map(numbers, part)) if isinstance(part, list | tuple) else 1


@check(1, "Forty random rows")
def test_random(impl: Any) -> None:
    """Any size, and logits that are minus infinity now and then."""
    for seed in seeds(40):
        dice = random.Random(seed)
        vocab_size, size = dice.randint(3, 40), dice.randint(1, 5)
        logits = [dice.choice((-math.inf, dice.gauss(0, 3))) for _ in range(vocab_size)]
        logits[dice.randrange(vocab_size)] = dice.gauss(0, 3)
        temperature = dice.choice((0.0, 0.7, 1.0))
        same(impl, "A random row", logits, gumbel(seed, vocab_size), temperature, size)
