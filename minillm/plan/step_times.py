"""Times of decode steps with and without drafts, measured while the engine runs.

    step time, relative to a plain step (without drafts) of the same batch
      2.0 |                          o
          |                 o
      1.0 |  o     o  o                          at 0: the proposer found no drafts
          +--+-----+--+-----+--------+------
             0     1  2     4        8           drafts per row of the batch

Plain steps have one typical time per batch size. The relative times have one curve per class of
batch sizes (1, 2 to 3, 4 to 7, ...): straight lines between measured points. There is no cost
model, so the curves fit devices whose step time grows with every token as well as devices with
spare compute. The time of a step includes the proposer.
"""

from bisect import bisect_left

WINDOW = 9  # last samples that a typical time is taken from
OUTLIER = 2.0  # cap on measured over expected step time
# Upper edges of the bins of drafts per row; each bin gives one point of a curve.
BIN_EDGES = (0.0, 0.18, 0.36, 0.72, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 10.0, 13.0)
DEFAULT_CURVE = ((0.0, 1.02), (1.0, 1.25), (8.0, 2.65))  # the curve before any measurement
NEAR_BATCH = 1 / 8  # relative difference up to which batch sizes count as equally fast
MAX_SLOPE = 0.2  # per draft, of the extrapolation from less than one draft per row
Point = tuple[float, float]  # drafts per row, relative time


class Typical:
    """The typical value of recent samples: the third smallest of the last nine.

    A low quantile, because disturbances only make steps longer. `at` is the mean position of the
    samples on the curve.
    """

    __slots__ = ("at", "samples", "value")

    def __init__(self) -> None:
        self.samples: list[float] = []
        self.value = self.at = 0.0

    def add(self, value: float, at: float = 0.0) -> None:
        """Add a sample, taken at `at` drafts per row."""
        self.samples = [*self.samples[1 - WINDOW :], value]
        self.value = sorted(self.samples)[(len(self.samples) - 1) // 4]
        self.at += (at - self.at) / len(self.samples)


class StepTimes:
    """Measured step times, and predictions for other batch sizes and draft counts."""

    def __init__(self) -> None:
        self._plain: dict[int, Typical] = {}
        # By batch class (bit length of the batch size); points by index into `BIN_EDGES`.
        self._nodes: dict[int, dict[int, Typical]] = {}
        self._curves: dict[int, list[Point]] = {}

    def add_plain(self, batch: int, seconds: float) -> None:
        """Add the time of a plain step."""
        typical = self._plain.get(batch)
        if typical is None:
            typical = self._plain[batch] = Typical()
        typical.add(seconds)

    def plain(self, batch: int) -> float | None:
        """Seconds of a plain step, interpolated between neighbouring batch sizes if necessary; None
        if these are too far away."""
        if batch in self._plain:
            return self._plain[batch].value
        below = max((measured for measured in self._plain if measured < batch), default=None)
        above = min((measured for measured in self._plain if measured > batch), default=None)
        if below is not None and above is not None and above <= 2 * below:
            low, high = self._plain[below].value, self._plain[above].value
            return low + (high - low) * (batch - below) / (above - below)
        for near in (below, above):
            if near is not None and abs(near - batch) <= NEAR_BATCH * batch:
                return self._plain[near].value
        return None

    def add(self, batch: int, drafts: float, ratio: float) -> None:
        """Add a step with `drafts` per row that took `ratio` times as long as a plain one."""
        size, place = batch.bit_length(), bisect_left(BIN_EDGES, drafts)
        if place not in self._nodes.get(size, ()):
            ratio = min(ratio, OUTLIER * at(self.curve(batch), drafts))
        self._nodes.setdefault(size, {}).setdefault(place, Typical()).add(ratio, drafts)
        self._curves.pop(size, None)

    def curve(self, batch: int) -> list[Point]:
        """Points (drafts per row, relative time), both ascending."""
        size = batch.bit_length()
        curve = self._curves.get(size)
        if curve is None:
            curve = self._curves[size] = self._make_curve(size)
        return curve

    def _make_curve(self, size: int) -> list[Point]:
        if size not in self._nodes:
            near = min(self._nodes, key=lambda other: abs(other - size), default=None)
            return list(DEFAULT_CURVE) if near is None else self._make_curve(near)
        points = list[Point]()
        for _, node in sorted(self._nodes[size].items()):
            least = points[-1][1] if points else 0.0
            points.append((node.at, max(node.value, least)))
        known = len(points)
        if points[0][0] > 0:
            points.insert(0, (0.0, min(DEFAULT_CURVE[0][1], points[0][1])))
        if known < 3 or points[-2][0] < BIN_EDGES[3]:
            x1, y1 = points[-1]
            slope = MAX_SLOPE
            if len(points) > 1:
                x0, y0 = points[-2]
                slope = (y1 - y0) / (x1 - x0)
                slope = slope if x1 >= 1 else min(slope, MAX_SLOPE)  # less is mostly noise
            points.append((x1 + 1, y1 + slope))
        return points

    def reach(self, batch: int) -> float:
        """Maximum drafts per row for the next step: twice the largest measured, so that the time
        of every step can be predicted."""
        nodes = self._nodes.get(batch.bit_length(), {}).values()
        return max(1.0, 2 * max((node.at for node in nodes), default=0.0))


def at(curve: list[Point], drafts: float) -> float:
    """Relative time at `drafts` per row, by linear interpolation or extrapolation."""
    place = min(max(bisect_left(curve, (drafts, 0.0)), 1), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[place - 1], curve[place]
    return y0 + (y1 - y0) * (drafts - x0) / (x1 - x0)
