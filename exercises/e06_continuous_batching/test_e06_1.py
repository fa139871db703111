"""The public checks of e06.1: whole schedules; the first rule that is broken is named."""

import heapq
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minillm_exercises.checking import accept, check, equal, expect, observe, seeds

Request = tuple[str, int]
Row = tuple[list[str | None], list[str]]
Story = Mapping[int, list[Request]]  # by the number of steps that came before

BATCH = {0: [("a", 3), ("b", 1), ("c", 2)], 3: [("d", 1)]}
MIXED = {0: [("a", 4), ("b", 1), ("c", 2), ("d", 5), ("e", 1), ("f", 3), ("g", 2)]}


@dataclass
class Truth:
    """Who sits where and when: `start` and `seat` by name, of a story that is known in advance."""

    seats: int
    story: Story
    arrived: dict[str, int] = field(default_factory=dict)  # its first possible step
    tokens: dict[str, int] = field(default_factory=dict)
    start: dict[str, int] = field(default_factory=dict)
    seat: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """List scheduling: the next in line takes the seat that is free first, and of several the
        one with the lowest number."""
        free = [(1, seat) for seat in range(self.seats)]  # a heap of (step, seat)
        for before, requests in sorted(self.story.items()):
            for name, tokens in requests:
                self.arrived[name], self.tokens[name] = before + 1, tokens
                # A seat that was free before this request came is no better than one free now.
                free = [(max(step, before + 1), seat) for step, seat in free]
                heapq.heapify(free)
                self.start[name], self.seat[name] = heapq.heappop(free)
                later = [(max(step, self.start[name]), seat) for step, seat in free]
                free = [*later, (self.end(name) + 1, self.seat[name])]

    def end(self, name: str) -> int:
        """The step in which it makes its last token."""
        return self.start[name] + self.tokens[name] - 1

    def end_by(self, step: int) -> list[str]:
        """Who has ended in this step or before it."""
        return [name for name in self.start if self.end(name) <= step]

    @property
    def length(self) -> int:
        """Steps until everybody has ended."""
        return max((self.end(name) for name in self.start), default=0)

    def runs(self, name: str, step: int) -> bool:
        """Whether it makes a token in this step."""
        return name in self.start and self.start[name] <= step <= self.end(name)

    def row(self, step: int) -> Row:
        """What this step must return."""
        row: list[str | None] = [None] * self.seats
        for name in self.start:
            if self.runs(name, step):
                row[self.seat[name]] = name
        return row, [name for name in row if name is not None and self.end(name) == step]

    def waiting(self, step: int) -> list[str]:
        """The queue when this step begins, in the order of arrival."""
        return [name for name in self.start if self.arrived[name] <= step <= self.start[name]]


def play(impl: Any, seats: int, story: Story, steps: int) -> list[Row]:
    """What the learner's scheduler returns, step by step, each as it was when it came back."""
    scheduler, rows = impl.Scheduler(seats), []
    for step in range(1, steps + 1):
        if step - 1 in story:
            scheduler.add(list(story[step - 1]))
        rows.append(row_of(scheduler.step(), seats, f"step {step} of {told(seats, story)}"))
    return rows


def row_of(result: Any, seats: int, case: str) -> Row:
    """A result that is made of two lists, copied."""
    result = accept(result, "What step returns", case)
    pair = type(result) in (tuple, list) and len(result) == 2
    lists = pair and all(type(part) in (list, tuple) for part in result)
    expect(
        lists,
        f"{case}: expected two lists, who sits in each seat and who has ended, got {result!r:.60}.",
        ("no pair", result),
    )
    row, ended = list(result[0]), list(result[1])
    expect(
        len(row) == seats,
        f"{case}: expected {seats} entries, one per seat, got {row}.",
        ("seats", len(row)),
    )
    names = [name for name in (*row, *ended) if name is not None and type(name) is not str]
    expect(not names, f"{case}: names are strings, got {names[:1]}.", ("names", names))
    return row, ended


def told(seats: int, story: Story) -> str:
    """A story in words, for a message."""
    added = [
        f"add({requests})" + (f" after step {before}" if before else "")
        for before, requests in sorted(story.items())
    ]
    return f"Scheduler({seats}), {', '.join(added)}"


def judge(impl: Any, seats: int, story: Story, more: int = 1) -> None:
    """The learner's schedule must be the only right one, to the end and `more` steps beyond."""
    truth = Truth(seats, story)
    rows = play(impl, seats, story, truth.length + more)
    observe(rows)
    for step, (row, ended) in enumerate(rows, 1):
        want, leave = truth.row(step)
        case = f"step {step} of {told(seats, story)}"
        said = broken(truth, step, row) if row != want else ""
        expect(not said, f"{said} ({case}: expected {want}, got {row}).", "a broken rule")
        equal(row, want, "Who sits in each seat", case)
        said = misreported(truth, step, ended) if ended != leave else ""
        expect(not said, f"{said} ({case}: expected {leave}, got {ended}).", "a wrong report")
        equal(ended, leave, "Who has ended, by seat", case)


def broken(truth: Truth, step: int, row: list[str | None]) -> str:
    """The first rule that a row breaks, when all rows before it were right."""
    names = [name for name in row if name is not None]
    for seat, name in enumerate(row):
        if name is not None and names.count(name) > 1:
            return f"{name} sits in two seats at once"
        if name is not None and name not in truth.arrived:
            return (
                f"seat {seat} shows {name!r}, which is no name of a request; an empty seat is None"
            )
        if name is not None and truth.arrived[name] > step:
            return f"{name} sits in seat {seat} and has not even arrived"
        if name is not None and truth.end(name) < step:
            return (
                f"{name} made its last token in step {truth.end(name)}, and still sits in "
                f"seat {seat}"
            )
    return moved(truth, step, row) or seated(truth, step, row)


def moved(truth: Truth, step: int, row: list[str | None]) -> str:
    """A request that has a seat and tokens left must stay in it."""
    for name in truth.start:
        if truth.runs(name, step) and truth.start[name] < step:
            seat = truth.seat[name]
            if name not in row:
                made = step - truth.start[name]
                return (
                    f"{name} has made {made} of {truth.tokens[name]} tokens and has lost its seat"
                )
            if row[seat] != name:
                return f"{name} moved from seat {seat} to seat {row.index(name)}: its cache did not"
    return ""


def seated(truth: Truth, step: int, row: list[str | None]) -> str:
    """The free seats belong to those who came first, the lowest number to the first of them."""
    waiting = [name for name in truth.waiting(step) if name not in row]
    if waiting and None in row:
        return f"seat {row.index(None)} is empty while {waiting[0]} waits"
    for later in (name for name in row if name is not None and truth.start[name] >= step):
        if waiting and truth.waiting(step).index(waiting[0]) < truth.waiting(step).index(later):
            return f"{later} sits down before {waiting[0]}, who came first"
    return "who comes first takes the free seat with the lowest number"


def misreported(truth: Truth, step: int, ended: list[str]) -> str:
    """What is wrong with a list of the ended, when the row of seats is right."""
    _, leave = truth.row(step)
    for name in ended:
        if ended.count(name) > 1:
            return f"{name} is reported twice in one step"
        if name not in truth.end_by(step):
            return f"{name} is reported as ended and is not done"
        if name not in leave:
            return f"{name} ended in step {truth.end(name)} and is reported in step {step}"
    for name in leave:
        if name not in ended:
            return f"{name} made its last token in this step and is not reported"
    return "the ended are reported by seat number"


@check(1, "The worked example of the README")
def test_by_hand(impl: Any) -> None:
    """Two seats, three requests, a late one, and a step without requests."""
    judge(impl, 2, BATCH)


@check(1, "Steps without requests")
def test_nobody(impl: Any) -> None:
    """Steps of an empty batch, also after an empty list was added."""
    judge(impl, 3, {0: [], 1: []}, more=3)


@check(1, "One seat: one after the other")
def test_one_seat(impl: Any) -> None:
    """First come, first served, without a step between them."""
    judge(impl, 1, {0: [("z", 2), ("y", 1), ("x", 3)]}, more=0)


@check(1, "More seats than requests")
def test_many_seats(impl: Any) -> None:
    """Everybody sits down at once; the other seats stay empty."""
    judge(impl, 5, {0: [("a", 2), ("b", 4), ("c", 3)]}, more=0)


@check(2, "A seat is taken again in the next step")
def test_no_idle_seat(impl: Any) -> None:
    """Seats become free one by one, and two at a time."""
    judge(impl, 3, MIXED)
    judge(impl, 2, {0: [("a", 1), ("b", 1), ("c", 1), ("d", 1), ("e", 1)]})


@check(2, "Requests that end together are all reported, also the last")
def test_last_ones(impl: Any) -> None:
    """Three requests end in one step and none waits; then again, with the same scheduler."""
    judge(impl, 3, {0: [("a", 2), ("b", 2), ("c", 2)]}, more=3)
    judge(impl, 2, {0: [("a", 1), ("b", 1)], 2: [("c", 2), ("d", 2)]})


@check(2, "Requests that arrive later")
def test_arrivals(impl: Any) -> None:
    """While all seats are taken, while one is free, and after a pause; also an empty list."""
    story = {1: [("a", 3), ("b", 5)], 2: [("c", 2)], 3: [], 4: [("d", 1), ("e", 2)], 12: [("f", 1)]}
    judge(impl, 2, story)
    judge(impl, 3, {0: [("a", 6)], 1: [("b", 2)], 2: [("c", 1)], 3: [("d", 2)]})


@check(1, "The list that is added belongs to the caller")
def test_list_given(impl: Any) -> None:
    """It is as it was, and what the caller does to it afterwards is no arrival."""
    scheduler, requests = impl.Scheduler(1), [("a", 1), ("b", 1)]
    case = "Scheduler(1), add([('a', 1), ('b', 1)]), one step"
    scheduler.add(requests)
    row, _ = row_of(scheduler.step(), 1, case)
    equal(requests, [("a", 1), ("b", 1)], "The list that the caller added", case)
    requests.append(("c", 1))
    rows = [row, *(row_of(scheduler.step(), 1, case)[0] for _ in range(2))]
    what = (
        "Who sat there in three steps, when the caller put ('c', 1) into that list after the first"
    )
    equal(rows, [["a"], ["b"], [None]], what, case)


@check(1, "The lists that come back belong to the caller")
def test_lists_returned(impl: Any) -> None:
    """Earlier results stay as they are, and what the caller does to them changes nothing."""
    scheduler = impl.Scheduler(2)
    scheduler.add([("a", 2), ("b", 1), ("c", 1)])
    case = "Scheduler(2), add([('a', 2), ('b', 1), ('c', 1)])"
    first = scheduler.step()
    row_of(first, 2, case)
    second = scheduler.step()
    row, ended = row_of(second, 2, case)
    equal(list(first[0]), ["a", "b"], "What step 1 returned, looked at after step 2", case)
    equal(list(first[1]), ["b"], "Who ended in step 1, looked at after step 2", case)
    equal((row, ended), (["a", "c"], ["a", "c"]), "Step 2", case)
    for part in (part for part in second if type(part) is list):
        part[:] = ["?"] * len(part)
    last = row_of(scheduler.step(), 2, case)
    equal(last, ([None, None], []), "Step 3, after the caller wrote into the lists of step 2", case)


@check(2, "Twenty random workloads")
def test_everything(impl: Any) -> None:
    """Random seats, lengths and arrivals; the schedule is that of list scheduling."""
    for seed in seeds(20):
        draw = random.Random(seed)
        story: dict[int, list[Request]] = {}
        names = [f"r{number}" for number in range(draw.randint(1, 14))]
        draw.shuffle(names)
        for name in names:
            story.setdefault(draw.choice((0, 0, 2, 3, 7)), []).append((name, draw.randint(1, 6)))
        judge(impl, draw.randint(1, 5), story)
