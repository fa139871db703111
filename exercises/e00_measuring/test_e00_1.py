"""The public checks of e00.1, on a device that exists only here: its clock counts ticks."""

import random
import statistics
from collections.abc import Sequence
from typing import Any

from minillm_exercises.checking import check, equal, expect, seeds


class Device:
    """A program that launches work, and a device that does it later, in order.

    Run i works ``works[i]`` ticks (after the list, the last entry). The program needs `launch`
    ticks to start a run and `make` to make an input, whose copy keeps the device busy for another
    `copy` ticks. A `blocking` device makes the program wait, as a CPU does; one that `remembers`
    answers an input it has seen before in one tick. Reading the clock is free, and so is waiting
    for a device that is idle.
    """

    def __init__(
        self,
        works: Sequence[int],
        launch: int = 0,
        make: int = 0,
        copy: int = 0,
        blocking: bool = False,
        remembers: bool = False,
    ) -> None:
        self.works, self.launch, self.make, self.copy = works, launch, make, copy
        self.blocking, self.remembers = blocking, remembers
        self.now = self.idle_from = 0
        self.made = 0
        self.used: list[int] = []

    def clock(self) -> int:
        """Ticks since the start."""
        return self.now

    def sync(self) -> None:
        """Wait for the device."""
        self.now = max(self.now, self.idle_from)

    def setup(self) -> int:
        """A fresh input: its number."""
        self.now += self.make
        self._queue(self.copy)
        self.made += 1
        return self.made

    def step(self, x: int) -> None:
        """Launch one run on an input that setup() has made."""
        expect(
            type(x) is int and 1 <= x <= self.made,
            "step() was given an input that setup() did not return: give each run one of those.",
            "an input of their own",
        )
        work = self.works[min(len(self.used), len(self.works) - 1)]
        self.now += self.launch
        self._queue(1 if self.remembers and x in self.used else work)
        self.used.append(x)
        if self.blocking:
            self.sync()

    def _queue(self, work: int) -> None:
        self.idle_from = max(self.now, self.idle_from) + work


def run(impl: Any, device: Device, repeats: int, warmup: int) -> float:
    """What the learner's function makes of `device`."""
    return impl.bench(  # lambdas: a bound method would lead to the device and its secrets
        step=lambda x: device.step(x),
        setup=lambda: device.setup(),
        clock=lambda: device.clock(),
        sync=lambda: device.sync(),
        repeats=repeats,
        warmup=warmup,
    )


@check(1, "One run on a program without a device")
def test_one_run(impl: Any) -> None:
    """Nothing to wait for: 37 ticks."""
    device = Device([37], blocking=True)
    equal(run(impl, device, 1, 0), 37, "A step that takes 37 ticks", "repeats=1, warmup=0")


@check(2, "The work is timed, not its launch")
def test_waits_at_the_end(impl: Any) -> None:
    """Five ticks to launch, 400 to do."""
    device = Device([400], launch=5)
    what = "A step that is launched in 5 ticks and then keeps the device busy for 400"
    equal(run(impl, device, 3, 1), 405, what, "repeats=3, warmup=1")


@check(2, "The device's work for the input is not timed")
def test_waits_at_the_start(impl: Any) -> None:
    """The input's copy is still running when setup() returns."""
    device = Device([50], launch=2, make=7, copy=1000)
    what = "A step of 2 + 50 ticks, whose input takes 7 to make and 1000 more to copy"
    equal(run(impl, device, 3, 1), 52, what, "repeats=3, warmup=1")
    device = Device([50], launch=2, make=7, copy=1000)  # no median hides what spoils the first run
    equal(run(impl, device, 1, 0), 52, what, "repeats=1, warmup=0")


@check(2, "The median, also of an even number of runs")
def test_median(impl: Any) -> None:
    """A run that was interrupted, then four and two runs."""
    for works, want in (
        ([30, 31, 900, 29, 30], 30),
        ([30, 34, 900, 20], 32),
        ([10, 15], 12.5),
    ):
        got = run(impl, Device(works, blocking=True), len(works), 0)
        equal(got, want, f"The median of runs that take {works}", f"repeats={len(works)}, warmup=0")


@check(1, "Warm-up runs do not count")
def test_warm_up(impl: Any) -> None:
    """As many of them as counted ones, slow or fast: on either side of the median."""
    for first, second, third in ((800, 300, 300), (800, 300, 5), (6, 5, 5)):
        device = Device([first, second, third, 40, 42, 41], blocking=True)
        what = f"The median of 40, 42 and 41 after warm-up runs of {first}, {second} and {third}"
        equal(run(impl, device, 3, 3), 41, what, "repeats=3, warmup=3")


@check(1, "Every run gets a new input")
def test_fresh_inputs(impl: Any) -> None:
    """An input that was seen before costs one tick."""
    device = Device([60], blocking=True, remembers=True)
    got = run(impl, device, 4, 2)
    expect(
        len(set(device.used)) == len(device.used),
        f"Six runs were given the inputs {device.used}; call setup() for each run, also in the "
        f"warm-up: an input seen before may be answered from a cache.",
        device.used,
    )
    equal(len(device.used), 6, "How often step() ran", "repeats=4, warmup=2")
    equal(got, 60, "A step that takes 60 ticks on a fresh input", "repeats=4, warmup=2")


@check(2, "Twenty devices with all of this at once")
def test_everything(impl: Any) -> None:
    """Random launches, copies, warm-ups and interruptions."""
    for seed in seeds(20):
        draw = random.Random(seed)
        repeats, warmup = draw.randint(2, 8), draw.randint(1, 4)
        early = [draw.choice((50, 3000)) + draw.randint(0, 40) for _ in range(warmup)]
        works = [draw.randint(100, 199) for _ in range(repeats)]
        works[draw.randrange(repeats)] += draw.choice((0, 5000))
        launch, make, copy = (draw.randint(1, 30) for _ in range(3))
        device = Device([*early, *works], launch, make, copy, remembers=True)
        case = (
            f"warmup={warmup}, repeats={repeats}, work {[*early, *works]}, "
            f"launch {launch}, make {make}, copy {copy}"
        )
        want = launch + statistics.median(works)
        equal(run(impl, device, repeats, warmup), want, "The median of launch + work", case)
