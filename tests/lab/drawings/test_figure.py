"""The figure has a patch for each span, and the widget holds the page."""

import html
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from minillm.errors import ConfigError, UnsupportedFeatureError
from minillm.lab.drawings.figure import IDLE, STATES, figure, widget
from minillm.lab.drawings.figure_panels import FREE, USED, block_image, owner_colour, shared_runs
from minillm.lab.drawings.page import page
from minillm.lab.drawings.timeline import timeline
from minillm.lab.simulated_drafts import SimulatedDrafts
from minillm.lab.simulation import Simulation
from tests.trace.simulation import data


@pytest.fixture(scope="module", params=["recompute", "swap"])
def drawing(request: pytest.FixtureRequest) -> dict[str, Any]:
    return data(30, 24, mode=request.param, pause=4, seed=2)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    before = plt.get_fignums()  # other tests of this process may have left some
    yield
    assert plt.get_fignums() == before  # a notebook would show it twice


def ax_of(fig: Figure, name: str) -> Any:
    (ax,) = (ax for ax in fig.axes if ax.get_label() == name)
    return ax


def patches(fig: Figure, panel: str) -> dict[str, PolyCollection]:
    """The collections of a panel by their gid."""
    found = ax_of(fig, panel).collections
    return {c.get_gid(): c for c in found if isinstance(c, PolyCollection)}


def bars(sequence: dict[str, Any]) -> Iterator[str]:
    """The kind of each bar: idle spans that differ in their reason only are one."""
    for kind, spans in groupby(sequence["spans"], lambda span: span[0]):
        yield from [kind] * (1 if kind in IDLE else len(list(spans)))


def test_each_span_has_a_patch_of_its_columns(drawing: dict[str, Any]) -> None:
    counts = Counter(kind for sequence in drawing["sequences"] for kind in bars(sequence))
    widths: Counter[str] = Counter()
    for kind, first, last, *_ in (span for s in drawing["sequences"] for span in s["spans"]):
        widths[kind] += last - first + 1
    drawn = patches(figure(drawing), "gantt")
    assert {kind: len(c.get_paths()) for kind, c in drawn.items()} == counts
    assert {kind: round(sum(path.get_extents().width for path in c.get_paths()))
            for kind, c in drawn.items()} == widths  # fmt: skip
    assert {"w", "d", "p"} < set(drawn)
    assert set(drawn) & {"x", "o"}
    looks = {(state.height, state.hatch) for state in STATES.values()}  # without colour
    assert len(looks) == len(STATES) == len({state.colour for state in STATES.values()})


def test_drafts_are_filled_as_far_as_they_were_accepted() -> None:
    sim = Simulation(40, 4, max_num_seqs=3, speculation=SimulatedDrafts((0.8, 0.6, 0.5)))
    for number in range(6):
        sim.add(6, 9 + number, n=1 + number % 2)
    records = [one for record in sim.run() for one in record.drafted if one.num_drafted]
    drawn = patches(sim.trace.figure(), "gantt")
    filled, hollow = drawn["accepted draft"], drawn["rejected draft"]
    assert len(filled.get_paths()) == sum(one.num_accepted for one in records) > 5
    wanted = sum(one.num_drafted - one.num_accepted for one in records)
    assert len(hollow.get_paths()) == wanted > 5
    for column in range(len(sim.trace)):  # in each cell a stack: accepted ones below the others
        here = [one for one in sim.trace[column].drafted if one.num_drafted]
        ends = [
            [path.get_extents() for path in c.get_paths() if int(path.get_extents().x0) == column]
            for c in (filled, hollow)
        ]
        assert len(ends[0]) == sum(one.num_accepted for one in here)
        for box in (*ends[0], *ends[1]):
            row = round((box.y0 + box.y1) / 2)
            others = [o for o in ends[1] if round((o.y0 + o.y1) / 2) == row]
            assert row - 0.41 < box.y0 < box.y1 < row + 0.41
            if box in ends[0]:  # the axis points down
                assert all(other.y1 <= box.y0 + 1e-9 for other in others)
    assert filled.get_facecolor().tolist() != hollow.get_facecolor().tolist()
    for data_of, named in ((timeline(sim.trace), True), (data(8, 24), False)):
        labels = {text.get_text() for text in figure(data_of).legends[0].get_texts()}
        assert ({"accepted draft", "rejected draft"} <= labels) == named


def test_any_name_is_a_label() -> None:
    names = ("$x^$ \\frac{", "a\nb", "x" * 300, "</script>", "שלום")
    fig = figure(data(5, 24, names=names))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a font without a letter
        fig.canvas.draw()
    labels = [label.get_text() for label in ax_of(fig, "gantt").get_yticklabels()]
    assert {"$x^$ \\frac{", "a·b", "x" * 23 + "…"} <= set(labels)


def test_curves_are_the_columns(drawing: dict[str, Any]) -> None:
    names = ("queue", "budget", "free", "time")
    fig, steps = figure(drawing, panels=names), drawing["steps"]
    assert [ax.get_label() for ax in fig.axes] == [*names]  # from top to bottom
    stairs = {
        (name, patch.get_label()): patch.get_data()
        for name in names
        for patch in ax_of(fig, name).patches
    }
    assert list(stairs["queue", "waiting"].values) == steps["waiting"]
    assert list(stairs["free", "free"].values) == steps["free"]
    total = np.add(steps["prefill"], steps["decode"])
    assert list(stairs["budget", "recomputed"].values) == list(total)  # the top of the stack
    took = np.add(np.add(steps["plan"], steps["run"]), steps["deliver"])
    np.testing.assert_allclose(stairs["time", "deliver"].values, took * 1e3)
    limits = [line.get_ydata()[0] for line in ax_of(fig, "budget").lines]
    assert limits == [drawing["meta"]["max_num_batched_tokens"]]
    far = drawing | {"meta": drawing["meta"] | {"max_num_batched_tokens": 10**6}}
    assert ax_of(figure(far), "budget").get_ylim()[1] < 100  # it would be a flat line


def holders(drawing: dict[str, Any], block: int, column: int) -> list[int] | None:
    """Who holds a block when a step is over; None: nobody ever has."""
    before = [names for at, names in drawing["blocks"][block] if at <= column]
    return before[-1] if before else None


def test_the_block_map_shows_the_owner_of_every_block(drawing: dict[str, Any]) -> None:
    image = block_image(drawing)
    assert image.shape == (len(drawing["blocks"]), len(drawing["steps"]["step"]), 3)
    for block, row in enumerate(image):
        for column, pixel in enumerate(row):
            held = holders(drawing, block, column)
            expected = FREE if held is None else owner_colour(held[0]) if held else USED
            assert tuple(pixel) == expected, (block, column)


def test_shared_stretches_are_hatched(drawing: dict[str, Any]) -> None:
    cells = {
        (block, column, run.holders)
        for run in shared_runs(drawing)
        for block in range(run.block, run.end)
        for column in range(run.first, run.last)
    }
    expected = {
        (block, column, len(held))
        for block in range(len(drawing["blocks"]))
        for column in range(len(drawing["steps"]["step"]))
        if len(held := holders(drawing, block, column) or []) > 1
    }
    assert cells == expected
    assert expected
    collection = patches(figure(drawing), "blocks")["shared"]
    assert len(collection.get_paths()) == len(shared_runs(drawing))
    assert collection.get_hatch()


def test_an_empty_trace_is_an_empty_figure() -> None:
    figure(data(0, 8)).canvas.draw()


@pytest.mark.parametrize(
    ("panels", "message"),
    [(("gant",), "Did you mean 'gantt'"), ((), "must be names"), ("gantt", "must be names")],
)
def test_a_wrong_panel_is_one_sentence(panels: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        figure({}, panels=panels)


@pytest.mark.parametrize(
    ("module", "call"), [("matplotlib.pyplot", figure), ("ipywidgets", widget)]
)
def test_a_missing_library_says_what_to_install(module, call, monkeypatch, drawing):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnsupportedFeatureError, match=r'pip install "minillm-course\[course\]"'):
        call(drawing)


def test_two_widgets_each_hold_the_page(drawing: dict[str, Any]) -> None:
    one, other = widget(drawing, height=400), widget(drawing, title='"><script>')
    for made, title in ((one, "trace"), (other, '"><script>')):
        (frame,) = re.findall(r"<iframe (.*?)></iframe>", made.value, re.DOTALL)
        attributes = dict(re.findall(r'(\w+)="(.*?)"', frame, re.DOTALL))
        assert html.unescape(attributes["srcdoc"]) == page(drawing, title)
        assert attributes["sandbox"] == "allow-scripts"
        assert made.value.count("<") == 2
    assert "height: 400px" in one.value


def test_a_large_pool_shows_only_what_was_used() -> None:
    drawing = data(3, 400)
    used = sum(map(bool, drawing["blocks"]))
    ax = ax_of(figure(drawing, panels=["blocks"]), "blocks")
    assert ax.images[0].get_array().shape[0] == used < 200
    assert ax.get_ylabel() == "blocks in use"
    large = data(200, 40, pause=9)  # a large map is thinned
    assert block_image(large).shape[1] <= 1200 < len(large["steps"]["step"])


def test_many_rows_are_limited_and_that_is_said() -> None:
    fig = figure(data(30, 24), rows=10, width=5, height=4, title="a title")
    ax = ax_of(fig, "gantt")
    assert "the first 10 of" in ax.get_title(loc="right")
    assert (ax.get_title(loc="left"), *fig.get_size_inches()) == ("a title", 5, 4)
    assert ax.get_ylim()[0] == pytest.approx(9.6)


def test_steps_are_numbered_as_in_the_trace(drawing: dict[str, Any]) -> None:
    later = drawing | {
        "steps": drawing["steps"] | {"step": [s + 99 for s in drawing["steps"]["step"]]}
    }
    ax = figure(later).axes[-1]
    places = zip(ax.get_xticks(), ax.get_xticklabels(), strict=True)
    ticks = {label.get_text(): column for column, label in places}
    assert len(ticks) > 2
    assert ticks == {f"{column + 100:.0f}": column for column in ticks.values()}
    assert all(int(number) % 5 == 0 for number in ticks)


def test_a_few_blocks_are_named_in_the_middle_of_their_rows():
    """Read as "block 1", a row must not lie between 1 and 2."""
    simulation = Simulation(9, 4)
    simulation.add(6, 6)
    fig = simulation.run().figure(panels=("blocks",))
    ax = ax_of(fig, "blocks")
    labels = {label.get_text(): label.get_position()[1] for label in ax.get_yticklabels()}
    assert labels == {f"{block}": row + 0.5 for row, block in enumerate(range(3))}
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["free again"]
