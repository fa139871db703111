"""What a benchmark found, as plain data that travels between processes and into JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any, Literal

from minillm_kernels.bench.case import Measurement

How = Literal["graph", "launches"]


@dataclass(frozen=True)
class Timing:
    """Repeated timings of one implementation.

    Attributes:
        seconds: of one call, the median.
        spread: distance of the quartiles as a share of the median; a difference between two
            implementations that is smaller than this is noise.
        repeats: timings taken.
        calls: in one timing.
        how: replays of a CUDA graph; or launches one by one, where capture failed, which
            counts the host's work for small kernels.
    """

    seconds: float
    spread: float
    repeats: int
    calls: int
    how: How

    @classmethod
    def of(cls, samples: Sequence[float], calls: int, how: How) -> "Timing":
        """From the seconds per call of each timing."""
        middle = median(samples)
        low, _, high = quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else (0,) * 3
        return cls(middle, (high - low) / middle, len(samples), calls, how)


@dataclass(frozen=True)
class Peer:
    """Another implementation of the same operation: its timing, or why it has none."""

    name: str
    timing: Timing | None
    error: str | None = None
    target: float | None = None


@dataclass(frozen=True)
class Result:
    """One `Measurement`, done: a timing, or an `error`, or the reason why it was `left_out`."""

    family: str
    name: str
    bound: str
    num_bytes: int
    num_flops: int
    num_sets: int
    target: float | None
    timing: Timing | None = None
    peers: tuple[Peer, ...] = ()
    error: str | None = None
    left_out: str | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, measurement: Measurement, **found: Any) -> "Result":
        """What is known of a measurement, and what was found."""
        fields = ("family", "name", "bound", "num_bytes", "num_flops", "num_sets", "target")
        return cls(**{name: getattr(measurement, name) for name in fields}, **found)

    @classmethod
    def unmeasured(cls, family: str, name: str, **why: str) -> "Result":
        """A measurement of which nothing is known but its name."""
        return cls(family, name, "copy", 0, 0, 0, None, **why)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Result":
        """What `to_json` wrote."""
        peers = tuple(Peer(**{**peer, "timing": _timing(peer)}) for peer in data["peers"])
        whole = {**data, "timing": _timing(data), "peers": peers, "notes": tuple(data["notes"])}
        return cls(**whole)


def _timing(data: Mapping[str, Any]) -> Timing | None:
    return Timing(**data["timing"]) if data["timing"] else None
