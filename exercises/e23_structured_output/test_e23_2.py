"""The public checks of e23.2: the matcher alone, one step, then texts that no draft may change."""

import random
from collections.abc import Callable
from typing import Any

from minillm_exercises.checking import accept, check, equal, expect, seeds

SIZE, END = 6, 6  # tokens 0 to 5, and the end
A, B, C, X = 0, 1, 2, 5


class Automaton:
    """Edges {(state, token): state}, accepting states, and a count of steps."""

    end = END

    def __init__(self, edges: dict[tuple[int, int], int], accepting: set[int]):
        self._edges, self._accepting, self.start, self.steps = edges, accepting, 0, 0

    def tokens(self, state: int) -> set[int]:
        self._need(state)
        return {token for at, token in self._edges if at == state}

    def accepts(self, state: int) -> bool:
        self._need(state)
        return state in self._accepting

    def _need(self, state: object) -> None:
        if not isinstance(state, int):  # what is right leaves no trace: it may be asked often
            expect(False, f"the automaton was asked for the state {state!r}.")

    def step(self, state: int, token: int) -> int | None:
        self._need(state)
        if token == END:
            expect(False, "automaton.step was given the end, which it does not know.")
        self.steps += 1
        return self._edges.get((state, token))


def example() -> Automaton:
    """The texts a b end and a c a end."""
    return Automaton({(0, A): 1, (1, B): 2, (1, C): 3, (3, A): 2}, {2})


def rolled(seed: int) -> Automaton:
    """A random automaton in which something may always come next."""
    dice = random.Random(seed)
    size = dice.randint(3, 6)
    edges = {
        (state, token): dice.randrange(size)
        for state in range(size)
        for token in dice.sample(range(SIZE), dice.randint(1, 3))
    }
    return Automaton(edges, {state for state in range(size) if dice.random() < 0.3})


def choice(seed: int, text: list[int], allowed: set[int]) -> int:
    """What the model picks from these tokens after a text."""
    return random.Random(f"{seed} {text}").choice(sorted(allowed))


def alone(automaton: Automaton, seed: int, count: int) -> list[int]:
    """What the model writes without drafts."""
    text: list[int] = []
    state: int | None = automaton.start
    while len(text) < count and END not in text:
        last = {END} if automaton.accepts(state) else set()
        text.append(choice(seed, text, automaton.tokens(state) | last))
        state = automaton._edges.get((state, text[-1]))
    return text


class Model:
    """The model as `generate` sees it: it notes each step, and picks from the sets it is given."""

    def __init__(self, seed: int):
        self.seed, self.calls = seed, list[tuple[int, int]]()

    def __call__(self, text: list[int], drafts: list[int], sets: list[set[int]]) -> list[int]:
        accept([text, drafts, sets], "What model is given")
        text, drafts = list(text), list(drafts)
        expect(
            len(sets) == len(drafts) + 1,
            f"model was given {len(drafts)} drafts and {len(sets)} sets; one more is right.",
        )
        expect(all(sets), f"model was given an empty set, after {text} with the drafts {drafts}.")
        self.calls.append((len(text), len(drafts)))
        return [choice(self.seed, text + drafts[:i], each) for i, each in enumerate(sets)]


class Asked:
    """A proposer that notes what it was asked for."""

    def __init__(self, answer: Callable[[list[int], int], list[int]]):
        self.answer, self.calls = answer, list[tuple[int, int]]()

    def __call__(self, text: list[int], most: int) -> list[int]:
        expect(most > 0, f"propose was asked for {most} drafts: where none fit, do not ask.")
        self.calls.append((len(text), most))
        return self.answer(list(text), most)


def told(automaton: Automaton, seed: int, right: int = 99) -> Callable[[list[int], int], list[int]]:
    """A proposer that knows the text, and is wrong after `right` drafts."""
    known = alone(automaton, seed, 60)

    def answer(text: list[int], most: int) -> list[int]:
        drafts = known[len(text) : len(text) + most]
        return [d if i < right else (d + 1) % SIZE for i, d in enumerate(drafts)]

    return answer


def text_of(
    impl: Any,
    what: str,
    automaton: Automaton,
    seed: int,
    answer: Callable[[list[int], int], list[int]],
    count: int = 12,
    k: int = 4,
) -> tuple[Model, Asked]:
    """The text is that of decoding without drafts; few steps of the automaton are made."""
    want, model, asked = alone(automaton, seed, count), Model(seed), Asked(answer)
    automaton.steps = 0
    matcher = impl.Matcher(automaton)
    got = impl.generate(model, asked, matcher, END, count, k)
    case = f"edges {automaton._edges}, accepting {automaton._accepting}, count={count}, k={k}"
    equal(got, want, what, case)
    most = sum(drafts for _, drafts in asked.calls) + len(model.calls)
    expect(
        automaton.steps <= most,
        f"{what}: {automaton.steps} calls of step; one for each draft "
        f"and one for each step of the model are {most}.",
    )
    return model, asked


@check(1, "Forwards, or not")
def test_accept(impl: Any) -> None:
    """A token that may come, one that may not, and the end."""
    matcher = impl.Matcher(example())
    equal(matcher.accept(B), False, "accept(b) at the start, where only a may come")
    equal(matcher.accept(END), False, "accept(end) at the start")
    equal(matcher.accept(A), True, "accept(a) at the start")
    equal(matcher.accept(A), False, "accept(a) behind a")
    equal(matcher.accept(B), True, "accept(b) behind a")
    equal(matcher.accept(END), True, "accept(end) behind a b")
    equal(matcher.accept(END), False, "accept(end) behind the end")
    equal(matcher.accept(A), False, "accept(a) behind the end")


@check(1, "What is allowed")
def test_allowed(impl: Any) -> None:
    """At the start, after a refusal, at the end, behind it, and where a text may go on or end."""
    matcher = impl.Matcher(example())
    equal(matcher.allowed(), {A}, "allowed at the start")
    matcher.accept(B)
    equal(matcher.allowed(), {A}, "allowed after a token that was not accepted")
    matcher.accept(A)
    equal(matcher.allowed(), {B, C}, "allowed behind a")
    matcher.accept(B)
    equal(matcher.allowed(), {END}, "allowed behind a b")
    matcher.accept(END)
    equal(matcher.allowed(), set(), "allowed behind the end")
    more = impl.Matcher(Automaton({(0, A): 0, (0, B): 1}, {0}))
    equal(more.allowed(), {A, B, END}, "allowed where the text may go on or end")


@check(2, "The way back")
def test_rollback(impl: Any) -> None:
    """Some tokens, none, all, and the end."""
    automaton = example()
    matcher = impl.Matcher(automaton)
    for token in (A, B, END):
        matcher.accept(token)
    automaton.steps = 0
    for count, want in ((0, set()), (1, {END}), (0, {END}), (2, {A})):
        matcher.rollback(count)
        equal(
            matcher.allowed(),
            want,
            f"allowed after rollback({count})",
            "a b end, then rollback of 0, 1, 0 and 2 tokens",
        )
    equal(automaton.steps, 0, "calls of step in rollback")
    equal(matcher.accept(A), True, "accept(a) after everything was taken back")
    equal(matcher.accept(X), False, "accept(x) behind a")
    matcher.rollback(1)
    equal(
        matcher.allowed(),
        {A},
        "allowed after rollback(1)",
        "a is accepted, x is not, then rollback(1): only accepted tokens count",
    )


@check(2, "The sets of a step")
def test_prepare(impl: Any) -> None:
    """The README's drafts; drafts that may not come, the end, and none."""
    cases = (
        ([A, C, X], [{A}, {B, C}, {A}], {A}),
        ([B, A], [{A}], {A}),
        ([A, A, B], [{A}, {B, C}], {B, C}),
        ([A, C, A], [{A}, {B, C}, {A}, {END}], {END}),
        ([A, B, END], [{A}, {B, C}, {END}], {END}),
        ([], [{A}], {A}),
    )
    for drafts, want, behind in cases:
        matcher, given = impl.Matcher(example()), list(drafts)
        got = impl.prepare(matcher, given)
        equal(given, drafts, "prepare may not change the list of drafts")
        equal(got, want, f"prepare with the drafts {drafts}", "texts: a b end, a c a end")
        equal(matcher.allowed(), behind, f"allowed behind the usable ones of {drafts}")


@check(2, "What a step keeps")
def test_commit(impl: Any) -> None:
    """All drafts right, the first or second wrong, none used, the end as a sample."""
    cases = (
        ([A, C, X], [A, B, A], [A, B], {END}),
        ([A, C, X], [A, C, A], [A, C, A], {END}),
        ([A, B, END], [A, B, END], [A, B, END], set()),
        ([A, B], [A, C, END], [A, C], {A}),
        ([B, A], [A], [A], {B, C}),
        ([A, A, B], [A, C], [A, C], {A}),
        ([], [A], [A], {B, C}),
    )
    for drafts, samples, want, behind in cases:
        matcher = impl.Matcher(example())
        sets = accept(impl.prepare(matcher, list(drafts)), "The sets of prepare")
        equal(len(sets), len(samples), f"The number of sets with the drafts {drafts}")
        given = list(samples)
        got = impl.commit(matcher, list(drafts), given)
        equal(given, samples, "commit may not change the list of samples")
        case = f"drafts {drafts}, samples {samples}"
        equal(got, want, "What commit keeps", case)
        equal(matcher.allowed(), behind, "allowed after commit", case)


@check(2, "The same text for every proposer")
def test_texts(impl: Any) -> None:
    """Right, wrong, right in part, random, illegal, and silent ones."""
    for seed in seeds(6):
        automaton, dice = rolled(seed), random.Random(seed)
        proposers = {
            "a proposer that is always right": told(automaton, seed),
            "a proposer that is always wrong": told(automaton, seed, 0),
            "a proposer whose first two drafts are right": told(automaton, seed, 2),
            "dice": lambda text, most, dice=dice: dice.choices(range(SIZE + 1), k=most),
            "a proposer that only drafts the end": lambda text, most: [END] * most,
            "a proposer without drafts": lambda text, most: [],
        }
        for name, answer in proposers.items():
            text_of(impl, f"The text with {name}", automaton, seed, answer)


@check(2, "Steps, and the calls of the proposer")
def test_steps(impl: Any) -> None:
    """k + 1 tokens per step where drafts are right, one where they are not; never too many."""
    loop = Automaton({(s, t): (s + t) % 3 for s in range(3) for t in range(3)}, set())
    model, asked = text_of(impl, "A text of 12 tokens", loop, 1, told(loop, 1))
    equal(
        model.calls,
        [(0, 4), (5, 4), (10, 1)],
        "Steps, as (tokens written, usable drafts)",
        "always right, count=12, k=4",
    )
    equal(
        asked.calls,
        [(0, 4), (5, 4), (10, 1)],
        "Asked, as (tokens written, drafts wanted)",
        "always right, count=12, k=4",
    )
    model, asked = text_of(
        impl, "A text of 4 tokens, all drafts illegal", loop, 2, lambda text, most: [X] * most, 4, 2
    )
    equal(
        model.calls,
        [(0, 0), (1, 0), (2, 0), (3, 0)],
        "Steps, as (tokens written, usable drafts)",
        "drafts that may never come, count=4, k=2",
    )
    equal(
        asked.calls,
        [(0, 2), (1, 2), (2, 1)],
        "Asked, as (tokens written, drafts wanted)",
        "count=4, k=2",
    )
    model, _ = text_of(impl, "A text that ends early", example(), 3, told(example(), 3), 9, 4)
    usable = [(0, len(alone(example(), 3, 9)) - 1)]
    equal(model.calls, usable, "Steps of a text that ends", "a b end or a c a end, k=4")
