"""Statistics of values: mean, deviation and percentiles."""

from collections.abc import Sequence
from typing import Any

import numpy as np

QUANTILES = (50, 90, 99)


def percentile(values: Sequence[float], q: float) -> float:
    """The percentile `q` by linear interpolation."""
    return float(np.percentile(values, q))


def statistics(values: Sequence[float | None]) -> dict[str, Any] | None:
    """JSON data of the values that are defined; None if there are none."""
    given = [value for value in values if value is not None]
    if not given:
        return None
    found: dict[str, Any] = {"count": len(given), "mean": float(np.mean(given))}
    found |= {"std": float(np.std(given)), "max": max(given)}
    return found | {f"p{q}": percentile(given, q) for q in QUANTILES}
