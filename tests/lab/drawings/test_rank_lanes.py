"""The lanes of the drawings: what each rank did in each step. With one rank there are none."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from minillm.errors import ConfigError
from minillm.lab.drawings.figure import figure
from minillm.lab.drawings.figure_panels import LANE
from minillm.lab.drawings.timeline import rank_lanes, timeline
from minillm.scheduling.record import RankTime
from minillm.trace.recorder import Trace
from tests.lab.drawings.test_page import ask, node
from tests.trace.simulation import data, simulate, with_ranks

NUMBERS = (2, 3, 24)


@pytest.fixture(scope="module", params=NUMBERS)
def trace(request: pytest.FixtureRequest) -> Trace:
    return with_ranks(simulate(6, 24), request.param, slow=1)


def labels(fig: Figure) -> list[str]:
    return [str(ax.get_label()) for ax in fig.axes]


def test_lanes_have_the_seconds_of_the_records(trace: Trace) -> None:
    lanes = timeline(trace)["ranks"]
    assert [lane["rank"] for lane in lanes] == list(range(len(trace[0].ranks)))
    for column, record in enumerate(trace):
        for lane, time in zip(lanes, record.ranks, strict=True):
            assert lane["communicating"][column] == time.communicating
            both = lane["computing"][column] + lane["communicating"][column]
            assert both == pytest.approx(time.seconds)


def drawn(fig: Figure) -> dict[str, StepPatch]:
    """The parts of the lanes by gid, such as "computing 1"."""
    (ax,) = (ax for ax in fig.axes if ax.get_label() == "ranks")
    return {str(each.get_gid()): each for each in ax.patches if isinstance(each, StepPatch)}


def test_a_lane_is_as_high_as_the_slowest_rank_took(trace: Trace) -> None:
    drawing = timeline(trace)
    parts = drawn(figure(drawing, panels=("ranks",)))
    assert len(parts) == 2 * len(drawing["ranks"])
    slowest = [max(time.seconds for time in record.ranks) for record in trace]
    for row, lane in enumerate(drawing["ranks"]):
        below = np.full(len(slowest), row + LANE / 2)
        for part in ("computing", "communicating"):
            found = parts[f"{part} {row}"].get_data()
            height = LANE * np.divide(lane[part], slowest)
            np.testing.assert_allclose(found.baseline, below)
            np.testing.assert_allclose(found.values, below - height)
            below = found.values
        top = row - LANE / 2  # which rank 0 does not reach: it is done sooner
        assert (below > top + 0.01).all() if row == 0 else np.allclose(below, top)


def test_one_rank_has_no_lane() -> None:
    one = with_ranks(simulate(6, 24), 1)
    assert data(6, 24)["ranks"] == timeline(one)["ranks"] == rank_lanes([]) == []
    assert labels(one.figure(panels=("ranks", "gantt"))) == ["gantt"]
    with pytest.raises(ConfigError, match="the times of fewer than 2 ranks; choose another panel"):
        one.figure(panels=("ranks",))


def test_a_step_without_times_is_an_empty_place() -> None:
    trace = with_ranks(simulate(6, 24), 2)
    trace[3].ranks = []
    for lane in rank_lanes(list(trace)):
        assert lane["computing"][3] == lane["communicating"][3] == 0
        assert len(lane["computing"]) == len(trace)
    fig = trace.figure()
    fig.canvas.draw()
    found = drawn(fig)["communicating 0"].get_data()
    assert found.values[3] == found.baseline[3] == LANE / 2


ASK = """
const { data, columns } = JSON.parse(require("fs").readFileSync(0, "utf-8"));
const model = new Model(data), words = new Words(model);
console.log(JSON.stringify({
  shares: laneShares(model.ranks, columns).map((parts) => parts.map((part) => [...part])),
  words: model.ranks.map((_, rank) => words.rank(rank, 1)),
}));
"""


@node
def test_the_scripts_add_up_the_steps_of_a_pixel() -> None:
    """Columns 1 and 2 share pixel 1, column 3 has pixels 2 and 3, and pixels 0 and 4 are empty."""
    trace = with_ranks(simulate(6, 24), 2)
    times = {1: [(8, 2), (8, 6)], 2: [(4, 4), (2, 1)], 3: [(10, 5), (5, 0)]}  # seconds, of these
    for column, ranks in times.items():
        trace[column].ranks = [RankTime(rank, *each) for rank, each in enumerate(ranks)]
    columns = {"first": 1, "begin": [1, 1, 2], "end": [1, 2, 4], "pixels": 5}
    given = {"data": timeline(trace), "columns": columns}
    found = ask(("model", "words", "raster", "ranks"), ASK, given)
    shares = np.array(found["shares"])  # [ranks, computing and communicating, pixels]
    np.testing.assert_allclose(shares[0, 0], [0, 6 / 12, 0.5, 0.5, 0])
    np.testing.assert_allclose(shares[0, 1], [0, 6 / 12, 0.5, 0.5, 0])
    np.testing.assert_allclose(shares[1, 0], [0, 3 / 12, 0.5, 0.5, 0])
    np.testing.assert_allclose(shares[1, 1], [0, 7 / 12, 0.0, 0.0, 0])
    assert found["words"] == ["6 s + 2 s", "2 s + 6 s"]
