"""Chapter 22: the pictures of a request, of loads, of overload and of prices."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from minillm_exercises.plots import bars, bound, figure, note, series, show


def draw_request(due: float, begin: float, tokens: Sequence[float]) -> None:
    """Draw one request on a line of time: due, first step, tokens; all in seconds."""
    fig, ax = figure("time (ms)", "request", size=(8.4, 2.9))
    start, first, *rest = (1e3 * at for at in (due, begin, *tokens))
    ax.barh(0, first - start, left=start, height=0.5, label="waits in the queue", **bars(2))
    ax.barh(0, rest[0] - first, left=first, height=0.5, label="prompt is computed", **bars(1))
    ax.plot(rest, [0] * len(rest), "|", color="black", markersize=30, markeredgewidth=2,
            label="a token arrives")  # fmt: skip
    gaps = [later - earlier for earlier, later in pairwise(rest)]
    span(ax, start, rest[0], 0.55, f"TTFT {rest[0] - start:.0f}")
    span(ax, rest[0], rest[-1], 0.55, f"{sum(gaps):.0f} = {len(gaps)} x TPOT {mean(gaps):.0f}")
    longest = max(range(len(gaps)), key=gaps.__getitem__)
    span(ax, rest[longest], rest[longest + 1], -0.75, f"longest gap (ITL) {gaps[longest]:.0f}")
    ax.set_ylim(-1.3, 1.2)
    ax.set_yticks([])
    ax.set_ylabel("")
    ax.grid(False)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=3)
    show(
        fig,
        f"One request with {len(rest)} tokens. The time to the first token (TTFT) is "
        f"{rest[0] - start:.0f} ms, of which {first - start:.0f} are waiting. The time per output "
        f"token (TPOT) is the mean of the gaps, {mean(gaps):.0f} ms, and the longest gap is "
        f"{max(gaps):.0f} ms.",
    )


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)


def span(ax: Any, left: float, right: float, height: float, text: str) -> None:
    """A double arrow with its name above."""
    ax.annotate("", (left, height), (right, height), arrowprops={"arrowstyle": "<->"})
    ax.text((left + right) / 2, height + 0.08, text, ha="center", va="bottom", fontsize=9)


def draw_stop(
    found: Mapping[str, Sequence[tuple[float, float]]],
    p99: Mapping[str, float],
    stop: tuple[float, float],
) -> None:
    """Draw the latency of each request (ms) at the time it was due (ms), one panel per load, with
    its p99 and the time in which the server stood still."""
    fig, axes = figure(
        "time at which the request is due (s)", "latency (ms)", cols=len(found), size=(9, 3.4)
    )
    most = max(value for points in found.values() for _, value in points)
    for number, (ax, (label, points)) in enumerate(zip(axes, found.items(), strict=True)):
        look = series(number) | {"linestyle": "none", "markersize": 4}
        ax.plot([1e-3 * at for at, _ in points], [value for _, value in points], **look)
        ax.axvspan(*(1e-3 * at for at in stop), color="0.88", label="the server stands still")
        ax.axhline(p99[label], color="black", linestyle="--", linewidth=1.2,
                   label=f"p99, {p99[label]:.0f} ms")  # fmt: skip
        ax.set_title(f"{label}, {len(points)} requests", fontsize=10)
        ax.set_ylim(-0.03 * most, 1.1 * most)
        ax.legend(loc="center left", fontsize=9)
    slow = {label: sum(value > 100 for _, value in points) for label, points in found.items()}
    counts = ", ".join(f"{slow[label]} of {len(found[label])} ({label})" for label in found)
    show(
        fig,
        "Simulated: the latency of every request of two load generators, to a server that stops "
        f"for one second. Requests that took more than 100 ms: {counts}.",
    )


def draw_loads(
    rates: Sequence[float],
    tokens: Sequence[float],
    good: Sequence[float],
    tpot: Mapping[str, Sequence[float]],
    attainment: Sequence[float],
    limit: float,
    knee: float,
    most: float,
) -> None:
    """Draw three panels over the offered load: tokens/s, TPOT (ms), attainment (percent)."""
    fig, axes = figure("offered load (requests/s)", "tokens/s", cols=3, size=(11, 3.6))
    lines = {"all tokens": tokens, "good tokens": good}, tpot
    for ax, named in zip(axes, lines, strict=False):
        for number, (label, values) in enumerate(named.items()):
            ax.plot(rates, values, **series(number))
            left = values[6] >= max(each[6] for each in named.values())
            side, aside = ("right", -7) if left else ("left", 7)
            note(ax, label, (rates[6], values[6]), (aside, 2), ha=side)
    bound(axes[0], rates, [most] * len(rates), "all seats busy", side="above", at=0.1)
    bound(axes[1], rates, [limit] * len(rates), "limit", side="above", at=0.0)
    axes[2].plot(rates, [100 * share for share in attainment], **series(1))
    bound(axes[2], rates, [90] * len(rates), "target", side="below", at=0.0)
    labels = ("tokens/s", "TPOT (ms)", "requests within the limits (%)")
    for ax, label in zip(axes, labels, strict=True):
        ax.set_ylabel(label)
        ax.axvline(knee, color="grey", linestyle=":")
        note(ax, "knee", (knee, 0), (3, 4))
        ax.set_ylim(0, 1.08 * ax.get_ylim()[1])
    at = rates.index(knee) + 1
    show(
        fig,
        f"Simulated. Up to {knee:g} requests/s, at least 90 percent of the requests are within the "
        f"limits. At {rates[at]:g} requests/s the server writes more tokens, the mean TPOT is "
        f"{tpot['mean'][at]:.1f} ms, and {100 * attainment[at]:.0f} percent are within the limits.",
    )


def draw_queues(found: Mapping[int, float], peak: float, offered: float) -> None:
    """Draw the goodput (tokens/s) of each length of the queue; `peak` is all seats busy."""
    fig, ax = figure("requests that may wait", "good tokens/s", size=(7, 3.6))
    places = range(len(found))
    drawn = ax.bar(places, list(found.values()), width=0.6, **bars(0))
    for bar, value in zip(drawn, found.values(), strict=True):
        inside = value > peak / 4
        middle, up = bar.get_x() + bar.get_width() / 2, -14 if inside else 3
        colour = "white" if inside else "black"
        note(ax, f"{value:,.0f}", (middle, value), (0, up), ha="center", color=colour)
    ax.set_xticks(places, [str(length) for length in found])
    bound(ax, [-0.5, len(found) - 0.5], [peak, peak], "all seats busy", side="above", at=1.0)
    ax.set_ylim(0, 1.2 * peak)
    best = max(found.values())
    level = [length for length, value in found.items() if value > 0.99 * best]
    show(
        fig,
        f"Simulated goodput at {offered:g} requests/s against the length of the queue. "
        f"Within one percent of the best: {', '.join(map(str, level))} places. The best is "
        f"{100 * best / peak:.0f} percent of what all seats can write.",
    )


def draw_prices(found: Mapping[str, float], least: Mapping[str, float], limits: str) -> None:
    """Draw dollars per million tokens of each configuration, and the least that its arithmetic
    allows."""
    fig, ax = figure("dollars per million output tokens", "configuration", size=(8.4, 4))
    places = list(range(len(found)))[::-1]
    drawn = ax.barh(places, list(found.values()), height=0.6, **bars(0))
    ax.bar_label(drawn, [f"{value:.2f}" for value in found.values()], padding=3, fontsize=9)
    for place, name in zip(places, found, strict=True):
        label = "bound: arithmetic units always busy" if place == 0 else None
        ax.plot([least[name]] * 2, [place - 0.4, place + 0.4], color="black", linestyle="--",
                linewidth=1.6, label=label)  # fmt: skip
    ax.set_yticks(places, list(found))
    ax.set_ylabel("")
    ax.margins(x=0.12)
    ax.legend(loc="lower right")
    least_found, most_found = min(found.values()), max(found.values())
    show(
        fig,
        f"Simulated prices at the highest rate with 90 percent within {limits}. They go from "
        f"{least_found:.2f} to {most_found:.2f} dollars. A server that keeps its rate up cannot "
        "cost less than its dashed bound.",
    )
