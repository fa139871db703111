"""Times a measurement and its peers in turn, and says what came of it as plain data."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from minillm_kernels.bench.case import Measurement
from minillm_kernels.bench.gpu import Gpu, Timed

OURS = ""  # the contender that is measured; peers have names


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds in which every contender is timed once."""

    least: int = 3
    most: int = 10
    seconds: float = 1.5


@dataclass
class _Race:
    """Contenders of one measurement, their timings so far, and what went wrong with whom."""

    contenders: dict[str, Timed] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def round(self) -> None:
        """Everybody once: a clock that slows down under load then slows all of them."""
        for name, contender in list(self.contenders.items()):
            try:
                self.samples.setdefault(name, []).append(contender.seconds())
            except Exception as error:
                if name == OURS:
                    raise
                self.errors[name] = described(error)
                del self.contenders[name]

    def timing(self, name: str) -> dict[str, Any]:
        """Microseconds (median), spread (distance of the quartiles as a share of it), repeats,
        calls in one timing, and how: replays of a CUDA graph, or launches one by one where capture
        failed, which counts the host's work for small kernels. Empty for one that failed."""
        contender, samples = self.contenders.get(name), self.samples.get(name)
        if contender is None or not samples:
            return {"time_us": None}
        middle = median(samples)
        low, _, high = quantiles(samples, n=4, method="inclusive") if samples[1:] else (0, 0, 0)
        return {
            "time_us": middle * 1e6, "spread": (high - low) / middle, "repeats": len(samples),
            "calls": contender.calls, "how": contender.how,
        }  # fmt: skip


def measure(
    measurement: Measurement,
    gpu: Gpu,
    effort: Effort = Effort(),
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Time a measurement and its peers in turn. Raises what the measurement itself raises; a peer
    that fails has its error in the row."""
    race, stop = _Race(), clock() + effort.seconds
    try:
        race.contenders[OURS] = gpu.ready(measurement.run, measurement.num_sets)
        for name, call in measurement.peers.items():
            try:
                race.contenders[name] = gpu.ready(call, measurement.num_sets)
            except Exception as error:
                race.errors[name] = described(error)
        for number in range(effort.most):
            if number >= effort.least and clock() >= stop:
                break
            race.round()
        return _row(measurement, race, gpu)
    finally:
        for contender in race.contenders.values():
            contender.close()


def _row(measurement: Measurement, race: _Race, gpu: Gpu) -> dict[str, Any]:
    ours = race.timing(OURS)
    seconds = ours["time_us"] / 1e6
    peers = []
    for name in measurement.peers:
        timing = race.timing(name)
        ratio = timing["time_us"] / ours["time_us"] if timing["time_us"] else None
        wanted = measurement.peer_targets.get(name)
        peers.append({"name": name, **timing, "ratio": ratio, "target": wanted,
                      "error": race.errors.get(name)})  # fmt: skip
    names = ("family", "name", "bound", "num_bytes", "num_flops", "num_sets", "target")
    together = measurement.num_bytes * measurement.num_sets
    return {
        **{name: getattr(measurement, name) for name in names},
        **ours,
        "gb_per_s": measurement.num_bytes / seconds / 1e9,
        "tflop_per_s": measurement.num_flops / seconds / 1e12,
        "cached": measurement.bound == "copy" and together < 2 * gpu.cache_bytes,
        "peers": peers,
    }


def described(error: Exception) -> str:
    """The first line of an error, with its type: the rest of a CUDA error is advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
