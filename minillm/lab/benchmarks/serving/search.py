"""Searches the highest rate that keeps an attainment, and the cost of tokens there.

The search doubles or halves the rate until it has a rate that keeps the target and one that does
not, and then bisects. Attainment is assumed to fall with the rate; it is measured, so the result
varies with the arrivals of the seed within the printed bounds.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_STEPS = 12  # doublings or halvings
TOKENS = 1e6  # tokens per dollar are in millions


@dataclass
class Found:
    """The result of a search.

    Attributes:
        keeps: highest rate measured that keeps the target; None if no rate does.
        misses: lowest rate measured above it that does not; None if all rates do.
        probes: attainment by rate, in the order of measurement.
    """

    keeps: float | None = None
    misses: float | None = None
    probes: dict[float, float] = field(default_factory=dict)


async def highest_rate(
    attainment: Callable[[float], Awaitable[float]],
    start: float,
    target: float,
    tolerance: float,
) -> Found:
    """Search until the two bounds differ by at most the relative `tolerance`."""
    found = Found()

    async def keeps(rate: float) -> bool:
        found.probes[rate] = await attainment(rate)
        kept = found.probes[rate] >= target
        if kept:
            found.keeps = rate
        else:
            found.misses = rate
        return kept

    factor = 2.0 if await keeps(start) else 0.5
    rate = start
    for _ in range(MOST_STEPS):
        if found.keeps is not None and found.misses is not None:
            break
        rate *= factor
        await keeps(rate)
    while (
        found.keeps is not None
        and found.misses is not None
        and found.misses > found.keeps * (1 + tolerance)
    ):
        await keeps((found.keeps + found.misses) / 2)
    return found


def cost(summary: Mapping[str, Any], dollars_per_hour: float) -> dict[str, Any]:
    """Millions of tokens per dollar at one load, input and output separately. Both are of the whole
    run, with the time after the last arrival."""
    per = 3600 / TOKENS / dollars_per_hour
    return {
        "dollars_per_hour": dollars_per_hour,
        "input_tokens_per_second": summary["input_throughput"],
        "output_tokens_per_second": summary["output_throughput"],
        "input_mtok_per_dollar": per * summary["input_throughput"],
        "output_mtok_per_dollar": per * summary["output_throughput"],
    }
