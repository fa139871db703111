"""Two panels of the figure: the block map, with the sequences that hold each block at the end of
each step, and the rank lanes, with computation and communication of each rank in each step."""

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OWNERS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
MAX_LABELS = 12  # blocks that are all labelled; with more blocks only some are
MAX_PIXELS = 1200  # of each side of the block map
FREE, USED = (255, 255, 255), (222, 225, 229)
LANE = 0.8  # height of a lane, as a share of the distance between two lanes
PARTS = (("computing", "computes", "#0072B2", ""),
         ("communicating", "communicates\nor waits", "#F6D9A8", "//////"))  # fmt: skip
MAX_RANKS = 16  # ranks that are all labelled; with more ranks only some are


class SharedRun(NamedTuple):
    """Blocks `block` to `end` (exclusive) with the same number of holders from column `first` to
    `last` (exclusive)."""

    block: int
    end: int
    first: int
    last: int
    holders: int


def blocks_height(rows: int) -> float:
    """Height of the panel in inches."""
    return min(max(1.4, rows * 0.09), 3.4)


def draw_blocks(ax: "Axes", data: dict[str, Any]) -> None:
    """Draw the holder of each block at the end of each step: a colour per sequence, hatched if
    shared."""
    from matplotlib.collections import PolyCollection

    shown, num_all = shown_blocks(data["blocks"]), len(data["blocks"])
    data = data | {"blocks": [data["blocks"][block] for block in shown]}
    num_columns, num_blocks = len(data["steps"]["step"]), len(shown)
    ax.set_label("blocks")
    ax.set_ylabel("block" if num_blocks == num_all else "blocks in use")
    if num_blocks <= MAX_LABELS:
        ax.set_yticks([row + 0.5 for row in range(num_blocks)], [f"{block}" for block in shown])
        ax.tick_params(axis="y", length=0)
    elif num_blocks < num_all:
        ax.yaxis.set_major_formatter(
            lambda y, _: f"{shown[int(y)]}" if y in range(len(shown)) else ""
        )
    if num_columns and num_blocks:
        ax.imshow(block_image(data), aspect="auto", interpolation="nearest", origin="upper",
                  extent=(0, num_columns, num_blocks, 0), zorder=1)  # fmt: skip
    shared = shared_runs(data)
    if shared:
        boxes = [box(run.first, run.last, run.block, run.end) for run in shared]
        hatch = "//////" if num_blocks <= 64 else "////////"
        ax.add_collection(PolyCollection(boxes, facecolor="none", edgecolor="#15191D", hatch=hatch,
                                         linewidth=0, zorder=2, gid="shared",
                                         label="shared block"))  # fmt: skip
    if any(
        not holders
        for changes in data["blocks"]
        for *_, holders in block_runs(changes, num_columns)
    ):
        ax.bar([0], [0], color=[tuple(part / 255 for part in USED)], label="free again")
    if num_blocks <= 48:
        count_holders(ax, shared, num_columns)
    ax.set_ylim(max(num_blocks, 1), 0)


def shown_blocks(blocks: list[list[Any]]) -> list[int]:
    """All blocks, or only the used ones if they are less than half."""
    used = [block for block, changes in enumerate(blocks) if changes]
    return used if used and 2 * len(used) < len(blocks) else list(range(len(blocks)))


def count_holders(ax: "Axes", shared: list[SharedRun], num_columns: int) -> None:
    """Write the number of holders on shared runs that are long enough."""
    for run in shared:
        if run.last - run.first >= max(num_columns, 1) / 40:
            ax.text(run.first, (run.block + run.end) / 2, f" ×{run.holders}", fontsize=6.5,
                    va="center", zorder=3, clip_on=True,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3})  # fmt: skip


def block_runs(changes: list[list[Any]], num_columns: int) -> list[tuple[int, int, list[int]]]:
    """(first column, last column + 1, holders) of each run of a block, from its first change on."""
    ends = [column for column, _ in changes[1:]] + [num_columns]
    return [
        (column, end, holders)
        for (column, holders), end in zip(changes, ends, strict=False)  # a free block has no change
        if end > column
    ]


def shared_runs(data: dict[str, Any]) -> list[SharedRun]:
    """All shared runs of the block map."""
    num_columns = len(data["steps"]["step"])
    runs: list[SharedRun] = []
    above: dict[tuple[int, int, int], int] = {}  # runs that end at this block: index in `runs`
    for block, changes in enumerate(data["blocks"]):
        here = {}
        for first, last, holders in block_runs(changes, num_columns):
            if len(holders) > 1:
                key = (first, last, len(holders))
                here[key] = above.get(key, len(runs))
                if here[key] == len(runs):
                    runs.append(SharedRun(block, block + 1, *key))
                runs[here[key]] = runs[here[key]]._replace(end=block + 1)
        above = here
    return runs


def block_image(data: dict[str, Any]) -> Any:
    """An image [blocks, columns, 3]; every n-th block and step if there are too many."""
    import numpy as np

    num_columns, num_blocks = len(data["steps"]["step"]), len(data["blocks"])
    down, across = -(-num_blocks // MAX_PIXELS), -(-num_columns // MAX_PIXELS)
    image = np.full((-(-num_blocks // down), -(-num_columns // across), 3), FREE, np.uint8)
    for block in range(0, num_blocks, down):
        for first, last, holders in block_runs(data["blocks"][block], num_columns):
            colour = owner_colour(holders[0]) if holders else USED
            image[block // down, -(-first // across) : -(-last // across)] = colour
    return image


def owner_colour(sequence: int) -> tuple[int, int, int]:
    """The colour of a sequence: one of seven hues, plain, lighter or darker, as on the page."""
    code, turn = OWNERS[sequence % 7], sequence // 7 % 3
    target, share = ((0, 0.0), (255, 0.45), (0, 0.38))[turn]
    red, green, blue = (int(code[at : at + 2], 16) for at in (1, 3, 5))
    red, green, blue = (round(v + (target - v) * share) for v in (red, green, blue))
    return red, green, blue


def box(left: float, right: float, bottom: float, top: float) -> list[tuple[float, float]]:
    """The corners of a rectangle."""
    return [(left, bottom), (right, bottom), (right, top), (left, top)]


# ---- rank lanes --------------------------------------------------------------------------------


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
    each = -(-len(lanes) // MAX_RANKS)
    ax.set_yticks(range(0, len(lanes), each))
    ax.set_yticklabels([f"rank {lane['rank']}" for lane in lanes[::each]], fontsize=8)
    ax.tick_params(axis="y", length=0)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.05), fontsize=8, handlelength=1.4)
