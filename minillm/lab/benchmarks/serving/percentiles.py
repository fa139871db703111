"""Statistics of values: mean, deviation and percentiles with numpy's linear interpolation."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

QUANTILES = (50, 90, 99)


def percentile(values: Sequence[float], q: float) -> float:
    """The percentile `q` by linear interpolation, as ``numpy.percentile``. Values may be infinite:
    a result between a finite and an infinite value is infinite, where numpy gives NaN."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    if low == high:  # both may be infinite
        return high
    return low + (high - low) * (place - math.floor(place))


def statistics(values: Sequence[float | None]) -> dict[str, Any] | None:
    """JSON data of the values that are defined; None if there are none. Infinite values, which
    stand for failures, become null."""
    given = [value for value in values if value is not None]
    if not given:
        return None
    finite = [value for value in given if math.isfinite(value)]
    found: dict[str, Any] = {"count": len(given)}
    if len(finite) == len(given):
        found |= {"mean": float(np.mean(given)), "std": float(np.std(given)), "max": max(given)}
    quantiles = {f"p{q}": percentile(given, q) for q in QUANTILES}
    return found | {name: (at if math.isfinite(at) else None) for name, at in quantiles.items()}
