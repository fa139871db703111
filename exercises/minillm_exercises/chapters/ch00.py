"""Chapter 00: the three bounds of a step, drawn for one machine and beside the datasheets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minillm.models.presets import preset
from minillm.plan.cost import StepCost, StepTime, step_cost, step_time
from minillm.plan.hardware import DATASHEET, Hardware, ImpossibleMeasurementError, check_physical
from minillm_exercises.chapters.ch01 import count_calls, product_pass
from minillm_exercises.chapters.common import nearest
from minillm_exercises.plots import bound, figure, series, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "Run",
    "calls_bandwidth",
    "count_calls",
    "draw_roofline",
    "draw_runs",
    "draw_token_bounds",
    "nearest",
    "product_pass",
    "verdict",
]

MACHINES = ("laptop-ddr5", "apple-m1", "apple-m1-max", "rtx-5070-ti", "h100-sxm", "h200")
INTENSITIES = tuple(2.0**i for i in range(-2, 12))  # operations per byte
CONTEXT = 32  # tokens in the cache of the token whose bounds are drawn
NAMES = {"memory": "bytes", "compute": "operations", "overhead": "launches"}


@dataclass(frozen=True)
class Run:
    """One step that was timed: what it had to do, the seconds it took and the calls it made."""

    name: str
    cost: StepCost
    seconds: float
    calls: int


def verdict(flops: float, num_bytes: float, seconds: float, hardware: Hardware, dtype: str) -> str:
    """What `check_physical` says of a measurement: "possible", or why not."""
    try:
        check_physical(flops, num_bytes, seconds, hardware, dtype, slack=0.2)
    except ImpossibleMeasurementError as error:
        return f"impossible. {error}"
    return "possible"


def draw_runs(milliseconds: Sequence[float], median: float, lone: float) -> None:
    """Draw how often each duration occurred, with the `median` and one `lone` other timing."""
    import numpy as np

    fig, ax = figure("time of one run (ms)", "runs", size=(6.4, 3.2))
    ends = min(*milliseconds, lone), max(*milliseconds, lone)
    bins = np.geomspace(ends[0] * 0.95, ends[1] * 1.05, 40)
    ax.hist(milliseconds, bins=list(bins), color=series(2)["color"], edgecolor="black")
    mean = sum(milliseconds) / len(milliseconds)
    for number, (name, value) in enumerate(
        {"median": median, "mean": mean, "the first call": lone}.items()
    ):
        style = {key: series(number)[key] for key in ("color", "linestyle")}
        ax.axvline(value, label=f"{name}: {value:.3g} ms", linewidth=2, **style)
    _plain_log(ax, *ends)
    ax.yaxis.get_major_locator().set_params(integer=True)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    show(
        fig,
        "Each bar counts runs of one program on one input: the fastest took "
        f"{min(milliseconds):.3g} ms, the slowest {max(milliseconds):.3g} ms, "
        f"the very first call {lone:.3g} ms.",
    )


def _plain_log(ax: "Axes", low: float, high: float) -> None:
    """A logarithmic x axis with plain numbers at 1, 2, 5, 10, ... between `low` and `high`."""
    ticks = [m * 10.0**e for e in range(-4, 6) for m in (1, 2, 5)]
    inside = [tick for tick in ticks if low * 0.9 <= tick <= high * 1.1]
    ax.set_xscale("log")
    ax.set_xticks(inside, [f"{tick:g}" for tick in inside])
    ax.xaxis.minorticks_off()


def draw_roofline(hardware: Hardware, runs: Sequence[Run]) -> None:
    """Draw a machine's two roofs, the calls of each of `runs` as a third, and the runs under them.

    Calls take their time whatever a step does, so at a fixed number of bytes they allow so many
    operations per second for each operation per byte: a slope, as a bandwidth is.
    """
    fig, ax = figure("operations per byte", "rate (10^9 operations/s)", size=(6.8, 4.2))
    dtype = runs[0].cost.dtype
    rate, ridge = hardware.rate(dtype), hardware.ridge(dtype)
    slope = [x for x in INTENSITIES if x < ridge] + [ridge]
    flat = [ridge] + [x for x in INTENSITIES if x > ridge]
    bound(ax, slope, [x * hardware.bandwidth / 1e9 for x in slope], "bytes ", "above", at=1.0)
    bound(ax, flat, [rate / 1e9] * len(flat), f"operations ({dtype})", "above", at=1.0)
    for number, run in enumerate(runs):
        style = series(number) | {"markersize": 9}
        limit = calls_bandwidth(run, hardware)
        shown = [x for x in INTENSITIES if x * limit < rate]
        marks = {key: style[key] for key in ("color", "linestyle")}
        ax.plot(shown, [x * limit / 1e9 for x in shown], label=f"calls of {run.name}", **marks)
        place = [run.cost.intensity], [run.cost.flops / run.seconds / 1e9]
        ax.plot(*place, label=f"{run.name}, measured", **(style | {"linestyle": "none"}))
    ax.set(xscale="log", yscale="log")
    ax.set_xticks(INTENSITIES[::2], [f"{tick:g}" for tick in INTENSITIES[::2]])
    ax.xaxis.minorticks_off()
    ax.yaxis.set_major_formatter("{x:,g}")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    lowest = " and ".join(f"{_lowest(run, hardware)} over {run.name}" for run in runs)
    show(
        fig,
        f"What is read from memory lies below every line that applies to it: both tokens stand at "
        f"one operation per byte, far left of the corner at {ridge:.0f}, and the lowest line is "
        f"{lowest}.",
    )


def calls_bandwidth(run: Run, hardware: Hardware) -> float:
    """Bytes per second that the calls of a step leave time for, at this machine's price of one."""
    return run.cost.total_bytes / (run.calls * hardware.overhead)


def _lowest(run: Run, hardware: Hardware) -> str:
    """Which of the three bounds rules a step, given the calls that it really makes."""
    return NAMES[step_time(run.cost, hardware, run.calls).bound].replace("launches", "calls")


def draw_token_bounds(model: str, here: Hardware | None = None) -> None:
    """Draw what bytes, operations and launches of one token take at least, machine by machine.

    `here` stands above the machines of the datasheets.
    """
    cost = step_cost(preset(model), [1], [CONTEXT], dtype="bfloat16")
    machines = ([here] if here else []) + [DATASHEET[key] for key in MACHINES]
    labels = (["this machine"] if here else []) + [DATASHEET[key].name for key in MACHINES]
    times = [step_time(cost, hardware) for hardware in machines]
    fig, ax = figure("time of one token at least (ms)", "machine", size=(7.4, 3.6))
    for number, (name, values) in enumerate(_milliseconds(times).items()):
        ax.plot(values, range(len(times)), label=name, **(series(number) | {"linestyle": "none"}))
    for row, time in enumerate(times):
        ax.plot([1e3 * time.seconds] * 2, [row - 0.3, row + 0.3], color="black", linewidth=2)
    ax.plot([], [], color="black", linewidth=2, label="together, the bound")
    ax.set_yticks(range(len(times)), [_short(label) for label in labels])
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:,g}")
    ax.set_title(f"{model}, bf16, one sequence", fontsize=10)
    ax.legend(loc="best")
    rulers = [NAMES[time.bound] for time in times]
    counts = ", ".join(f"{name} on {rulers.count(name)}" for name in dict.fromkeys(rulers))
    show(fig, f"In each row the mark furthest right rules a token of {model}: {counts} machines.")


def _short(name: str) -> str:
    """A machine's name without what would widen the axis."""
    return name.replace("NVIDIA ", "").replace("8 cores, two-channel ", "")


def _milliseconds(times: Sequence[StepTime]) -> Mapping[str, list[float]]:
    """The three bounds by name, each with a value per machine."""
    return {
        "bytes": [1e3 * time.memory_seconds for time in times],
        "operations": [1e3 * time.compute_seconds for time in times],
        "launches": [1e3 * time.overhead_seconds for time in times],
    }
