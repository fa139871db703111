"""Chapter 06: two ways to give away seats, and their steps on a virtual clock.

`static_ends` and `continuous_ends` are the arithmetic of both schedules, for thousands of requests;
`serve` runs requests through the engine's own scheduler, and `StaticScheduler` is that scheduler
with one more condition.
"""

import heapq
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from random import Random
from types import MappingProxyType

from minillm.config import ModelConfig
from minillm.lab.simulation import Simulation, StepTime
from minillm.models.presets import preset
from minillm.scheduling.record import Blocked, StepRecord
from minillm.scheduling.scheduler import Scheduler
from minillm.trace.recorder import Trace
from minillm_exercises.chapters.common import chosen
from minillm_exercises.chapters.common import rounds as rounds
from minillm_exercises.chapters.common import show_table as show_table
from minillm_exercises.errors import ExerciseError

MEAN = 275  # tokens of an answer, under each distribution

Dist = Callable[[Random], int]

# How long answers are: four distributions with one mean (log-normal: 277; a draw's varies).
DISTS: Mapping[str, Dist] = MappingProxyType({
    "equal": lambda chance: MEAN, "uniform": lambda chance: chance.randint(50, 500),
    "exponential": lambda chance: max(1, round(chance.expovariate(1 / MEAN))),
    "log-normal": lambda chance: max(1, round(chance.lognormvariate(4.5, 1.5))),
})  # fmt: skip


def draw(dist: str, count: int, seed: int = 6, scale: int = 1) -> list[int]:
    """So many lengths by a distribution of `DISTS`, divided by `scale` where a short run is wanted;
    the same on every machine.

    Raises:
        ExerciseError: a distribution that is not of `DISTS`.
    """
    chance, length = Random(seed), chosen("dist", dist, DISTS)
    return [max(1, round(length(chance) / scale)) for _ in range(count)]


def uniform(count: int, low: int, high: int, seed: int = 6) -> list[int]:
    """So many lengths, each from `low` to `high` equally likely."""
    chance = Random(seed)
    return [chance.randint(low, high) for _ in range(count)]


def exponential(count: int, mean: float, most: int, seed: int = 6) -> list[int]:
    """So many lengths of an exponential distribution, cut off at `most`."""
    chance = Random(seed)
    return [min(most, max(1, round(chance.expovariate(1 / mean)))) for _ in range(count)]


def poisson(count: int, rate: float, seed: int = 7) -> list[int]:
    """The steps at which requests come, `rate` per step on average and independent of each
    other. The seed is not that of `draw`: with one seed for both, exponential lengths would be
    as the gaps before them, and long requests would always find free seats."""
    chance, now, steps = Random(seed), 0.0, []
    for _ in range(count):
        now += chance.expovariate(rate)
        steps.append(int(now))
    return steps


# ---- the arithmetic of both schedules ---------------------------------------------------------


def static_ends(lengths: Sequence[int], seats: int) -> list[int]:
    """The step in which each request ends when a batch is filled, and then runs until its longest
    has ended.

    Raises:
        ExerciseError: no seats, or a length below 1.
    """
    _check(lengths, seats)
    ends: list[int] = []
    now = 0
    for first in range(0, len(lengths), seats):
        batch = lengths[first : first + seats]
        ends += [now + length for length in batch]
        now += max(batch)
    return ends


def continuous_ends(lengths: Sequence[int], seats: int) -> list[int]:
    """The step in which each request ends when the next one takes the seat that is free first
    (list scheduling, Graham 1966); a heap knows which seat that is.

    Raises:
        ExerciseError: no seats, or a length below 1.
    """
    _check(lengths, seats)
    free_at, ends = [0] * seats, []
    for length in lengths:
        ends.append(free_at[0] + length)
        heapq.heapreplace(free_at, ends[-1])
    return ends


def gain(lengths: Sequence[int], seats: int) -> Fraction:
    """Steps of static batching per step of continuous batching."""
    return Fraction(max(static_ends(lengths, seats)), max(continuous_ends(lengths, seats)))


def most_gain(lengths: Sequence[int], seats: int) -> Fraction:
    """What no order of these requests can exceed: the mean of the batches' longest over the mean,
    because continuous batching needs at least all tokens divided by all seats."""
    return Fraction(max(static_ends(lengths, seats)) * seats, sum(lengths))


def _check(lengths: Sequence[int], seats: int) -> None:
    if seats < 1 or not lengths or min(lengths) < 1:
        raise ExerciseError(
            f"{seats} seats and {len(lengths)} requests, the shortest of "
            f"{min(lengths, default=0)} tokens: there is at least one of each."
        )


# ---- the engine's own scheduler ---------------------------------------------------------------


class StaticScheduler(Scheduler):
    """The engine's scheduler with one more condition: no request starts while others run."""

    def _refusal(self, budget: int) -> Blocked | None:
        if self.running:
            return Blocked.of(self.waiting[0], "batch slots", 1, 0)
        return super()._refusal(budget)


@dataclass(frozen=True)
class Room:
    """Where requests are served: seats, blocks of 16 tokens (by default as many as all requests
    could need), and how long a step takes (one second)."""

    seats: int
    blocks: int | None = None
    seconds: StepTime | None = None


def serve(
    lengths: Mapping[str, int] | Sequence[int],
    room: Room | int,
    scheduler: type[Scheduler] = Scheduler,
    *,
    prompt: int = 1,
    arrivals: Sequence[int] | None = None,
    max_tokens: int | None = None,
) -> Trace:
    """The trace of requests with answers of these lengths, all there at the start or at `arrivals`.

    No request waits for a step's token budget. With `max_tokens` the scheduler does
    not know how short an answer will be.

    Raises:
        ExerciseError: no request, or not one arrival for each.
    """
    room = Room(room) if isinstance(room, int) else room
    named = lengths if isinstance(lengths, Mapping) else dict(enumerate(lengths))
    times = [0] * len(named) if arrivals is None else arrivals
    if not named or len(times) != len(named):
        raise ExerciseError(
            f"serve() was given {len(named)} requests and {len(times)} arrivals; it needs one "
            f"arrival for each request and at least one."
        )
    longest = max(named.values()) + prompt
    sim = Simulation(
        room.blocks or (room.seats + 1) * (longest // 16 + 2),
        seconds=room.seconds,
        max_num_seqs=room.seats,
        max_num_batched_tokens=room.seats * (prompt + longest),
        scheduler=scheduler,
    )
    for (name, length), when in zip(named.items(), times, strict=True):
        sim.add(prompt, length, arrival=when, name=str(name), max_tokens=max_tokens)
    return sim.run()


def ends(trace: Trace) -> dict[str, int]:
    """The step in which each request ended."""
    names = {one.seq_id: one.request_id for record in trace for one in record.added}
    return {names[one.seq_id]: record.step for record in trace for one in record.ended}


def seconds_by_rows(runs: Iterable[Sequence[StepRecord]]) -> dict[int, float]:
    """The median time of the steps with so many rows, over all runs: a step during which the
    machine did something else does not show."""
    times: dict[int, list[float]] = {}
    for record in chain.from_iterable(runs):
        times.setdefault(len(record.rows), []).append(record.delivered - record.started)
    return {rows: statistics.median(some) for rows, some in sorted(times.items())}


def clock_gain(
    static: Sequence[StepRecord], continuous: Sequence[StepRecord], seconds: Mapping[int, float]
) -> float:
    """Times of two runs compared, each step at the time of `seconds_by_rows`."""
    slow, fast = (sum(seconds[len(step.rows)] for step in run) for run in (static, continuous))
    return slow / fast


@dataclass(frozen=True)
class Load:
    """What arrivals over time lead to: seats taken on average, the share of time in which all are
    taken, and the mean steps until a request gets its seat."""

    taken: Fraction
    full: Fraction
    wait: Fraction


def load(trace: Trace, seats: int) -> Load:
    """The averages of a trace whose steps take one second; moments without requests count."""
    span = int(trace[-1].computed)
    rows = [len(record.rows) for record in trace]
    waits = [int(request.queue_time) for request in trace.requests()]
    return Load(
        Fraction(sum(rows), span),
        Fraction(sum(number == seats for number in rows), span),
        Fraction(sum(waits), len(waits)),
    )


def llama_2_13b() -> ModelConfig:
    """The shape of a model of 13 billion parameters whose heads all keep a key and a value."""
    return replace(
        preset("llama-2-7b"), num_layers=40, hidden_size=5120, intermediate_size=13824,
        num_heads=40, num_kv_heads=40,
    )  # fmt: skip
