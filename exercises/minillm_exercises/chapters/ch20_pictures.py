"""The pictures of chapter 20: timetables of stages, cuts, speed-ups, rows of experts."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from minillm_exercises import plots
from minillm_exercises.chapters.ch19_pictures import draw_line
from minillm_exercises.chapters.ch20 import Box, busy, stage_costs
from minillm_exercises.plots import bars, figure, note, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLANS: tuple[dict[str, Any], ...] = (
    {"facecolor": "#9ecae1"},
    {"facecolor": "#fdd49e", "hatch": "//"},
    {"facecolor": "#c7e9c0", "hatch": ".."},
    {"facecolor": "#dadaeb", "hatch": "xx"},
)
DECODES: dict[str, Any] = {"facecolor": "#9ecae1"}
CHUNK: dict[str, Any] = {"facecolor": "#fdae6b", "hatch": "//"}


def _timetable(ax: "Axes", boxes: Sequence[Box], start: float, end: float, look: Callable[
        [Box], Mapping[str, Any]], numbers: bool) -> None:  # fmt: skip
    """Boxes of stages over time, the first stage at the top."""
    stages = 1 + max(box.stage for box in boxes)
    for box in boxes:
        left, right = max(float(box.start), start), min(float(box.end), end)
        if left >= right:
            continue
        style = {"edgecolor": "black", "linewidth": 0.7, **look(box)}
        plain = {"boxstyle": "square,pad=0.1", "linewidth": 0, "facecolor": style["facecolor"]}
        plots.box(ax, left, box.stage + 0.06, right - left, 0.88, style,
                  f"{box.plan}" * numbers, fontsize=10, bbox=plain)  # fmt: skip
    ax.set(xlim=(start, end), ylim=(stages, 0))
    ax.set_yticks([stage + 0.5 for stage in range(stages)], [str(s) for s in range(stages)])
    ax.grid(False)


def draw_rounds(tables: Mapping[str, Sequence[Box]], stages: int, end: int) -> None:
    """Draw timetables of plans that go round and round, or of chunks, one above the other."""
    fig, _ = figure(
        "time (costs of a plan on a stage)",
        "stage",
        rows=len(tables),
        size=(8.6, 1.9 * len(tables) + 0.2),
    )
    said = []
    for ax, (name, boxes) in zip(fig.axes, tables.items(), strict=True):
        _timetable(ax, boxes, 0, end, lambda box: PLANS[box.plan % len(PLANS)], True)
        ax.set_title(name, loc="left", fontsize=10)
        ax.set_xticks(range(end + 1))
        done = sum(box.end <= end for box in boxes)
        said.append(f"{done} of {stages * end} boxes ({name})")
    for ax in fig.axes[:-1]:
        ax.set_xlabel("")
    show(
        fig,
        f"Simulated timetables of {stages} stages; the number is the plan, and white is waiting. "
        f"Up to time {end} the stages work in {' and '.join(said)}.",
    )


def draw_schedules(
    tables: Mapping[str, Sequence[Box]], stages: int, start: int, end: int, who: int
) -> None:
    """Draw timetables of the scheduler: plans with a chunk of sequence `who`, and others."""
    from matplotlib.patches import Patch

    size = (9.4, 1.9 * len(tables) + 0.5)
    fig, _ = figure("time (costs of a small plan)", "stage", rows=len(tables), size=size)

    def look(box: Box) -> Mapping[str, Any]:
        return CHUNK if dict(box.rows).get(who, 1) > 1 else DECODES

    said = []
    for ax, (name, boxes) in zip(fig.axes, tables.items(), strict=True):
        _timetable(ax, boxes, start, end, look, False)
        ax.set_title(name, loc="left", fontsize=10)
        said.append(f"{100 * float(busy(boxes, stages, start, end)):.0f} % ({name})")
    for ax in fig.axes[:-1]:
        ax.set_xlabel("")
    names = {"plan with a chunk of the prompt": CHUNK, "plan of decoding users alone": DECODES}
    handles = [Patch(label=name, edgecolor="black", **each) for name, each in names.items()]
    fig.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9)
    show(
        fig,
        f"The engine's scheduler, simulated on a virtual clock: {stages} stages, and a prompt that "
        f"arrives at time {start}; white is waiting. The stages are busy {' and '.join(said)} of "
        f"the time.",
    )


def draw_cuts(cuts: Mapping[str, Sequence[int]], head: float, model: str) -> None:
    """Draw what each stage costs, in layers, for several cuts; the last has the output matrix."""
    fig, ax = figure("cost of a stage (layers)", "stage", size=(8.2, 3.0))
    at, names, slowest = 0.0, [], []
    for name, counts in cuts.items():
        costs = [float(each) for each in stage_costs(counts, head)]
        for stage, count in enumerate(counts):
            ax.barh(at, count, 0.8, **bars(0))
            if stage == len(counts) - 1:
                ax.barh(at, head, 0.8, left=count, **bars(1))
            ax.text(costs[stage] + 0.2, at, f"{costs[stage]:.1f}", va="center", fontsize=9)
            names.append((at, f"{name}, stage {stage}"))
            at += 1
        slowest.append(f"{max(costs):.1f} ({name})")
        at += 0.6
    ax.set_yticks([place for place, _ in names], [text for _, text in names])
    ax.invert_yaxis()
    ax.set_ylabel("")
    ax.barh(at, 0, label="layers", **bars(0))
    ax.barh(at, 0, label="output matrix", **bars(1))
    ax.set_ylim(at - 1, -0.7)
    ax.set_xlim(0, 1.12 * max(max(stage_costs(counts, head)) for counts in cuts.values()))
    some = next(iter(cuts.values()))
    fair = (sum(some) + head) / len(some)
    ax.axvline(fair, color="black", linestyle="--", linewidth=1.2)
    note(ax, "equal shares", (fair, -0.62), (4, 0), va="center")
    fig.legend(loc="outside lower center", ncols=2, fontsize=9)
    show(
        fig,
        f"{model} on {len(next(iter(cuts.values())))} stages: what the slowest stage costs, in "
        f"layers, is {' and '.join(slowest)}.",
    )


def draw_speed_ups(
    found: Mapping[str, Mapping[str, Mapping[int, float]]],
    what: str,
    fits: Callable[[str, str, int], bool] = lambda work, way, gpus: True,
    reading: str = "",
) -> None:
    """Draw times as fast as one GPU against their number: kind of work -> way -> GPUs -> times.

    Args:
        fits: whether so many GPUs hold the model and the caches of this work, in this way.
        reading: what the picture shows, in a sentence of the caption.
    """
    fig, _ = figure("GPUs", "times as fast as one", cols=len(found), size=(9.6, 3.6))
    for ax, (work, ways) in zip(fig.axes, found.items(), strict=True):
        counts = list(next(iter(ways.values())))
        ax.plot(counts, counts, "k--", linewidth=1.2, label="n GPUs, n times")
        for number, (name, values) in enumerate(ways.items()):
            draw_line(ax, values, number, name, partial(fits, work, name))
        ax.set(title=work, ylim=(0, 1.05 * max(counts)))  # one range: the panels are compared
        ax.set_xticks(counts)
    for ax in fig.axes[1:]:
        ax.set_ylabel("")
    handles, labels = fig.axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
    show(
        fig,
        f"Predicted times as fast as one GPU, {what}. {reading}{' ' * bool(reading)}Hollow: these "
        f"GPUs do not hold the model and the caches, so their speed is computed for larger ones.",
    )


def draw_experts(found: Mapping[str, Sequence[int]]) -> None:
    """Draw the rows that each rank computes, for several steps, as shares of the mean."""
    fig, _ = figure("rank", "rows of a rank / mean", cols=len(found), size=(9.0, 3.0))
    said = []
    for ax, (name, rows) in zip(fig.axes, found.items(), strict=True):
        mean, fullest = sum(rows) / len(rows), rows.index(max(rows))
        for rank, each in enumerate(rows):
            ax.bar(rank, each / mean, 0.8, **bars(rank == fullest))
        ax.axhline(1, color="black", linestyle="--", linewidth=1.2)
        ax.text(fullest, max(rows) / mean + 0.03, f"{max(rows) / mean:.2f}", ha="center")
        ax.set(title=name, ylim=(0, 2.1), xlim=(-0.6, len(rows) - 0.4))
        ax.set_xticks(range(len(rows)))
        said.append(f"{max(rows) / mean:.2f} times the mean with {name}")
    for ax in fig.axes[1:]:
        ax.set_ylabel("")
    show(
        fig,
        f"The rows of experts of each rank in one layer of one simulated step, divided by their "
        f"mean (dashed). The fullest rank (hatched) has {', '.join(said)}.",
    )
