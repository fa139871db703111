"""The rank lanes of the figure: computation and communication of each rank in each step."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LANE = 0.8  # height of a lane, as a share of the distance between two lanes
PARTS = (("computing", "computes", "#0072B2", ""),
         ("communicating", "communicates\nor waits", "#F6D9A8", "//////"))  # fmt: skip
MAX_LABELS = 16  # ranks that are all labelled; with more ranks only some are


def ranks_height(number: int) -> float:
    """Height of the panel in inches."""
    return min(max(0.32 * number, 0.7), 3.2)


def draw_ranks(ax: "Axes", data: dict[str, Any]) -> None:
    """Draw a lane per rank, scaled to the slowest rank of each step: computing below, communicating
    or waiting above. The straggler has the largest computing part."""
    import numpy as np

    lanes = data["ranks"]
    seconds = {
        part: np.array([lane[part] for lane in lanes], float).reshape(len(lanes), -1)
        for part, *_ in PARTS
    }
    slowest = np.add(*seconds.values()).max(axis=0)
    edges = np.arange(len(slowest) + 1)
    for row in range(len(lanes)):
        below = np.full(len(slowest), row + LANE / 2)  # the axis points down
        for part, label, colour, hatch in PARTS:
            share = np.divide(seconds[part][row], slowest, out=0 * slowest, where=slowest > 0)
            above = below - LANE * share
            ax.stairs(above, edges, baseline=below, fill=True, facecolor=colour, hatch=hatch,
                      edgecolor="#7A5200" if hatch else colour, linewidth=0.3, gid=f"{part} {row}",
                      label=label if row == 0 else None)  # fmt: skip
            below = above
    ax.set_label("ranks")
    ax.set_ylim(len(lanes) - 0.5, -0.5)
    each = -(-len(lanes) // MAX_LABELS)
    ax.set_yticks(range(0, len(lanes), each))
    ax.set_yticklabels([f"rank {lane['rank']}" for lane in lanes[::each]], fontsize=8)
    ax.tick_params(axis="y", length=0)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.05), fontsize=8, handlelength=1.4)
