"""The pieces of chapter 00: what they draw of the three bounds, and what they refuse."""

from dataclasses import replace

import pytest

from minillm.models.presets import preset
from minillm.plan.cost import step_cost, step_time
from minillm.plan.hardware import DATASHEET
from minillm_exercises.chapters import ch00

LAPTOP = DATASHEET["laptop-ddr5"]
TOKEN = step_cost(preset("smollm2-135m"), [1], [ch00.CONTEXT], dtype="bfloat16")


@pytest.fixture
def shown(monkeypatch):
    """Figures and captions instead of pictures."""
    drawn = []
    monkeypatch.setattr(ch00, "show", lambda fig, caption: drawn.append((fig, caption)))
    return drawn


def test_a_verdict_names_what_is_impossible_and_grants_a_fifth():
    assert ch00.verdict(1, LAPTOP.bandwidth * 1.1, 1, LAPTOP, "float32") == "possible"
    assert ch00.verdict(1, LAPTOP.bandwidth * 1.3, 1, LAPTOP, "float32").startswith(
        "impossible. The bytes of this measurement need"
    )
    assert "operations" in ch00.verdict(2e12, 1, 1, LAPTOP, "float32")


def test_calls_leave_time_for_so_many_bytes():
    run = ch00.Run("a", TOKEN, 1.0, calls=1000)
    assert ch00.calls_bandwidth(run, LAPTOP) == pytest.approx(TOKEN.total_bytes / 5e-3)
    twice = replace(run, calls=2000)
    assert ch00.calls_bandwidth(twice, LAPTOP) == pytest.approx(TOKEN.total_bytes / 10e-3)


def test_the_roofline_has_three_bounds_and_the_runs_under_them(shown):
    runs = [ch00.Run("few", TOKEN, 0.01, calls=10), ch00.Run("many", TOKEN, 0.02, calls=10**4)]
    ch00.draw_roofline(LAPTOP, runs)
    (fig, caption), lines = shown[0], shown[0][0].axes[0].lines
    slope, ceiling = lines[0].get_xydata(), lines[1].get_xydata()
    assert slope[:, 1] / slope[:, 0] == pytest.approx(LAPTOP.bandwidth / 1e9)
    assert ceiling[:, 1] == pytest.approx(LAPTOP.peak_flops / 1e9)
    assert tuple(slope[-1]) == pytest.approx(tuple(ceiling[0]))
    for run, (calls, dot) in zip(runs, (lines[2:4], lines[4:6]), strict=True):
        x, y = calls.get_xydata().T
        assert y / x == pytest.approx(ch00.calls_bandwidth(run, LAPTOP) / 1e9)
        assert dot.get_ydata() == pytest.approx(TOKEN.flops / run.seconds / 1e9)
        assert dot.get_xdata() == pytest.approx(TOKEN.intensity)
    assert "bytes over few and calls over many" in caption
    assert len(fig.axes) == 1


def test_the_bounds_of_a_token_stand_in_one_row_per_machine(shown):
    here = replace(LAPTOP, bandwidth=1e9)
    ch00.draw_token_bounds("smollm2-135m", here)
    fig, caption = shown[0]
    memory, compute, overhead, *together = fig.axes[0].lines
    machines = [here, *(DATASHEET[key] for key in ch00.MACHINES)]
    times = [step_time(TOKEN, machine) for machine in machines]
    assert memory.get_xdata() == pytest.approx([1e3 * t.memory_seconds for t in times])
    assert compute.get_xdata() == pytest.approx([1e3 * t.compute_seconds for t in times])
    assert overhead.get_xdata() == pytest.approx([1e3 * t.overhead_seconds for t in times])
    for line, time in zip(together[: len(times)], times, strict=True):
        assert line.get_xdata() == pytest.approx([1e3 * time.seconds] * 2)
    assert "bytes on 3, launches on 4 machines" in caption
    assert fig.axes[0].get_yticklabels()[0].get_text() == "this machine"


def test_without_a_machine_at_hand_only_the_datasheets_are_drawn(shown):
    ch00.draw_token_bounds("llama-3.1-70b")
    fig, caption = shown[0]
    assert len(fig.axes[0].get_yticks()) == len(ch00.MACHINES)
    assert f"bytes on {len(ch00.MACHINES)} machines" in caption


def test_runs_are_drawn_with_their_median_mean_and_the_first_call(shown):
    ch00.draw_runs([1.0, 1.0, 2.0, 4.0], median=1.5, lone=30.0)
    fig, caption = shown[0]
    texts = [text.get_text() for text in fig.axes[0].get_legend().get_texts()]
    assert texts == ["median: 1.5 ms", "mean: 2 ms", "the first call: 30 ms"]
    assert sum(bar.get_height() for bar in fig.axes[0].patches) == 4
    assert "the fastest took 1 ms, the slowest 4 ms, the very first call 30 ms" in caption
