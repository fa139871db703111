"""The knee of a sweep: the load from which on a higher load costs more than it brings."""

from collections.abc import Mapping, Sequence
from typing import Any

LEAST_POINTS = 3
CLEAR = 0.05  # of the range; a curve closer to its chord has no knee


def knee(points: Sequence[Mapping[str, Any]], target: float) -> dict[str, Any] | None:
    """With an SLO: the highest load up to which every load keeps the target attainment. Without:
    the point of the output throughput that is farthest above the chord from the first to the last
    point. None if there is no such load."""
    known = sorted((one for one in points if one["load"] is not None), key=lambda one: one["load"])
    if not known:
        return None
    if all(one["attainment"] is not None for one in known):
        kept = None
        for one in known:
            if one["attainment"]["median"] < target:
                break
            kept = one["load"]
        missed = any(one["attainment"]["median"] < target for one in known)
        if kept is None or not missed:
            return None
        return {"load": kept, "why": f"highest load with attainment of {target:.0%}"}
    return bend(known)


def bend(known: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The point farthest above the chord of the output throughput."""
    curve = [(one["load"], one["output_throughput"]["median"]) for one in known]
    (first_x, first_y), (last_x, last_y) = curve[0], curve[-1]
    if len(curve) < LEAST_POINTS or last_x <= first_x:
        return None
    height = max(y for _, y in curve) - min(y for _, y in curve)
    above = [
        y - (first_y + (last_y - first_y) * (x - first_x) / (last_x - first_x)) for x, y in curve
    ]
    best = max(range(len(curve)), key=lambda place: above[place])
    if height <= 0 or above[best] < CLEAR * height:
        return None
    return {"load": curve[best][0], "why": "bend of the output throughput"}
