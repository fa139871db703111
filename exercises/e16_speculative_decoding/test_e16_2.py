"""The public checks of e16.2: one token, drafts, then texts that no proposer may change."""

import math
import random
from collections.abc import Callable
from typing import Any

from minillm_exercises.checking import accept, check, close, equal, expect, seeds

SIZE = 6
LUCK = [0.4, 1.5, -0.3]
P, Q = [0.1, 0.6, 0.3], [0.5, 0.3, 0.2]


class Model:
    """A distribution for every text: of the last two tokens, and sharper or flatter by `heat`."""

    def __init__(self, seed: int, heat: float = 1.0, pull: "Model | None" = None):
        self.seed, self.heat, self.pull = seed, heat, pull

    def __call__(self, tokens: list[int]) -> list[float]:
        dice = random.Random(f"{self.seed} {tokens[-2:]}")
        scores = [dice.gauss(0, 1.5) / self.heat for _ in range(SIZE)]
        dist = [math.exp(score) for score in scores]
        dist = [each / sum(dist) for each in dist]
        if self.pull is not None:  # a small model is nearly the large one
            dist = [0.25 * a + 0.75 * b for a, b in zip(dist, self.pull(tokens), strict=True)]
        return dist


class Large:
    """The large model as `generate` sees it: it notes each step, and refuses what is no step."""

    def __init__(self, model: Model):
        self.model, self.steps = model, list[tuple[int, int]]()

    def __call__(self, tokens: list[int], drafts: list[int]) -> list[list[float]]:
        tokens, drafts = list(tokens), list(drafts)
        self.steps.append((len(tokens), len(drafts)))
        return [self.model(tokens + drafts[:each]) for each in range(len(drafts) + 1)]


class Asked:
    """A proposer that notes what it was asked for."""

    def __init__(self, answer: Callable[[list[int], int], list[int]]):
        self.answer, self.calls = answer, list[tuple[int, int]]()

    def __call__(self, tokens: list[int], most: int) -> list[int]:
        self.calls.append((len(tokens), most))
        expect(most > 0, f"propose was asked for {most} drafts: where none fit, do not ask.")
        return self.answer(list(tokens), most)


def luck(seed: int) -> Callable[[int], list[float]]:
    """The Gumbel noise of every position."""

    def noise(position: int) -> list[float]:
        dice = random.Random(f"{seed} {position}")
        return [-math.log(-math.log(dice.uniform(1e-12, 1 - 1e-12))) for _ in range(SIZE)]

    return noise


def best(dist: list[float], noise: list[float]) -> int:
    """The token with the largest noisy logarithm."""
    scores = [math.log(p) + g for p, g in zip(dist, noise, strict=True)]
    return scores.index(max(scores))


def alone(
    model: Model, noise: Callable[[int], list[float]], tokens: list[int], count: int
) -> list[int]:
    """What the model writes without drafts."""
    text = list(tokens)
    for _ in range(count):
        text.append(best(model(text), noise(len(text))))
    return text[len(tokens) :]


def text_of(
    impl: Any, what: str, answer: Callable[[list[int], int], list[int]], count: int = 12,
    k: int = 4, seed: int = 1,
) -> tuple[Large, Asked]:  # fmt: skip
    """The text is that of plain decoding; its steps and what was asked are returned."""
    model, noise, prompt = Model(seed), luck(seed), [seed % SIZE, 2, 3]
    large, asked = Large(model), Asked(answer)
    given = list(prompt)
    got = accept(impl.generate(large, asked, noise, given, count, k), what)
    case = f"tokens={prompt}, count={count}, k={k}"
    equal(given, prompt, "generate may not change the list of tokens", case)
    equal(got, alone(model, noise, prompt, count), what, case)
    return large, asked


def told(seed: int, count: int, right: int = 99) -> Callable[[list[int], int], list[int]]:
    """A proposer that knows the text, and is wrong after `right` drafts."""
    prompt = [seed % SIZE, 2, 3]
    known = prompt + alone(Model(seed), luck(seed), prompt, count + 9)

    def answer(tokens: list[int], most: int) -> list[int]:
        drafts = known[len(tokens) : len(tokens) + most]
        return [d if i < right else (d + 1) % SIZE for i, d in enumerate(drafts)]

    return answer


def rolled(seed: int) -> Callable[[list[int], int], list[int]]:
    """A proposer that rolls dice."""
    dice = random.Random(seed)
    return lambda tokens, most: dice.choices(range(SIZE), k=most)


@check(1, "One token with noise")
def test_pick(impl: Any) -> None:
    """The README's table, ties, tokens that cannot be."""
    case = f"noise={LUCK}"
    equal(impl.pick(list(P), list(LUCK)), 1, "pick from p of the README", case)
    equal(impl.pick(list(Q), list(LUCK)), 1, "pick from q of the README", case)
    equal(impl.pick(list(Q), [0.4, -1.5, -0.3]), 0, "pick from q with other noise")
    equal(impl.pick([0.25, 0.5, 0.25], [0.0, -9.0, 0.0]), 0, "Of two equal tokens the first")
    equal(impl.pick([0.0, 0.5, 0.5], [50.0, -2.0, -3.0]), 1, "A token of probability 0, much luck")
    equal(impl.pick([0.01, 0.99], [2.0, 1.0]), 1, "The noise is added to the logarithm")


@check(2, "Drafts of a small model")
def test_draft(impl: Any) -> None:
    """Each follows those before it, with the noise of its position."""
    small, noise, prompt = Model(7), luck(7), [1, 2, 3]
    for k in (1, 2, 5):
        given = list(prompt)
        got = impl.draft(small, noise, given, k)
        equal(given, prompt, "draft may not change the list of tokens")
        equal(got, alone(small, noise, prompt, k), "The drafts", f"tokens={prompt}, k={k}")
    equal(impl.draft(small, noise, [4, 4], 0), [], "No draft")


@check(1, "A small model that is the large one")
def test_itself(impl: Any) -> None:
    """With the same noise no draft is ever wrong."""
    model, noise = Model(3), luck(3)

    def answer(tokens: list[int], most: int) -> list[int]:
        drafts = accept(impl.draft(model, noise, tokens, most), "draft returns a list of tokens")
        return list(drafts)

    large, _ = text_of(impl, "The text with drafts of the model itself", answer, 15, 4, 3)
    equal(len(large.steps), 3, "Steps for 15 tokens where every draft is right", "k=4")


@check(2, "The same text for every proposer")
def test_texts(impl: Any) -> None:
    """Always right, always wrong, right in part, at random, and a coupled small model."""
    text_of(impl, "The text with a proposer that is always right", told(1, 12))
    text_of(impl, "The text with a proposer that is always wrong", told(1, 12, 0))
    for right in (1, 2, 3):
        what = f"The text with a proposer whose first {right} drafts are right"
        text_of(impl, what, told(1, 12, right))
    for seed in seeds(5):
        text_of(impl, "The text with dice", rolled(seed), seed=seed % 1000)


@check(2, "Steps, and the calls of the proposer")
def test_steps(impl: Any) -> None:
    """k + 1 tokens per step where drafts are right, one where they are wrong; never too many."""
    large, asked = text_of(impl, "A text of 12 tokens", told(1, 12))
    case = "always right, count=12, k=4"
    want = [(3, 4), (8, 4), (13, 1)]
    equal(large.steps, want, "Steps, as (tokens known, drafts)", case)
    equal(asked.calls, want, "Asked, as (tokens known, drafts wanted)", case)
    large, asked = text_of(impl, "A text of 4 tokens", told(1, 4, 0), 4, 2)
    case = "always wrong, count=4, k=2"
    equal(large.steps, [(3, 2), (4, 2), (5, 1), (6, 0)], "Steps, as (tokens known, drafts)", case)
    equal(asked.calls, [(3, 2), (4, 2), (5, 1)], "Asked, as (tokens known, drafts wanted)", case)


@check(1, "A proposer that has fewer drafts, or none")
def test_fewer(impl: Any) -> None:
    """The step has as many rows as there are drafts."""
    right = told(2, 9)
    large, _ = text_of(impl, "The text with one draft of four", lambda t, _: right(t, 1), 9, 4, 2)
    equal(large.steps, [(3, 1), (5, 1), (7, 1), (9, 1), (11, 0)], "Steps with one draft each",
          "count=9, k=4")  # fmt: skip
    large, _ = text_of(impl, "The text without any draft", lambda _, __: [], 5, 4, 2)
    equal(large.steps, [(3 + i, 0) for i in range(5)], "Steps without drafts", "count=5, k=4")
    large, _ = text_of(impl, "The text with k = 0", right, 3, 0, 2)
    equal(len(large.steps), 3, "Steps with k = 0", "count=3")


@check(2, "How often two distributions agree")
def test_agreement(impl: Any) -> None:
    """Known cases, zeros, and the share of 4,000 draws with the same noise."""
    close(impl.agreement([0.5, 0.5], [0.5, 0.5]), 1.0, "The agreement of equal distributions")
    close(
        impl.agreement([1.0, 0.0], [0.0, 1.0]),
        0.0,
        "The agreement of distributions without a common token",
    )
    want = 1 / 10 + 1 / (5 / 3 + 1 + 2 / 3) + 1 / (5 / 2 + 2 + 1)
    close(impl.agreement(list(P), list(Q)), want, "The agreement of the README's distributions")
    close(impl.agreement([0.5, 0.5], [1.0, 0.0]), 0.5, "The agreement of (0.5, 0.5) and (1, 0)")
    close(impl.agreement([0.25, 0.5, 0.25, 0.0], [0.25, 0.0, 0.25, 0.5]), 1 / 6 + 1 / 6,
          "The agreement where each distribution has a token of its own")  # fmt: skip
    large, small = Model(5), Model(6, pull=Model(5))
    p, q = large([1, 2]), small([1, 2])
    noises = [luck(11)(position) for position in range(4000)]
    share = sum(best(p, each) == best(q, each) for each in noises) / len(noises)
    close(impl.agreement(p, q), share, "The share of 4,000 draws in which two models agree",
          rtol=0, atol=0.04)  # fmt: skip
