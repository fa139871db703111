"""How long decode steps take with and without drafts, measured while the engine runs.

    ratio to a plain step of the same batch
      2.0 |                          o
          |                 o
      1.0 |  o     o  o                          a proposer without an answer is the point at 0
          +--+-----+--+-----+--------+------
             0     1  2     4        8           drafts per row of the batch

Plain steps have one typical time per batch size. The ratios have one curve per class of batch sizes
(1, 2 to 3, 4 to 7, ...), a line through what is typical of neighbouring counts: it knows no law, so
it fits a processor whose cost grows with each row as well as one that has rows to spare. The time
of the proposer is part of the step.
"""

from bisect import bisect_left

WINDOW = 9  # samples of a typical time
OUTLIER = 2.0  # a disturbed step counts as at most so many times what was expected
RECENT = 0.05  # weight of a new step in the mean of disturbances
LIMITS = (0.0, 0.18, 0.36, 0.72, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 10.0, 13.0)
GUESS = ((0.0, 1.02), (1.0, 1.25), (8.0, 2.65))  # where nothing was measured
NEAR = 1 / 8  # batches that differ by no more take about as long
HOPED = 0.2  # slope beyond the only measured point: often the first draft costs most
OLD = 512  # samples of a class after which a time is not believed any more
Point = tuple[float, float]  # drafts per row, ratio


class Typical:
    """The time that recent samples agree on: what disturbs a step only makes it longer, so it is
    the third of the nine last ones, or as far up in fewer."""

    __slots__ = ("at", "last", "samples", "value")

    def __init__(self) -> None:
        self.samples: list[float] = []
        self.value = self.at = 0.0
        self.last = 0

    def add(self, value: float, at: float = 0.0) -> None:
        """A sample; `at` is where on a curve it was taken."""
        self.samples = [*self.samples[1 - WINDOW :], value]
        self.value = sorted(self.samples)[(len(self.samples) - 1) // 4]
        self.at += (at - self.at) / len(self.samples)


class StepTimes:
    """What was measured, and what follows from it for other batches and drafts."""

    def __init__(self) -> None:
        self._plain: dict[int, Typical] = {}
        # Of each class of batches, by place in `LIMITS`.
        self._nodes: dict[int, dict[int, Typical]] = {}
        self._curves: dict[int, list[Point]] = {}
        self._samples: dict[int, int] = {}
        self.disturbance = 1.0  # mean time of plain steps over typical time

    def add_plain(self, batch: int, seconds: float) -> None:
        """A step without drafts took so long."""
        typical = self._plain.get(batch)
        if typical is None:
            typical = self._plain[batch] = Typical()
        typical.add(seconds)
        ratio = min(max(seconds / typical.value, 1.0), OUTLIER)
        self.disturbance += RECENT * (ratio - self.disturbance)

    def plain(self, batch: int) -> float | None:
        """Seconds of a step without drafts, from its neighbours if it was not measured itself;
        None where they are too far away."""
        if batch in self._plain:
            return self._plain[batch].value
        below = max((each for each in self._plain if each < batch), default=None)
        above = min((each for each in self._plain if each > batch), default=None)
        if below is not None and above is not None and above <= 2 * below:
            low, high = self._plain[below].value, self._plain[above].value
            return low + (high - low) * (batch - below) / (above - below)
        for near in (below, above):
            if near is not None and abs(near - batch) <= NEAR * batch:
                return self._plain[near].value
        return None

    def add(self, batch: int, drafts: float, ratio: float, is_rare: bool = False) -> None:
        """A step with so many drafts per row took `ratio` times a plain one. A rare one, after a
        pause in which the proposer missed something, counts only if it took no longer than others.
        """
        nodes = self._nodes.setdefault(batch.bit_length(), {})
        node = nodes.setdefault(bisect_left(LIMITS, drafts), Typical())
        if is_rare and node.samples and ratio > node.value:
            return
        if not node.samples:
            ratio = min(ratio, OUTLIER * at(self.curve(batch), drafts))
        node.add(ratio, drafts)
        samples = self._samples.get(batch.bit_length(), 0) + 1
        self._samples[batch.bit_length()] = node.last = samples
        self._curves.pop(batch.bit_length(), None)

    def curve(self, batch: int) -> list[Point]:
        """Drafts per row and ratio, both in ascending order."""
        size = batch.bit_length()
        found = self._curves.get(size)
        if found is None:
            found = self._curves[size] = self._make_curve(size)
        return found

    def _make_curve(self, size: int) -> list[Point]:
        if size not in self._samples:
            near = min(self._samples, key=lambda other: abs(other - size), default=None)
            return list(GUESS) if near is None else self._make_curve(near)
        newest, points = self._samples[size], list[Point]()
        for _, node in sorted(self._nodes[size].items()):
            if node.samples and newest - node.last <= OLD:
                least = points[-1][1] if points else 0.0
                points.append((node.at, max(node.value, least)))
        known = len(points)
        if points[0][0] > 0:
            points.insert(0, (0.0, min(GUESS[0][1], points[0][1])))
        if known < 3 or points[-2][0] < LIMITS[3]:
            x1, y1 = points[-1]
            slope = HOPED
            if len(points) > 1:
                x0, y0 = points[-2]
                slope = min((y1 - y0) / (x1 - x0), HOPED)
            points.append((x1 + 1, y1 + slope))
        return points

    def reach(self, batch: int) -> float:
        """Drafts per row that may be tried next: twice what was measured, so that no step is far
        from a known one."""
        nodes = self._nodes.get(batch.bit_length(), {}).values()
        return max(1.0, 2 * max((node.at for node in nodes), default=0.0))


def at(curve: list[Point], drafts: float) -> float:
    """The ratio at so many drafts per row; beyond its ends the curve goes straight on."""
    place = min(max(bisect_left(curve, (drafts, 0.0)), 1), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[place - 1], curve[place]
    return y0 + (y1 - y0) * (drafts - x0) / (x1 - x0)
