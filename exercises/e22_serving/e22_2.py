"""e22.2: goodput, rates that hold, and the cheapest choice. The task is in README.md."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Measures = Mapping[str, float | None]


@dataclass(frozen=True)
class Configuration:
    """One replica, for your own trials; the checks pass objects with these fields."""

    name: str
    rate: int | None  # requests per second; None if no rate holds
    tokens: int  # output tokens per second at this rate
    gpus: int
    cents: int  # for one GPU and one hour


def goodput(
    requests: Sequence[Measures | None], limits: Mapping[str, float], seconds: float
) -> tuple[float, float]:
    """Good requests per second, and their share of all requests. None is a request that failed or
    was rejected."""
    raise NotImplementedError("TODO e22.2: count the requests within every limit")


def highest_rate(run: Callable[[int], float], rates: Sequence[int], share: float) -> int | None:
    """The highest of the rising `rates` at which at least two of three runs have an attainment of
    at least `share`; None if there is none. `run(rate)` is one run, and runs are expensive."""
    raise NotImplementedError("TODO e22.2: search by halving, with up to three runs of a rate")


def tokens_per_dollar(configuration: Configuration) -> float:
    """The output tokens that one dollar buys; 0 if no rate holds."""
    raise NotImplementedError("TODO e22.2: tokens of an hour over dollars of an hour")


def cheapest(
    configurations: Sequence[Configuration], demand: int, gpus: int
) -> tuple[str, int] | None:
    """The name and the number of replicas of the cheapest choice that serves `demand` requests per
    second on at most `gpus` GPUs; None if there is none."""
    raise NotImplementedError("TODO e22.2: whole replicas, then cost, GPUs and place")
