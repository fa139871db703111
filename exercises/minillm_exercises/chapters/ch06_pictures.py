"""Chapter 06's pictures: seats over steps, what each distribution gains, a real run, the load."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from minillm.lab.drawings.figure import MAX_ROWS, draw_gantt
from minillm.lab.drawings.timeline import timeline
from minillm.scheduling.record import StepRecord
from minillm.trace.recorder import Trace
from minillm_exercises.chapters.ch06 import Load
from minillm_exercises.plots import COLOURS, bound, box, figure, note, series, show

WORDS = MappingProxyType({"waiting": "waits", "decode": "has a seat", "length": "has ended",
                          "prefill": "takes a seat (its prompt)"})  # fmt: skip


def draw_seats(rows: Sequence[str]) -> None:
    """Draw seats over steps: each row of letters is a seat, each letter the request that has it in
    a step, and "." an empty seat."""
    names = sorted(set("".join(rows)) - {"."})
    fig, ax = figure("step", "seat", size=(8.4, 0.9 + 0.5 * len(rows)))
    ax.grid(visible=False)
    for seat, row in enumerate(rows, 1):
        for step, name in enumerate(row, 1):
            empty = name == "."
            look: dict[str, Any] = {
                "facecolor": "white" if empty else COLOURS[names.index(name) % len(COLOURS)],
                "hatch": "///" if empty else "", "edgecolor": "#bbbbbb" if empty else "white",
            }  # fmt: skip
            box(ax, step - 0.5, seat - 0.42, 1, 0.84, look, name * (not empty), fontsize=10,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
    longest = max(map(len, rows))
    ax.set(xlim=(0.4, longest + 0.6), ylim=(len(rows) + 0.6, 0.4), yticks=range(1, len(rows) + 1))
    ax.set_xticks(range(1, longest + 1))
    everything = "".join(rows)
    show(fig, f"A cell is a seat in a step, and its letter the request that writes a token there. "
              f"In {longest} steps, {everything.count('.')} of {len(everything)} seats are empty "
              f"(hatched).")  # fmt: skip


def draw_schedules(traces: Mapping[str, Trace], seats: int, least: int) -> None:
    """Draw which request runs when, one schedule above the other on one scale, with the `least`
    possible steps."""
    longest = max(len(trace) for trace in traces.values())
    rows = max(len(timeline(trace)["sequences"]) for trace in traces.values())
    size = (8.6, len(traces) * (0.27 * rows + 0.75) + 0.5)
    fig, axes = figure("step", "request", rows=len(traces), size=size)
    for ax, (name, trace) in zip(axes, traces.items(), strict=True):
        ax.grid(visible=False)
        draw_gantt(ax, timeline(trace), MAX_ROWS)
        ax.axvline(least, color="black", linestyle="--", linewidth=1.2)
        note(ax, "fewest possible", (least, -0.6), (3, -3), va="top")
        places = seats * len(trace)
        empty = places - sum(len(record.rows) for record in trace)
        ax.set_title(f"{name}: {len(trace)} steps, {empty} of {places} seats stay empty",
                     loc="left", fontsize=10)  # fmt: skip
        ax.set_xlim(0, longest + 0.6)
        ax.set_xticks(range(0, longest + 1, 2 if longest < 40 else 10))
    for ax in axes[:-1]:
        ax.set_xlabel("")
    parts = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))
    shown = {said: parts[label] for label, said in WORDS.items() if label in parts}
    fig.legend(shown.values(), shown.keys(), loc="outside upper right", ncols=4, fontsize=9)
    said = ", ".join(f"{name} {len(trace)}" for name, trace in traces.items())
    show(fig, f"A row is a request. A thin grey bar waits, a thick bar has a seat. Steps: {said}; "
              f"no schedule needs fewer than {least} (dashed).")  # fmt: skip


def draw_gains(gains: Mapping[str, Mapping[int, Fraction]],
               most: Mapping[str, Mapping[int, Fraction]]) -> None:  # fmt: skip
    """Draw the gain of each distribution over the number of seats, and what it can be at most."""
    fig, ax = figure("seats (logarithmic)", "gain in steps (times, logarithmic)", size=(7, 4.2))
    for number, (dist, by_seats) in enumerate(gains.items()):
        seats = list(by_seats)
        name = "most possible" if number == len(gains) - 1 else ""
        bound(ax, seats, [float(most[dist][count]) for count in seats], name, "above")
        values = [float(by_seats[count]) for count in seats]
        ax.plot(seats, values, label=dist, **series(number))
        note(ax, f" {dist}, {values[-1]:.1f}", (seats[-1], values[-1]), (4, 0), va="center")
    _logarithmic(ax, seats, (1, 2, 5, 10, 20))
    ax.set_xlim(right=seats[-1] * 3.2)
    last = max(gains, key=lambda dist: gains[dist][seats[-1]])
    low, high = (float(gains[dist][seats[-1]]) for dist in ("equal", last))
    show(fig, f"Computed: steps of static over steps of continuous batching; the dashed lines are "
              f"the most that is possible. The gain with {seats[-1]} seats goes from "
              f"{low:.1f} times (equal) to {high:.1f} times ({last}).")  # fmt: skip


def _logarithmic(ax: Any, xs: Sequence[int], ys: Sequence[int]) -> None:
    """Both axes logarithmic, with plain numbers at these places."""
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks(xs, [str(x) for x in xs])
    ax.set_yticks(ys, [str(y) for y in ys])
    ax.minorticks_off()


def draw_clock(traces: Mapping[str, Sequence[StepRecord]], seats: int) -> None:
    """Draw how many requests each step computed, over the seconds of a real run."""
    fig, axes = figure("time (s)", "requests in the step", rows=len(traces), size=(8.2, 4.2))
    spans: dict[str, float] = {}
    for number, (ax, (name, trace)) in enumerate(zip(axes, traces.items(), strict=True)):
        begun = trace[0].started
        edges = [record.started - begun for record in trace]
        spans[name] = trace[-1].delivered - begun
        rows = [len(record.rows) for record in trace]
        ax.stairs(rows, [*edges, spans[name]], fill=True, color=series(number)["color"])
        bound(ax, [0, max(spans.values())], [seats, seats], "all seats", "above")
        ax.set_title(f"{name}: {len(trace)} steps", loc="left", fontsize=10)
        ax.set_ylim(0, seats * 1.3)
        ax.set_yticks(sorted({0, seats // 2, seats}))
    for ax in axes:
        ax.set_xlim(0, max(spans.values()) * 1.01)
    axes[0].set_xlabel("")
    said = " and ".join(f"{name} {seconds:.2f} s" for name, seconds in spans.items())
    show(fig, f"Measured: the same requests and tokens with the real engine, one run each, "
              f"{said}. White space under the dashed line is empty seats.")  # fmt: skip


def draw_loads(shares: Sequence[float], found: Mapping[str, Sequence[Load]], seats: int,
               most: Fraction) -> None:  # fmt: skip
    """Draw, over the arrivals' share of what all seats could serve, how often all are taken and
    how long a request waits for one; `most` is the share that static batching can serve."""
    load = "arrivals / what full seats can serve (%)"
    fig, axes = figure(load, "time with all seats taken (%)", cols=2, size=(9, 3.8))
    axes[1].set_ylabel("mean wait for a seat (steps, logarithmic)")
    percent = [100 * share for share in shares]
    for number, (name, loads) in enumerate(found.items()):
        full, waits = ([float(100 * each.full) for each in loads],
                       [max(float(each.wait), 0.1) for each in loads])  # fmt: skip
        axes[0].plot(percent, full, label=name, **series(number))
        axes[1].plot(percent, waits, label=name, **series(number))
    bound(axes[0], [percent[0], percent[-1]], [100, 100], "all the time", "above")
    axes[0].set_ylim(-3, 112)
    axes[1].axvline(float(100 * most), color="black", linestyle=":", linewidth=1.2)
    note(axes[1], "static batching serves no more", (float(100 * most), 12), (4, 0))
    axes[1].set_yscale("log")
    axes[1].set_yticks((0.1, 1, 10, 100), ("< 0.1", "1", "10", "100"))
    axes[1].minorticks_off()
    axes[0].legend(loc="center left")
    said = " and ".join(f"{float(loads[0].wait):.1f} steps ({name})"
                        for name, loads in found.items())  # fmt: skip
    show(fig, f"Simulated: {seats} seats over the load. Left, how often every seat is taken; "
              f"right, how long a request waits for a seat: at {percent[0]:.0f} % load "
              f"{said}.")  # fmt: skip
