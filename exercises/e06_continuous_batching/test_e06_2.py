"""The public checks of e06.2: orders by hand, then histories judged by the definition."""

import random
from dataclasses import dataclass, field
from typing import Any

from minillm_exercises.checking import accept, check, equal, expect, number, seeds

Call = tuple[str, int] | int  # add(name, predicted), or admit(free)


@dataclass
class Truth:
    """What a queue must do, straight from the definition of being overtaken."""

    patience: int
    arrived: list[str] = field(default_factory=list)  # names, in this order, for all time
    predicted: dict[str, int] = field(default_factory=dict)
    admitted: list[str] = field(default_factory=list)
    before: dict[str, int] = field(default_factory=dict)  # how many were admitted when it came
    promised: dict[str, int] = field(default_factory=dict)

    @property
    def waiting(self) -> list[str]:
        """Who waits, oldest first."""
        return [name for name in self.arrived if name not in self.admitted]

    def overtaken_by(self, name: str) -> list[str]:
        """The later arrivals that were admitted while it waited."""
        later = self.arrived[self.arrived.index(name) + 1 :]
        return [other for other in self.admitted if other in later]

    def add(self, name: str, predicted: int) -> int:
        """A request arrives; the promise."""
        self.promised[name] = len(self.waiting) + self.patience
        self.before[name] = len(self.admitted)
        self.arrived.append(name)
        self.predicted[name] = predicted
        return self.promised[name]

    def next(self) -> str:
        """Who is admitted next, of those who wait."""
        oldest = self.waiting[0]
        if len(self.overtaken_by(oldest)) >= self.patience:
            return oldest
        return min(self.waiting, key=lambda name: (self.predicted[name], self.arrived.index(name)))

    def why(self) -> str:
        """Why it is that one."""
        oldest, name = self.waiting[0], self.next()
        times = overtakers(self.overtaken_by(oldest))
        if len(self.overtaken_by(oldest)) >= self.patience:
            return f"{oldest} is the oldest and was overtaken {times}, which is all its patience"
        return (
            f"{oldest} is the oldest and was overtaken {times}, so the shortest that waits is "
            f"next: {name} with {self.predicted[name]}"
        )


def overtakers(names: list[str]) -> str:
    """``2 times (by b and d)``."""
    by = f" (by {', '.join(names)})" if names else ""
    return f"{len(names)} time{'s' * (len(names) != 1)}{by}"


def told(patience: int, calls: list[Call]) -> str:
    """A history as the calls that make it."""
    parts = [f"admit({c})" if isinstance(c, int) else f"add('{c[0]}', {c[1]})" for c in calls]
    return ", ".join([f"ShortFirst({patience})", *parts])


def judge(impl: Any, patience: int, calls: list[Call], promises: bool = False) -> None:
    """Every admission of a history must be the right one; with `promises`, every promise too."""
    queue, truth = impl.ShortFirst(patience), Truth(patience)
    for index, call in enumerate(calls):
        case = told(patience, calls[: index + 1])
        if not isinstance(call, int):
            got = queue.add(*call)
            want = truth.add(*call)
            if promises:
                what = f"How many may be admitted before {call[0]}"
                equal(got, want, f"{what}: {want - patience} wait, patience {patience}", case)
            continue
        got = accept(queue.admit(call), "What admit returns", case)
        expect(
            type(got) in (list, tuple),
            f"{case}: expected a list of names, got {got!r:.60}.",
            ("no list", got),
        )
        right_order(truth, list(got), call, case)


def right_order(truth: Truth, got: list[Any], free: int, case: str) -> None:
    """The names of one call, compared one by one; `truth` learns of each."""
    room = min(free, len(truth.waiting))
    for place, name in enumerate(got):
        fits = place < room
        expect(fits, f"{case}: {len(got)} admitted, where {room} can be.", (got, "too many"))
        want, why = truth.next(), truth.why()
        expect(
            name == want,
            f"{why}; yours took {name!r:.40} ({case}, place {place} of the result).",
            (got, "wrong"),
        )
        truth.admitted.append(want)
    expect(
        len(got) == room,
        f"{case}: {len(got)} admitted, where {room} can be: {free} seats are free, and "
        f"a request still waits.",
        (got, "too few"),
    )


HAND: list[Call] = [("long", 90), ("a", 10), ("b", 20), 1, ("c", 5), 1, 1, 3]


@check(1, "The worked example of the README")
def test_by_hand(impl: Any) -> None:
    """Its admissions, and the three promises."""
    judge(impl, 2, HAND, promises=True)


@check(1, "An empty queue, and a queue of one")
def test_few(impl: Any) -> None:
    """Nothing to admit, no seat to admit to, more seats than requests."""
    judge(impl, 1, [2, ("a", 5), 0, 1, 1, ("b", 5), ("c", 5), 0, 9])


@check(1, "Large patience: the shortest first")
def test_shortest(impl: Any) -> None:
    """No request is overtaken as often as its patience allows."""
    calls: list[Call] = [("a", 50), ("b", 20), ("c", 70), ("d", 30), 2, ("e", 10), ("f", 60), 9]
    judge(impl, 100, calls)


@check(1, "Patience 0: first come, first served")
def test_no_patience(impl: Any) -> None:
    """The oldest has no patience from the beginning."""
    judge(impl, 0, [("a", 50), ("b", 20), ("c", 70), 1, ("d", 10), 1, 2])


@check(1, "Equal lengths: the earliest arrival first")
def test_ties(impl: Any) -> None:
    """Neither the name nor the place in memory decides."""
    judge(impl, 9, [("z", 7), ("m", 3), ("k", 3), ("x", 3), ("a", 3), 2, ("b", 3), 4])


@check(2, "Shorter requests keep arriving")
def test_stream(impl: Any) -> None:
    """One long request, and a new short one before every admission."""
    for patience in (1, 3):
        calls: list[Call] = [("long", 900)]
        for turn in range(6):
            calls += [(f"s{turn}", 10 + turn), 1]
        judge(impl, patience, calls)


@check(2, "What counts as overtaking, and what does not")
def test_what_counts(impl: Any) -> None:
    """Arrivals do not count, nor those who came before; nor who was overtaken and has gone."""
    judge(impl, 2, [("x", 9), ("a", 4), ("b", 5), ("c", 6), ("d", 7), ("e", 8), 1, 1, 1, 3])
    calls: list[Call] = [("p", 90), ("a", 1), 1, ("b", 1), 1, ("q", 50), ("c", 2), 1, 1]
    judge(
        impl, 3, [*calls, ("d", 3), 1, ("e", 4), 1, 1]
    )  # p came before q: it overtakes no request
    judge(impl, 2, [("a", 1), ("b", 2), ("long", 90), 2, ("c", 5), 1, ("d", 6), 1, ("e", 7), 1, 1])
    judge(impl, 3, [("p", 50), ("q", 60), ("a", 1), 1, ("b", 2), 1, ("c", 3), 1, 1, ("d", 4), 1, 2])


@check(2, "Several admissions in one call")
def test_batches(impl: Any) -> None:
    """Each one overtakes, and patience can end in the middle of a call."""
    judge(impl, 2, [("x", 90), ("a", 4), ("b", 5), ("c", 6), ("d", 7), 4, 1])
    judge(impl, 3, [("x", 90), ("y", 80), ("a", 4), ("b", 5), 2, ("c", 6), ("d", 7), ("e", 8), 5])


@check(2, "Several requests at their limit")
def test_several(impl: Any) -> None:
    """The oldest goes first, whatever the lengths; then the next one."""
    calls: list[Call] = [("p", 90), ("q", 70), ("r", 80), ("a", 1), ("b", 2), ("c", 3), 2]
    judge(impl, 2, [*calls, 1, ("d", 4), 1, 1, 2])
    judge(impl, 2, [*calls, ("d", 4), 5])


@check(1, "The promise")
def test_promise(impl: Any) -> None:
    """Who waits now, and who may still overtake; those who have gone do not count."""
    calls: list[Call] = [("a", 30), ("b", 10), ("c", 20), 2, ("d", 5), 1, ("e", 40), 9, ("f", 1)]
    for patience in (0, 3):
        queue, truth = impl.ShortFirst(patience), Truth(patience)
        for index, call in enumerate(calls):
            case = told(patience, calls[: index + 1])
            if isinstance(call, int):
                # In whatever order: as many are admitted as there are.
                queue.admit(call)
                truth.admitted += truth.waiting[:call]
            else:
                what = f"How many may be admitted before {call[0]}, at most"
                want = truth.add(*call)
                equal(number(queue.add(*call), what, case), want, what, case)


@check(2, "Twenty random histories")
def test_everything(impl: Any) -> None:
    """Random arrivals and admissions, with equal lengths among them; then all the rest at once."""
    for seed in seeds(20):
        draw = random.Random(seed)
        names = [f"r{number}" for number in range(draw.randint(3, 25))]
        draw.shuffle(names)
        calls: list[Call] = []
        for name in names:
            calls.append((name, draw.randint(1, 12)))
            if draw.random() < 0.6:
                calls.append(draw.choice((1, 1, 1, 2, 3)))
        judge(impl, draw.choice((0, 1, 2, 3, 5)), [*calls, len(names)], promises=True)


@check(1, "Every promise is kept")
def test_kept(impl: Any) -> None:
    """The learner's promises and order: no request is overtaken too often."""
    for seed in seeds(6):
        draw = random.Random(seed)
        patience = draw.randint(0, 4)
        queue, truth = impl.ShortFirst(patience), Truth(patience)
        case = f"ShortFirst({patience}), random arrivals with seed {seed}"
        for turn in range(30):
            name = f"r{turn}"
            truth.add(name, draw.randint(1, 9))
            truth.promised[name] = number(
                queue.add(name, truth.predicted[name]), "The promise", case
            )
            if turn > 4:
                gone = accept(queue.admit(1), "What admit returns", case)
                expect(
                    type(gone) in (list, tuple) and len(gone) == 1 and gone[0] in truth.waiting,
                    f"{case}: admit(1) returned {gone!r:.60}; waiting were {truth.waiting}.",
                    gone,
                )
                truth.admitted += gone
                kept(truth, gone[0], case)


def kept(truth: Truth, name: str, case: str) -> None:
    """The promises to a request that was just admitted, and to waiting ones."""
    waited = len(truth.admitted) - 1 - truth.before[name]
    expect(
        waited <= truth.promised[name],
        f"{case}: {waited} were admitted before {name}, who was promised {truth.promised[name]} "
        f"at most.",
        (name, waited),
    )
    for other in truth.waiting:
        times = truth.overtaken_by(other)
        expect(
            len(times) <= truth.patience,
            f"{case}: {other} was overtaken {overtakers(times)}, with a patience of "
            f"{truth.patience}.",
            (other, len(times)),
        )
