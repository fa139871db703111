"""The public checks of e10.1: streams of scores, in pieces, against one softmax over all."""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minillm_exercises.checking import check, close, describe, expect, seeds, tensor
from minillm_exercises.counting import banned_calls

DIM = 3
MASKED = -math.inf
READY_MADE = ("softmax", "log_softmax", "logsumexp", "logaddexp", "scaled_dot_product_attention")


class Fed:
    """An object under test, and everything that it was fed."""

    def __init__(self, impl: Any, seed: int = 0, dim: int = DIM) -> None:
        self.seed, self.dim = seed, dim
        with banned_calls(*READY_MADE):
            self.online = impl.OnlineSoftmax(dim)
        self.scores = torch.zeros(0).double()
        self.values = torch.zeros(0, dim).double()
        self.story = ""

    def update(self, *numbers: float) -> None:
        """Feed some scores, with random values."""
        self.seed += 1
        self.feed(list(numbers), tensor(self.seed, len(numbers), self.dim).double())

    def feed(self, numbers: Sequence[float], values: Tensor) -> None:
        """Feed some scores with these values."""
        scores = torch.tensor(numbers).double()
        given = (scores.clone(), values.clone())
        self.tell(f"update([{', '.join(f'{number:.6g}' for number in numbers)}])")
        with banned_calls(*READY_MADE):
            self.online.update(*given)
        same = torch.equal(given[0], scores) and torch.equal(given[1], values)
        expect(
            same,
            f"{self.story}: update has changed the scores or the values it was given. Make new "
            f"tensors where you compute with them (no *=, no function whose name ends in _).",
        )
        self.scores = torch.cat((self.scores, scores))
        self.values = torch.cat((self.values, values))

    def merge(self, other: "Fed") -> None:
        """Take over what another was fed."""
        self.tell(f"merge(one with {other.story or 'nothing'})")
        with banned_calls(*READY_MADE):
            self.online.merge(other.online)
        self.scores = torch.cat((self.scores, other.scores))
        self.values = torch.cat((self.values, other.values))

    def tell(self, event: str) -> None:
        """Add to the story, of which only the end stays if it is long."""
        self.story = f"{self.story}{', ' * bool(self.story)}{event}"
        if len(self.story) > 160:
            self.story = "... " + self.story[-150:]

    def seen(self, what: str) -> None:
        """The result is right now."""
        with banned_calls(*READY_MADE):
            got = self.online.result()
        about = f"{what}: result() after {self.story or 'nothing'}"
        real = self.scores > MASKED
        want = torch.zeros(self.dim).double()
        if real.any():
            want = self.scores[real].softmax(0) @ self.values[real]
        agree(got, want, about, bool(real.any()))

    def summed(self, what: str) -> None:
        """The log-sum-exp is right now."""
        with banned_calls(*READY_MADE):
            got = self.online.log_sum_exp()
        about = f"{what}: log_sum_exp() after {self.story or 'nothing'}"
        want = float(self.scores.logsumexp(0)) if len(self.scores) else MASKED
        if type(got) is float or (type(got) is Tensor and got.ndim == 0):
            got = float(got)
            nan = math.isnan(got)
            expect(not nan, f"{about}: it is NaN.{MINUS if want == MASKED else ''}", nan)
        close(got, want, about, rtol=1e-9, atol=1e-9)


MINUS = (
    " Minus infinity minus minus infinity is NaN, and 0 / 0 is, too: without any real score so "
    "far, which of the two do you compute?"
)


def agree(got: Any, want: Tensor, about: str, anything: bool) -> None:
    """`got` is a float64 tensor equal to `want`; NaN and other types get a sentence."""
    if type(got) is Tensor and got.dtype == torch.float64:
        nan = bool(got.isnan().any())
        why = (
            MINUS
            if not anything
            else " Infinity minus infinity is NaN, and infinity / infinity and 0 / 0 are. Was exp "
            "taken of a large number, or is what came while all was masked still in the sums?"
        )
        expect(not nan, f"{about}: there is NaN in it.{why}", nan)
    elif type(got) is Tensor:
        expect(
            False,
            f"{about}: it is {got.dtype}, and all tensors here are torch.float64. One that you "
            f"make yourself is torch.float32 unless you say dtype=torch.float64.",
            str(got.dtype),
        )
    close(got, want, about, rtol=1e-9, atol=1e-9)
    expect(type(got) is Tensor, f"{about}: got {describe(got)}; return a plain Tensor [dim].")


@check(1, "The worked example of the README")
def test_by_hand(impl: Any) -> None:
    """Two positions, the second twice as likely as the first."""
    fed = Fed(impl, dim=1)
    for score, value, want in ((0.0, 6.0, 6.0), (math.log(2), 3.0, 4.0)):
        fed.feed([score], torch.tensor([[value]]).double())
        with banned_calls(*READY_MADE):
            got = fed.online.result()
        about = f"The worked example: result() after {fed.story}"
        agree(got, torch.tensor([want]).double(), about, True)


@check(2, "One position at a time")
def test_one_by_one(impl: Any) -> None:
    """Scores that rise, then scores that fall."""
    for name, scores in (("rise", (-2.0, -1.0, 0.5, 3.0)), ("fall", (3.0, 1.5, 1.0, -2.0))):
        fed = Fed(impl, 10)
        for score in scores:
            fed.update(score)
            fed.seen(f"Scores that {name}, one at a time")


@check(2, "Chunks of every size")
def test_chunks(impl: Any) -> None:
    """The largest score comes in the first, in the last, and in a middle chunk."""
    for name, scores in (
        ("first", [[4.0, 1.0, 0.0], [2.0], [1.0, 2.0], [3.0, -1.0]]),
        ("last", [[0.0], [1.0, 0.5, -3.0], [2.0, 1.0], [1.0, 5.0, 2.0]]),
        ("middle", [[-1.0, 0.0], [6.0, 2.0], [0.0, 3.0, 4.0], [1.0]]),
    ):
        fed = Fed(impl, 20)
        for chunk in scores:
            fed.update(*chunk)
            fed.seen(f"The largest score is in the {name} chunk")


@check(1, "One chunk, all scores below zero")
def test_below_zero(impl: Any) -> None:
    """Everything at once, as a plain softmax would have it."""
    fed = Fed(impl, 25)
    fed.update(-30.0, -31.0, -28.5, -29.0)
    fed.seen("All at once")


@check(2, "Scores of 10000 and of -10000")
def test_large(impl: Any) -> None:
    """Far up, far down, and from the one to the other."""
    for name, scores in (
        ("far up", [[10000.0, 10001.0], [9999.0, 10002.0]]),
        ("far down", [[-10000.0, -10001.0], [-9999.0, -10002.0]]),
        ("from far down to far up", [[-10000.0, -9999.0], [10000.0, 9999.5]]),
        ("from far up to far down", [[10000.0, 10000.5], [-10000.0, -9999.0]]),
    ):
        fed = Fed(impl, 30)
        for chunk in scores:
            fed.update(*chunk)
            fed.seen(f"Scores {name}")


@check(2, "Masked positions before, between and after real ones")
def test_masked(impl: Any) -> None:
    """Whole chunks, and parts of one."""
    for name, scores in (
        ("after", [[1.0, 2.0], [MASKED, MASKED]]),
        ("between", [[1.0, MASKED, 2.0], [MASKED], [0.5, MASKED]]),
        ("before", [[MASKED, MASKED], [1.0, 2.0], [0.0]]),
        ("in front of a low score", [[MASKED], [MASKED, MASKED], [-10000.0, MASKED]]),
    ):
        fed = Fed(impl, 40)
        for chunk in scores:
            fed.update(*chunk)
        fed.seen(f"Masked positions {name}")


@check(2, "Nothing but masked positions")
def test_nothing_real(impl: Any) -> None:
    """Zeros, also when it is asked before real scores come."""
    fed = Fed(impl, 50)
    for chunk in ([MASKED], [MASKED, MASKED], [1.0, MASKED, 0.0], [MASKED]):
        fed.update(*chunk)
        fed.seen("Masked positions first")
    fed = Fed(impl, 55)
    fed.update(MASKED, MASKED)
    fed.summed("Masked positions only")


@check(1, "No positions, and empty chunks")
def test_empty(impl: Any) -> None:
    """An empty chunk changes nothing, wherever it comes."""
    fed = Fed(impl, 60)
    fed.seen("Nothing was fed")
    fed.summed("Nothing was fed")
    for chunk in ([], [1.0, 3.0], [], [2.0]):
        fed.update(*chunk)
        fed.seen("With empty chunks")


@check(2, "The log-sum-exp")
def test_log_sum_exp(impl: Any) -> None:
    """Small scores, and far ones."""
    for scores in ([[0.0], [0.0, 0.0]], [[1.0, 2.0], [-1.0], [3.0]], [[-10000.0], [-9999.0]]):
        fed = Fed(impl, 70)
        for chunk in scores:
            fed.update(*chunk)
            fed.summed("Chunk after chunk")


@check(2, "Two parts merged")
def test_merge(impl: Any) -> None:
    """The larger scores on the one side, on the other, and on both alike."""
    for low, high in (((-1.0, 0.0), (3.0, 2.5)), ((5.0, 1.0), (0.0, -2.0)), ((1.0, 2.0), (2.0,))):
        one, other = Fed(impl, 80), Fed(impl, 85)
        one.update(*low)
        other.update(*high)
        one.merge(other)
        one.seen("Two parts merged")
        one.summed("Two parts merged")


@check(2, "Merged with a part without unmasked positions")
def test_merge_empty(impl: Any) -> None:
    """Nothing fed, or only masked positions, on either side and on both."""
    parts: tuple[list[list[float]], ...] = ([], [[MASKED, MASKED]], [[1.0, -2.0], [MASKED]])
    for mine in parts:
        for theirs in parts:
            one, other = Fed(impl, 90), Fed(impl, 95)
            for fed, chunks in ((one, mine), (other, theirs)):
                for chunk in chunks:
                    fed.update(*chunk)
            one.merge(other)
            one.seen("Merged with a part without unmasked positions")


@check(2, "Both objects after a merge")
def test_merge_apart(impl: Any) -> None:
    """The other one is as it was, and each goes on by itself."""
    one, other = Fed(impl, 100), Fed(impl, 105)
    other.update(2.0, 1.0)
    one.merge(other)
    one.seen("A new one that took over another")
    for fed, what in ((one, "The one that took over"), (other, "The one that was taken over")):
        fed.update(1.5, 4.0)
        fed.seen(f"{what}, fed again")
    other.seen("The one that was taken over, after the first was fed")
    one.merge(other)
    other.seen("The one that was taken over a second time")
    one.seen("The same one taken over twice")


@check(2, "The object does not grow")
def test_state(impl: Any) -> None:
    """What the object holds after 300 positions is what it holds after 6."""
    fed = Fed(impl, 110)
    sizes = []
    for round_ in range(50):
        fed.update(*(math.sin(40.0 * round_ + place) for place in range(6)))
        if round_ in (0, 49):
            fed.seen(f"After {6 * (round_ + 1)} positions")
            sizes.append(held(fed.online) + held(beside(impl)))
    few, many = sizes
    expect(
        many <= few,
        f"Your object and what stands beside it hold {few} numbers after 6 positions and {many} "
        f"after 300. Keep the maximum and the two sums, and let go of scores and values.",
        "grows" if many > few else "stays",
    )


def beside(impl: Any) -> dict[str, Any]:
    """What the submission keeps outside of its objects."""
    kinds = (Tensor, Mapping, list, set)
    return {n: v for n, v in vars(impl).items() if isinstance(v, kinds) and n[:2] != "__"}


def held(thing: Any, depth: int = 0) -> int:
    """How many numbers an object holds, in tensors, lists and objects of its own."""
    if isinstance(thing, Tensor):
        return thing.untyped_storage().nbytes() // thing.element_size()
    if depth > 6 or isinstance(thing, str | bytes):
        return 1
    if isinstance(thing, Mapping):
        return sum(held(part, depth + 1) for part in thing.values())
    if isinstance(thing, Sequence | set | frozenset) or type(thing).__name__ == "deque":
        return sum(held(part, depth + 1) for part in thing)
    slots = [name for name in getattr(type(thing), "__slots__", ()) if hasattr(thing, name)]
    inside = {**getattr(thing, "__dict__", {}), **{name: getattr(thing, name) for name in slots}}
    return held(inside, depth + 1) if inside else 1


@check(3, "Twelve random streams")
def test_everything(impl: Any) -> None:
    """Several parts, fed in chunks, merged in some order."""
    for seed in seeds(12):
        draw = random.Random(seed)
        parts = [Fed(impl, seed + 100 * part) for part in range(draw.randint(1, 3))]
        for part in parts:
            for _ in range(draw.randint(0, 4)):
                part.update(*(number(draw) for _ in range(draw.randint(0, 4))))
        draw.shuffle(parts)
        for part in parts[1:]:
            parts[0].merge(part)
        parts[0].seen("A random stream")
        parts[0].summed("A random stream")


def number(draw: random.Random) -> float:
    """A score: ordinary, masked, or far away."""
    kind = draw.random()
    if kind < 0.2:
        return MASKED
    return draw.gauss(0, 3) if kind < 0.9 else draw.choice((-1e4, 1e4)) + draw.random()
