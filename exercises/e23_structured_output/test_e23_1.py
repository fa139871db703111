"""The public checks of e23.1: live states, masks of tokens, the end, and text that is forced."""

import random
from typing import Any

from minillm_exercises.checking import check, equal, expect, seeds

TOKENS = [b"n", b"no", b"nope", b"ye", b"es", b"w", b"x", b""]
END = 7


class Automaton:
    """Edges {(state, byte): state}, accepting states, and a count of steps."""

    def __init__(self, edges: dict[tuple[int, int], int], accepting: set[int], num_states: int):
        self._edges, self.accepting, self.num_states = edges, set(accepting), num_states
        self.steps = 0

    def step(self, state: int, byte: int) -> int | None:
        if not isinstance(state, int) or not 0 <= state < self.num_states:
            expect(False, f"step was asked for the state {state!r}, which is none.")
        if not isinstance(byte, int) or not 0 <= byte < 256:
            expect(False, f"step was given {byte!r}; a byte is a number from 0 to 255.")
        self.steps += 1
        return self._edges.get((state, byte))


def of(edges: str, accepting: set[int]) -> Automaton:
    """An automaton written as "0n1 1o2": from state 0 the byte n leads to state 1."""
    found = {(int(a), ord(b)): int(c) for a, b, c in edges.split()}
    return Automaton(found, accepting, 1 + max(max(a, c) for (a, _), c in found.items()))


def example() -> Automaton:
    """The README's."""
    return of("0n1 1o2 2w3 0y4 4e5 5s6 0x7", {2, 3, 6})


def rolled(seed: int) -> tuple[Automaton, list[bytes]]:
    """A random automaton over three letters, some of it dead ends, and random tokens."""
    dice = random.Random(seed)
    size = dice.randint(3, 7)
    edges = {
        (state, byte): dice.randrange(size)
        for state in range(size)
        for byte in b"abc"
        if dice.random() < 0.55
    }
    accepting = {state for state in range(size) if dice.random() < 0.3} or {size - 1}
    tokens = [bytes(dice.choices(b"abc", k=dice.randint(0, 4))) for _ in range(24)]
    return Automaton(edges, accepting, size), tokens


def reachable(automaton: Automaton, state: int) -> set[int]:
    """The states that can be reached from one, itself included."""
    found, todo = {state}, [state]
    while todo:
        at = todo.pop()
        new = {after for (a, _), after in automaton._edges.items() if a == at} - found
        found |= new
        todo += new
    return found


def true_live(automaton: Automaton) -> set[int]:
    """What `live` should return."""
    states = range(automaton.num_states)
    return {each for each in states if reachable(automaton, each) & automaton.accepting}


def end_of(automaton: Automaton, state: int, text: bytes) -> int | None:
    """The state after a text."""
    at: int | None = state
    for byte in text:
        at = None if at is None else automaton._edges.get((at, byte))
    return at


def true_mask(automaton: Automaton, state: int, tokens: list[bytes]) -> list[bool]:
    """What `mask` should return."""
    alive = true_live(automaton)
    return [bool(each) and end_of(automaton, state, each) in alive for each in tokens]


@check(1, "States with a way to the end")
def test_live(impl: Any) -> None:
    """The README's automaton, a loop, a chain, and dead ends that lead to each other."""
    equal(impl.live(example()), {0, 1, 2, 3, 4, 5, 6}, "live in the README's example")
    chain = of("4a3 3a2 2a1 1a0", {0})
    equal(
        impl.live(chain),
        {0, 1, 2, 3, 4},
        "live in a chain of five states",
        "4 to 3 to 2 to 1 to 0, and 0 is accepting",
    )
    loop = of("0a1 1b0 1c2 0x3 3y4 4y3", {2})
    equal(
        impl.live(loop),
        {0, 1, 2},
        "live where two dead ends lead to each other",
        "0 and 1 are a loop with a way to the accepting 2; 3 and 4 are a loop without",
    )


@check(2, "The mask of a state")
def test_mask(impl: Any) -> None:
    """The README's masks; tokens that end inside a text, run beyond it, or are special."""
    automaton = example()
    alive = true_live(automaton)
    for state in (0, 2, 1, 4):
        got = impl.mask(automaton, set(alive), state, list(TOKENS))
        case = f"tokens={TOKENS}"
        equal(got, true_mask(automaton, state, TOKENS), f"mask in state {state}", case)
    tokens = [b"xx", b"now", b"nowx", b"no", b"no", b"yes"]
    got = impl.mask(automaton, set(alive), 0, list(tokens))
    want = [False, True, False, True, True, True]
    equal(got, want, "mask in state 0, with tokens that are whole texts", f"tokens={tokens}")


@check(1, "The end")
def test_allowed(impl: Any) -> None:
    """Only where the text is complete, whatever stands at its place."""
    automaton = example()
    alive = true_live(automaton)
    for state in (2, 7, 0, 3, 5):
        want = true_mask(automaton, state, TOKENS)
        want[END] = state in {2, 3, 6}
        got = impl.allowed(automaton, set(alive), state, list(TOKENS), END)
        equal(got, want, f"allowed in state {state}", f"tokens={TOKENS}, end={END}")
    tokens = [b"", b"o", b"n", b""]
    got = impl.allowed(automaton, set(alive), 2, list(tokens), 0)
    equal(
        got,
        [True, False, False, False],
        "allowed in state 2 with another special token",
        f"tokens={tokens}, end=0",
    )


@check(2, "Text that is forced")
def test_forced(impl: Any) -> None:
    """One way on, a choice, an end, a way into a dead end that does not count, and loops."""
    automaton = example()
    alive = true_live(automaton)
    for state, want in ((4, b"es"), (1, b"o"), (0, b""), (2, b""), (5, b"s"), (3, b"")):
        equal(
            impl.forced(automaton, set(alive), state),
            want,
            f"forced in state {state}",
            "the README's automaton",
        )
    dead = of("0a1 0x3 1b2 2b2", {2})
    alive = true_live(dead)
    equal(
        impl.forced(dead, set(alive), 0),
        b"ab",
        "forced beside a dead end",
        "0 a 1, 1 b 2, 2 b 2; x leads to a dead end; 2 is accepting",
    )
    lone = of("0a1 0b1 1c2", {2})
    equal(
        impl.forced(lone, {0, 1, 2}, 0),
        b"",
        "forced where two bytes lead on",
        "a and b lead from 0 to the same state",
    )


@check(2, "Each beginning once")
def test_steps(impl: Any) -> None:
    """A vocabulary whose tokens share their beginnings."""
    letters = of("0a1 1a2 2a3 3a4 4a5 5a6", {6})
    tokens = [b"a" * n for n in range(7)]
    letters.steps = 0
    got = impl.mask(letters, set(range(7)), 0, list(tokens))
    equal(got, [False] + [True] * 6, "mask of a, aa, ... aaaaaa", "only a is possible")
    most = "calls of step for tokens of 1 to 6 times a, which have 6 beginnings"
    expect(letters.steps <= 6, f"{most}: {letters.steps}; 6 are enough.")
    automaton = example()
    got = impl.mask(automaton, true_live(automaton), 0, [b"zzzz"])
    equal(got, [False], "mask in state 0", "tokens=[b'zzzz']")
    expect(
        automaton.steps <= 1, f"calls of step for the token zzzz: {automaton.steps}; 1 is enough."
    )
    automaton.steps = 0
    tokens = [b"zzzz", b"zzzy", b"noo", b"nooo", b"noon", b"yes"]
    got = impl.mask(automaton, true_live(automaton), 0, list(tokens))
    equal(got, [False] * 5 + [True], "mask in state 0", f"tokens={tokens}")
    expect(
        automaton.steps <= 7,
        f"calls of step for {tokens}: {automaton.steps}; 7 are enough "
        "(z, n, no, noo, y, ye, yes), because nothing follows z and noo.",
    )


@check(2, "Random automata")
def test_random(impl: Any) -> None:
    """Everything, twenty times."""
    for seed in seeds(20):
        automaton, tokens = rolled(seed)
        tokens.append(b"")
        alive, state = true_live(automaton), seed % automaton.num_states
        case = f"random automaton {seed}, edges {automaton._edges}, accepting {automaton.accepting}"
        equal(impl.live(automaton), alive, "live", case)
        want = true_mask(automaton, state, tokens)
        automaton.steps = 0
        got = impl.mask(automaton, set(alive), state, list(tokens))
        equal(got, want, f"mask in state {state}", f"{case}, tokens {tokens}")
        begins = {token[:n] for token in tokens for n in range(1, len(token) + 1)}
        most = sum(end_of(automaton, state, begin[:-1]) is not None for begin in begins)
        expect(
            automaton.steps <= most,
            f"calls of step in mask: {automaton.steps}; {most} are enough ({case}).",
        )
        got = impl.allowed(automaton, set(alive), state, list(tokens), 24)
        want[24] = state in automaton.accepting
        equal(got, want, f"allowed in state {state}", case)
