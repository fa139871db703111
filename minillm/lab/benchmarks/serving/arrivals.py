"""When requests are sent: constant, Poisson and gamma arrivals, a ramp, a replayed trace.

Gamma arrivals are those of ``vllm bench serve``: the gaps have shape b (the burstiness) and mean
1 / rate, so their coefficient of variation is 1 / sqrt(b). b = 1 is a Poisson process, smaller
values give bursts, and infinity gives constant gaps. Unlike vLLM, times are not rescaled to end at
exactly count / rate, because the process would not be a Poisson process any more.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minillm.errors import ConfigError

MOST_LINES = 1_000_000  # of a replayed trace
UNITS = (("timestamp", 1e-3), ("seconds", 1.0))  # Mooncake's traces are in milliseconds


@dataclass(frozen=True)
class Arrivals:
    """A process of arrivals.

    Attributes:
        rate: requests per second; infinity sends all of them at once.
        burstiness: shape of the gamma distribution of the gaps.
        ramp_to: the rate at the end of a linear ramp that starts at `rate`.
        replayed: given times, in seconds; `rate` is then their average.
    """

    rate: float
    burstiness: float = 1.0
    ramp_to: float | None = None
    replayed: tuple[float, ...] = ()

    def times(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Seconds from the start at which `count` requests are sent, the first of them at 0."""
        if self.replayed:
            return np.asarray(self.replayed[:count], dtype=np.float64)
        if math.isinf(self.rate):
            return np.zeros(count)
        # Arrivals at rate 1, which are then stretched.
        units = np.cumsum(unit_gaps(count, self.burstiness, rng))
        units -= units[:1]
        return units / self.rate if self.ramp_to is None else ramp(units, self.rate, self.ramp_to)

    def describe(self) -> str:
        """The process in words, without its rate."""
        if self.replayed:
            return "arrivals replayed from a trace"
        if math.isinf(self.rate):
            return "all requests at once"
        kind = f"gamma arrivals of burstiness {self.burstiness:g}"
        if self.burstiness == 1:
            kind = "Poisson arrivals"
        elif math.isinf(self.burstiness):
            kind = "constant gaps"
        if self.ramp_to is not None:
            kind += f", ramp from {self.rate:g} to {self.ramp_to:g} requests/s"
        return kind


def unit_gaps(count: int, burstiness: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Gaps with mean 1 and coefficient of variation 1 / sqrt(burstiness)."""
    if math.isinf(burstiness):
        return np.ones(count)
    return rng.gamma(shape=burstiness, scale=1.0 / burstiness, size=count)


def ramp(units: NDArray[np.float64], start: float, end: float) -> NDArray[np.float64]:
    """Stretch arrivals of rate 1 so that their rate grows linearly from `start` to `end`.

    The ramp lasts until as many arrivals are expected as there are; then the rate stays at `end`.
    Until time t, start * t + (end - start) * t^2 / (2 * length) arrivals are expected; this is
    solved for t.
    """
    length = len(units) / ((start + end) / 2)
    slope = (end - start) / length
    inside = np.minimum(units, len(units))
    root = np.sqrt(start**2 + 2 * slope * inside)
    times = 2 * inside / (start + root)
    return np.asarray(times + (units - inside) / end)


@dataclass(frozen=True)
class Recorded:
    """One request of a replayed trace; lengths are 0 where the trace has none."""

    seconds: float
    input_length: int = 0
    output_length: int = 0
    hash_ids: tuple[int, ...] = ()


def read_replay(name: str) -> list[Recorded]:
    """Read a trace: a line of JSON per request, with ``timestamp`` (in milliseconds, as in
    Mooncake's traces) or ``seconds``, and optionally ``input_length``, ``output_length`` and
    ``hash_ids``. Times are shifted to start at 0.

    Raises:
        ConfigError: the file cannot be read, or a line of it is no request.
    """
    try:
        lines = Path(name).read_text("utf-8").splitlines()[:MOST_LINES]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise ConfigError(f"--replay {name}: this file cannot be read ({why}).") from error
    found = [recorded(name, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"--replay {name}: this file has no requests.")
    found.sort(key=lambda one: one.seconds)
    first = found[0].seconds
    return [
        Recorded(one.seconds - first, one.input_length, one.output_length, one.hash_ids)
        for one in found
    ]


def recorded(name: str, number: int, line: str) -> Recorded:
    """The request on one line of a trace."""
    wrong = ConfigError(
        f'--replay {name}: line {number} is no request; write each as {{"timestamp": 1500, '
        '"input_length": 100, "output_length": 50}, with the timestamp in milliseconds.'
    )
    try:
        data = json.loads(line)
        (seconds,) = (float(data[key]) * scale for key, scale in UNITS if key in data)
        length, output = (natural(data.get(key, 0)) for key in ("input_length", "output_length"))
        hashes = tuple(natural(each) for each in data.get("hash_ids") or ())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise wrong from error
    if not math.isfinite(seconds) or seconds < 0:
        raise wrong
    return Recorded(seconds, length, output, hashes)


def natural(value: Any) -> int:
    """`value` if it is an integer of at least 0; raises ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(value)
    return value
