"""The public checks of e00.2, on a machine that slows down, jumps and is interrupted."""

import random
from collections.abc import Collection
from typing import Any

from minillm_exercises.checking import check, close, expect, seeds

SPIKE = 40  # an interrupted run takes so many times as long


class Machine:
    """A clock and two programs of `a` and `b` ticks, which run in turn, however they are called.

    Run number i (from 0, both programs counted together) takes its program's ticks times
    ``start + i * drift``, times 3 from run number `jump` on, times `SPIKE` if i is in `spikes`.
    """

    def __init__(
        self,
        a: int,
        b: int,
        start: int = 100,
        drift: int = 0,
        jump: int | None = None,
        spikes: Collection[int] = (),
    ) -> None:
        self.ticks = {"a": a, "b": b}
        self.start, self.drift, self.jump, self.spikes = start, drift, jump, spikes
        self.now = 0
        self.runs: list[str] = []

    def run_a(self) -> None:
        """The first program, once."""
        self._run("a")

    def run_b(self) -> None:
        """The second program, once."""
        self._run("b")

    def clock(self) -> int:
        """Ticks since the start."""
        return self.now

    def _run(self, name: str) -> None:
        i = len(self.runs)
        slowness = self.start + i * self.drift
        slowness *= 3 if self.jump is not None and i >= self.jump else 1
        slowness *= SPIKE if i in self.spikes else 1
        self.now += self.ticks[name] * slowness
        self.runs.append(name)


def ratio(impl: Any, machine: Machine, blocks: int) -> float:
    """What the learner's function makes of `machine`."""
    return impl.compare(  # lambdas: a bound method would lead to the machine and its secrets
        a=lambda: machine.run_a(),
        b=lambda: machine.run_b(),
        clock=lambda: machine.clock(),
        blocks=blocks,
    )


def right(impl: Any, machine: Machine, blocks: int, what: str, case: str) -> None:
    """The answer must be the ratio of the programs' own ticks, whatever the machine did."""
    want = machine.ticks["a"] / machine.ticks["b"]
    close(ratio(impl, machine, blocks), want, what, case, rtol=1e-9, atol=0.0)


@check(1, "A program against itself, on a machine that holds still")
def test_same_program(impl: Any) -> None:
    """The ratio of equals is 1."""
    right(impl, Machine(50, 50), 3, "A program of 50 ticks against itself", "blocks=3")


@check(1, "Two programs, on a machine that holds still")
def test_steady(impl: Any) -> None:
    """30 ticks against 20: a takes 1.5 times as long."""
    right(impl, Machine(30, 20), 5, "a of 30 ticks against b of 20", "blocks=5")


@check(1, "No more than 4 * blocks runs")
def test_budget(impl: Any) -> None:
    """Time on a machine is not free."""
    machine = Machine(30, 20)
    ratio(impl, machine, 5)
    runs, both = len(machine.runs), {"a", "b"} <= set(machine.runs)
    expect(
        runs <= 20 and both,
        f"With blocks=5 a and b may run 20 times together, and both must run; "
        f"a ran {machine.runs.count('a')} times and b {machine.runs.count('b')} times.",
        (runs <= 20, both),
    )


@check(2, "A machine with one jump in its speed")
def test_jump(impl: Any) -> None:
    """The processor's boost ends: from run 9 on everything takes three times as long. Run 10 would
    be the middle of a block a b b a, where a jump cancels."""
    machine = Machine(30, 20, jump=9)
    case = "blocks=5, 3 times slower from run 9 on, counted from 0"
    right(impl, machine, 5, "a of 30 ticks against b of 20", case)


@check(2, "A machine that slows down a little with every run")
def test_drift(impl: Any) -> None:
    """It gets warm: run i takes 1 + i / 10 times as long as the first."""
    machine = Machine(20, 20, drift=10)
    case = "blocks=5, run i is 1 + i/10 times as slow as run 0"
    right(impl, machine, 5, "A program of 20 ticks against itself", case)


@check(2, "A machine that is interrupted now and then")
def test_spikes(impl: Any) -> None:
    """Three runs take 40 times as long, two of one program and one of the other (in the order
    a b b a as in a b a b), so that they do not cancel in a sum."""
    machine = Machine(30, 20, spikes=(3, 8, 14))
    case = "blocks=7, runs 3, 8 and 14 take 40 times as long"
    right(impl, machine, 7, "a of 30 ticks against b of 20", case)


@check(2, "Twenty machines with all of this at once")
def test_everything(impl: Any) -> None:
    """Drift, one jump and spikes, which together spoil less than half of the blocks."""
    for seed in seeds(20):
        draw = random.Random(seed)
        blocks = draw.randint(5, 9)
        a, b = draw.randint(20, 90), draw.randint(20, 90)
        drift, jump = draw.randint(3, 20), draw.randrange(1, 4 * blocks)
        spikes = sorted(draw.sample(range(4 * blocks), (blocks - 1) // 2 - 1))
        machine = Machine(a, b, 100, drift, jump, spikes)
        case = (
            f"blocks={blocks}, a={a}, b={b}, drift={drift}/100 per run, jump at run {jump}, "
            f"spikes at {spikes}"
        )
        right(impl, machine, blocks, "a against b", case)
