"""Runs at several loads: a sweep, or a search for the highest rate that keeps an attainment; and
the figures of each load, and the knee.

The search doubles or halves the rate until it has a rate that keeps the target and one that does
not, and then bisects. Attainment is assumed to fall with the rate; it is measured, so the result
varies with the arrivals of the seed within the printed bounds.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np

from minillm.lab.benchmarks.serving.bench import Bench, name_of

MOST_STEPS = 12  # doublings or halvings of a search
Point = Mapping[str, Any]


async def sweep(bench: Bench) -> list[dict[str, Any]]:
    """All loads with all repeats; returns a point for each load."""
    plan = bench.plan
    return [await play(bench, load, name_of(load, plan.arrivals is None)) for load in plan.loads]


async def play(bench: Bench, load: float, shown: str) -> dict[str, Any]:
    """All repeats of one load, as a point."""
    repeats = bench.plan.repeats
    for repeat in range(repeats):
        which = f", repeat {repeat + 1} of {repeats}" if repeats > 1 else ""
        await bench.run(load, repeat, shown + which)
    return point(load, bench.runs[-repeats:])


def point(load: float, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A load's figures over its repeats: median, least and most of each; None if no repeat has
    it."""
    figures = [flat(run["summary"]) for run in runs]
    found: dict[str, Any] = {"load": load if math.isfinite(load) else None}
    for name in figures[0]:
        given = [one[name] for one in figures if one[name] is not None]
        found[name] = (
            {"median": float(np.median(given)), "least": min(given), "most": max(given)}
            if given
            else None
        )
    return found


def flat(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a run that tables and plots show."""
    sent, offered = max(summary["sent"], 1), summary["offered"] or summary
    slo = summary["slo"] or {}
    latencies = {
        f"{name}_{which}": (one or {}).get(which)
        for name, one in summary["latencies"].items()
        for which in ("p50", "p90", "p99", "max")
    }
    asked = offered.get("request_rate", 0.0) * summary["output_tokens"] / max(summary["ok"], 1)
    return latencies | {
        "output_throughput": offered["output_throughput"],
        "request_throughput": summary["request_throughput"],
        "asked": asked,
        "rejected": summary["rejected"] / sent,
        "failed": summary["failed"] / sent,
        "attainment": slo.get("attainment"),
        "goodput": slo.get("goodput"),
        "lateness_p99": (summary["lateness"] or {}).get("p99"),
    }


# ---- search -------------------------------------------------------------------------------------


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


async def search(
    bench: Bench, target: float, tolerance: float
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Points at all rates that the search tried, and its result as JSON data. Attainment is over
    all requests of the repeats."""
    points = []

    async def attainment(rate: float) -> float:
        points.append(await play(bench, rate, f"search, {name_of(rate, False)}"))
        runs = [run["summary"] for run in bench.runs[-bench.plan.repeats :]]
        return sum(run["slo"]["good"] for run in runs) / sum(run["sent"] for run in runs)

    found = await highest_rate(attainment, bench.plan.loads[0], target, tolerance)
    keeps, misses, probes = found.keeps, found.misses, found.probes
    return sorted(points, key=lambda one: one["load"]), {
        "target": target, "tolerance": tolerance, "keeps": keeps, "misses": misses,
        "keeps_attainment": None if keeps is None else probes[keeps],
        "misses_attainment": None if misses is None else probes[misses],
        "probes": len(probes), "attainment_by_rate": list(probes.items()),
    }  # fmt: skip


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

    rate, factor = start, 2.0 if await keeps(start) else 0.5
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


# ---- knee ---------------------------------------------------------------------------------------


def by_load(points: Sequence[Point]) -> list[Point]:
    """The points in the order of their loads, without that of all requests at once."""
    known = [one for one in points if one["load"] is not None]
    return sorted(known, key=lambda one: float(one["load"]))


def knee(points: Sequence[Point], target: float) -> dict[str, Any] | None:
    """The highest load up to which every load keeps the target attainment; None without an SLO, or
    if all loads or none of them keep it."""
    known = by_load(points)
    if not known or any(one["attainment"] is None for one in known):
        return None
    kept = [*takewhile(lambda one: one["attainment"]["median"] >= target, known)]
    if len(kept) in (0, len(known)):
        return None
    return {"load": kept[-1]["load"], "why": f"highest load with attainment of {target:.0%}"}
