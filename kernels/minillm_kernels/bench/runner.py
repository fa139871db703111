"""Measures one thing after the other, each beside its peers, within a time budget."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from minillm_kernels.bench.case import Measurement
from minillm_kernels.bench.gpu import Contender, Stopwatch
from minillm_kernels.bench.results import Peer, Result, Timing

Clock = Callable[[], float]
OURS = ""  # the contender that is measured; peers have names
SHORTEST = 1.0  # seconds below which a measurement is not worth its warm-up


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds in which every contender is timed once."""

    least: int = 5
    most: int = 40
    seconds: float = 8.0  # for one measurement, however much time is left


QUICK = Effort(least=3, most=10, seconds=1.5)


@dataclass
class Budget:
    """Time that is left, shared out evenly over the measurements that are left."""

    clock: Clock
    end: float
    left: int  # measurements

    def slot(self, effort: Effort) -> float | None:
        """When the next measurement has to stop; None if it should not begin."""
        now = self.clock()
        share = (self.end - now) / max(self.left, 1)
        self.left -= 1
        if self.end - now < SHORTEST:
            return None
        return now + min(max(share, SHORTEST), effort.seconds)


@dataclass
class _Race:
    """Contenders of one measurement, their timings so far, and what went wrong with whom."""

    contenders: dict[str, Contender] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def enter(self, name: str, make: Callable[[], Contender]) -> None:
        try:
            self.contenders[name] = make()
        except Exception as error:
            self.errors[name] = described(error)

    def round(self) -> None:
        """Everybody once: a clock that slows down under load then slows all of them."""
        for name, contender in list(self.contenders.items()):
            try:
                self.samples.setdefault(name, []).append(contender.seconds())
            except Exception as error:
                self.errors[name] = described(error)
                del self.contenders[name]

    def timing(self, name: str) -> Timing | None:
        contender = self.contenders.get(name)
        if contender is None:
            return None
        return Timing.of(self.samples[name], contender.calls, contender.how)


def measure(
    measurement: Measurement, gpu: Stopwatch, clock: Clock, stop: float, effort: Effort
) -> Result:
    """Time a measurement and its peers in turn until `stop`; whatever fails is in the result."""
    race = _Race()
    race.enter(OURS, lambda: gpu.ready(measurement.run, measurement.num_sets))
    if OURS in race.errors:
        return Result.of(measurement, error=race.errors[OURS])
    for name, call in measurement.peers.items():
        race.enter(name, lambda call=call: gpu.ready(call, measurement.num_sets))  # type: ignore[misc]
    rounds = 0
    while OURS in race.contenders and rounds < effort.most:
        if rounds >= effort.least and clock() >= stop:
            break
        race.round()
        rounds += 1
    peers = tuple(
        Peer(name, race.timing(name), race.errors.get(name), measurement.peer_targets.get(name))
        for name in measurement.peers
    )
    found = Result.of(
        measurement,
        timing=race.timing(OURS),
        peers=peers,
        error=race.errors.get(OURS),
        notes=_notes(measurement, gpu),
    )
    for contender in race.contenders.values():
        contender.close()
    return found


def measure_all(
    measurements: Sequence[Measurement], gpu: Stopwatch, budget: Budget, effort: Effort
) -> Iterator[Result]:
    """Each in its share of the budget; those that nothing is left for say so."""
    for measurement in measurements:
        stop = budget.slot(effort)
        if stop is None:
            yield Result.of(measurement, left_out="the time budget was used up")
            continue
        yield measure(measurement, gpu, budget.clock, stop, effort)


def described(error: Exception) -> str:
    """The first line of an error, with its type: the rest of a CUDA error is advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _notes(measurement: Measurement, gpu: Stopwatch) -> tuple[str, ...]:
    together = measurement.num_bytes * measurement.num_sets
    if measurement.bound != "copy" or together >= 2 * gpu.cache_bytes:
        return ()
    return (
        f"the inputs are {together / 1e6:.0f} MB together, which the L2 cache of "
        f"{gpu.cache_bytes / 1e6:.0f} MB may keep",
    )
