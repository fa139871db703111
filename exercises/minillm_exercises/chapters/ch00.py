"""Chapter 00: the bound of a step and what lies above it, drawn for this machine and others."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from minillm.lab.hardware import DATASHEET, Hardware, ImpossibleMeasurementError, check_physical
from minillm.lab.roofline import StepCost, StepTime, step_cost, step_time
from minillm.models.presets import preset
from minillm.ops import c_library
from minillm.plan import machine
from minillm_exercises.chapters.ch01 import count_calls, product_pass
from minillm_exercises.chapters.common import rounds
from minillm_exercises.plots import bars, bound, figure, note, series, show

__all__ = [
    "Run", "bound_seconds", "build_c_functions", "cache_bytes", "count_calls", "draw_lanes",
    "draw_read_rates", "draw_roofline", "draw_runs", "draw_token_bounds", "product_pass", "rounds",
    "verdict",
]  # fmt: skip

MACHINES = ("laptop-ddr5", "apple-m1", "apple-m1-max", "rtx-5070-ti", "h100-sxm", "h200")
INTENSITIES = tuple(2.0**i for i in range(-2, 12))  # operations per byte
CONTEXT = 32  # tokens in the cache of the token whose bounds are drawn


@dataclass(frozen=True)
class Run:
    """One step that was timed: what it had to do, and the seconds it took."""

    name: str
    cost: StepCost
    seconds: float


def build_c_functions() -> str:
    """Compile and load the engine's C functions, so that no later clock includes a compiler.

    Returns a sentence that says how long it took, or that there are none.
    """
    start = time.perf_counter()
    found = [c_library.library(element) for element in ("BF16", "F32")]
    seconds = time.perf_counter() - start
    if not any(isinstance(each, c_library.Library) for each in found):
        return "There are no C functions on this machine: every step runs as torch operations."
    return f"The engine's C functions were compiled or loaded in {seconds:.1f} s."


def cache_bytes(device: str) -> int:
    """Bytes of the largest cache between the memory of a device and its processor."""
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return machine.last_level_cache_bytes()


def bound_seconds(cost: StepCost, hardware: Hardware) -> float:
    """Seconds of a step that no program can beat: the longer of its bytes and its operations."""
    return max(cost.total_bytes / hardware.bandwidth, cost.flops / hardware.rate(cost.dtype))


def verdict(flops: float, num_bytes: float, seconds: float, hardware: Hardware, dtype: str) -> str:
    """What `check_physical` says of a measurement: "possible", or why not."""
    try:
        check_physical(flops, num_bytes, seconds, hardware, dtype, slack=0.2)
    except ImpossibleMeasurementError as error:
        return f"impossible. {error}"
    return "possible"


def draw_lanes(
    weights: int, bandwidth: float, rate: float, tokens: Sequence[int] = (1, 100)
) -> None:
    """Draw how long the bytes and the operations of a step take, for several numbers of tokens.

    Computed for a model of `weights` numbers in bf16: a step reads each of them once and does two
    operations with it for each token.
    """
    fig, ax = figure("time (ms), computed", "one step", size=(6.8, 3.0))
    labels, longest = [], 0.0
    for group, count in enumerate(tokens):
        lanes = {"bytes": 2e3 * weights / bandwidth, "operations": 2e3 * weights * count / rate}
        longest = max(longest, *lanes.values())
        for lane, (name, value) in enumerate(lanes.items()):
            row = 2.5 * group + lane
            ax.barh(row, value, height=0.8, label=None if group else name, **bars(lane))
            note(ax, f"{value:.2f} ms", (value, row), (6, 0), va="center")
            labels.append((row, f"{count} token{'s' * (count > 1)}: {name}"))
            if value == max(lanes.values()):
                line = None if group else "the bound: the longer one"
                ends = [row - 0.55, row + 0.55]
                ax.plot([value] * 2, ends, color="black", linewidth=2, label=line)
    ax.set_yticks([row for row, _ in labels], [text for _, text in labels])
    ax.set_xlim(0, 1.25 * longest)
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.legend(loc="upper right")
    show(
        fig,
        "Memory and multipliers work at the same time, so the longer bar of each pair is the "
        f"bound: the bytes for {tokens[0]} token, the operations for {tokens[-1]}.",
    )


def draw_runs(milliseconds: Sequence[float], median: float, lone: float) -> None:
    """Draw how often each duration occurred, with the middle half and the `median` above, and an
    arrow to one `lone` other timing; runs over four medians are counted in the last bar."""
    import numpy as np

    fig, ax = figure("time of one run (ms)", "runs", size=(7.2, 3.4))
    most = 4 * median
    cut = [min(ms, most) for ms in milliseconds]
    bins = np.linspace(min(cut), max(max(cut), 1.5 * median), 33)
    heights, _, _ = ax.hist(cut, bins=list(bins), color=series(2)["color"], edgecolor="black")
    top = float(max(heights))
    low, high = (float(np.quantile(milliseconds, q)) for q in (0.25, 0.75))
    ends = [(low, 1.08 * top), (low, 1.14 * top), (high, 1.14 * top), (high, 1.08 * top)]
    half = f"middle half: {_plain(low)} to {_plain(high)} ms"
    ax.plot(*zip(*ends, strict=True), color="black", linewidth=1.6, label=half)
    style = {key: series(1)[key] for key in ("color", "linestyle")}
    ax.axvline(median, ymax=0.92, label=f"median: {_plain(median)} ms", linewidth=2, **style)
    said = f"the first call: {_plain(lone)} ms,\n{_plain(lone / median, 2)} times the median"
    if lone > max(cut):
        ax.annotate(said, (0.98, 0.3), (0.72, 0.3), xycoords="axes fraction", va="center",
                    ha="right", textcoords="axes fraction",
                    arrowprops={"arrowstyle": "->", "linewidth": 1.6})  # fmt: skip
    else:
        ax.axvline(lone, color="grey", linestyle=":", label=said.replace("\n", " "))
    ax.set_ylim(0, 1.25 * top)
    ax.yaxis.get_major_locator().set_params(integer=True)
    ax.legend(loc="upper right")
    later = sum(ms > most for ms in milliseconds)
    beyond = f" (with {later} longer than {_plain(most)} ms in the last bar)" if later else ""
    show(
        fig,
        f"Each bar counts runs of one program on one input{beyond}: the fastest took "
        f"{_plain(min(milliseconds))} ms, the slowest {_plain(max(milliseconds))} ms, "
        f"the very first call {_plain(lone)} ms.",
    )


def _plain(value: float, digits: int = 3) -> str:
    """So many significant digits, without an exponent: 1360.1 is "1,360"."""
    return f"{float(f'{value:.{digits}g}'):,g}"


def draw_read_rates(sizes: Sequence[int], rates: Sequence[float], call: float, cache: int) -> None:
    """Draw the rates at which buffers of `sizes` bytes were read, the largest last, with what one
    call of `call` seconds allows and the size of the largest cache."""
    memory, megabytes = rates[-1] / 1e9, [size / 1e6 for size in sizes]
    fig, ax = figure(
        "size of the buffer (MB, logarithmic)", "read rate (GB/s, logarithmic)", size=(7.6, 3.8)
    )
    ax.plot(megabytes, [rate / 1e9 for rate in rates], label="measured", **series(0))
    bound(ax, megabytes, [memory] * len(sizes), "memory", "below", 0.6)
    short = [mb for mb in megabytes if mb * 1e6 / call < 2 * max(rates)]
    style = {"color": "grey", "linestyle": "-."}
    ax.plot(short, [mb / 1e3 / call for mb in short], label="one call per buffer", **style)
    ax.axvline(
        cache / 1e6, color="grey", linestyle=":", label=f"largest cache: {cache / 1e6:.0f} MB"
    )
    ax.set(xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:,g}")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    show(
        fig,
        f"Small buffers are limited by the time of a call, large ones by the memory with "
        f"{memory:.0f} GB/s; between them the cache delivers up to {max(rates) / 1e9:.0f} GB/s.",
    )


def draw_roofline(hardware: Hardware, runs: Sequence[Run], cache: int = 0) -> None:
    """Draw the two bounds of a machine and the runs under them; the slope of the memory does not
    bound a run whose bytes fit into a `cache` of so many bytes."""
    fig, ax = figure(
        "operations per byte (logarithmic)", "rate (10^9 operations/s, logarithmic)",
        size=(6.8, 4.2),
    )  # fmt: skip
    dtype = runs[0].cost.dtype
    rate, ridge = hardware.rate(dtype), hardware.ridge(dtype)
    slope = [x for x in INTENSITIES if x < ridge] + [ridge]
    flat = [ridge] + [x for x in INTENSITIES if x > ridge]
    bound(ax, slope, [x * hardware.bandwidth / 1e9 for x in slope], "")
    bound(ax, flat, [rate / 1e9] * len(flat), f"operations ({dtype})", "above", at=1.0)
    middle = slope[len(slope) // 2]
    note(ax, "bytes", (middle, middle * hardware.bandwidth / 1e9), (-6, 4), ha="right")
    for number, run in enumerate(runs):
        share = bound_seconds(run.cost, hardware) / run.seconds
        style = series(number) | {"markersize": 13 - 3 * number, "linestyle": "none"}
        if number == 0:  # the first may lie behind the second
            style["fillstyle"] = "none"
        place = [run.cost.intensity], [run.cost.flops / run.seconds / 1e9]
        fits = " (fits the cache)" if run.cost.total_bytes < cache else ""
        ax.plot(*place, label=f"{run.name}: {100 * share:.2g} % of the bound{fits}", **style)
    ax.set(xscale="log", yscale="log")
    ax.set_xticks(INTENSITIES[::2], [f"{tick:g}" for tick in INTENSITIES[::2]])
    ax.xaxis.minorticks_off()
    ax.yaxis.set_major_formatter("{x:,g}")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16))
    few, many = (f"{end(run.cost.intensity for run in runs):.2g}" for end in (min, max))
    does = f"{few} operation{'s' * (few != '1')}" if few == many else f"{few} to {many} operations"
    show(
        fig,
        "No program that reads its weights from memory gets above the dashed lines. These tokens "
        f"do {does} per byte, far left of the corner at {ridge:.0f}: under the slope of the bytes.",
    )


def draw_token_bounds(model: str, here: Hardware | None = None) -> None:
    """Draw how long bytes, operations and calls of one token take, machine by machine.

    `here` stands above the machines of the datasheets.
    """
    cost = step_cost(preset(model), [1], [CONTEXT], dtype="bfloat16")
    machines = ([here] if here else []) + [DATASHEET[key] for key in MACHINES]
    labels = (["this machine"] if here else []) + [DATASHEET[key].name for key in MACHINES]
    times = [step_time(cost, hardware) for hardware in machines]
    fig, ax = figure("time of one token (ms, logarithmic), computed", "machine", size=(7.6, 3.6))
    for number, (name, values) in enumerate(_milliseconds(times).items()):
        ax.plot(values, range(len(times)), label=name, **(series(number) | {"linestyle": "none"}))
    longer = 0
    for row, hardware in enumerate(machines):
        least = 1e3 * bound_seconds(cost, hardware)
        ax.plot([least] * 2, [row - 0.3, row + 0.3], color="black", linewidth=2,
                label=None if row else "the bound")  # fmt: skip
        if times[row].overhead_seconds > bound_seconds(cost, hardware):
            ax.axhspan(row - 0.42, row + 0.42, color="grey", alpha=0.2, linewidth=0,
                       label=None if longer else "calls take longer than it")  # fmt: skip
            longer += 1
    ax.set_yticks(range(len(times)), [_short(label) for label in labels])
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:,g}")
    ax.set_title(f"{model}, bf16, one sequence", fontsize=10)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    show(
        fig,
        f"The black line in each row is the bound of a token of {model}, set by bytes or "
        f"operations; issuing its calls one after another takes longer than that on {longer} of "
        f"{len(times)} machines (grey rows).",
    )


def _short(name: str) -> str:
    """A machine's name without what would widen the axis."""
    return name.replace("NVIDIA ", "").replace("8 cores, two-channel ", "")


def _milliseconds(times: Sequence[StepTime]) -> Mapping[str, list[float]]:
    """What is drawn of each machine, by name."""
    return {
        "bytes": [1e3 * time.memory_seconds for time in times],
        "operations": [1e3 * time.compute_seconds for time in times],
        "calls": [1e3 * time.overhead_seconds for time in times],
    }
