"""Which cells are run: tables in which any two settings of any two axes meet, where they can.

But for models and proposers: what is proposed are tokens, whatever the model. In a small table,
models and ranks meet what chance brings, and so do ways of computing and proposers.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations
from random import Random

from tests.matrix.cells import DENSE, MIXTURES, MODELS, PATHS, QUANTISED, RANKS, Cell
from tests.matrix.proposers import SOUND

BITWISE = ("llama", "mistral", "qwen2", "eight heads", "deepseek_v2", "qwen3_moe")
EXACT = {"exact float32": BITWISE, "exact bfloat16": (*BITWISE, *QUANTISED)}
AXES: dict[str, Sequence] = {
    "model": ("bytes", *MODELS, *QUANTISED), "mode": ("float32", *EXACT), "path": tuple(PATHS),
    "chunk": (0, 7, 32), "cache": ("off", "hash", "radix"), "pool": ("ample", "recompute", "swap"),
    "overlaps": (False, True), "graphs": (False, True),
    "drafts": ("none", "draft model", "medusa", "eagle", *SOUND), "ranks": tuple(RANKS),
}  # fmt: skip
TRIES = 60  # random cells for each row of a table, of which the best is taken
MORE = 5  # times so many, if none of them is allowed or the table is small


def allowed(cell: Cell) -> bool:
    """Whether there is such an engine, and whether it promises the same tokens."""
    one, quantised = cell.ranks == "one", cell.model in QUANTISED
    if cell.model not in AXES["model"] or cell.model not in RANKS[cell.ranks][1]:
        return False
    named = ("none",) if "pp" in cell.ranks else ("none", "ngram", "suffix")
    if not one and cell.drafts not in named:
        return False  # a proposer that is an object belongs to one process
    if quantised and cell.drafts == "draft model":
        return False
    if cell.graphs:  # a GPU's layouts and operations; they are off in deterministic mode
        path = "torch" if quantised or cell.model in MIXTURES else "usual"
        return one and not cell.exact and cell.path == path
    if quantised and cell.path != "usual":
        return False
    if cell.exact and cell.model not in EXACT[cell.mode]:
        return False
    if cell.exact and cell.path != "usual":  # tiles, as where there is no C
        return one and (cell.path, cell.model) == ("operations", "llama")
    if cell.exact and not one:  # the bits of one rank, where sums are cut into eight parts
        fixed = cell.model in DENSE and cell.path == "usual"
        return fixed and cell.ranks in ("tp 2", "tp 4", "tp 8", "pp 2", "tp 2, pp 2")
    return True


def pairs(cell: Cell) -> set[tuple[str, object, str, object]]:
    """The settings of each two axes."""
    return {(a, getattr(cell, a), b, getattr(cell, b)) for a, b in combinations(AXES, 2)}


def all_pairs(small: bool = False) -> Iterator[tuple[str, object, str, object]]:
    """Those that should meet in a cell, if they can."""
    apart = {("model", "drafts")} | ({("path", "drafts")} if small else set())
    for one, other in combinations(AXES, 2):
        if (one, other) in apart or (small and {one, other} & {"model", "ranks"}):
            continue
        yield from ((one, this, other, that) for this in AXES[one] for that in AXES[other])
    if small:
        yield from (("model", each, "overlaps", True) for each in AXES["model"])
        yield from (("model", each, "ranks", "one") for each in AXES["model"])
        yield from (("overlaps", True, "ranks", each) for each in AXES["ranks"])


def random_cells(dice: Random, **fixed: object) -> Iterator[Cell]:
    """Cells with these settings that there are."""
    for _ in range(TRIES):
        drawn = {name: dice.choice(axis) for name, axis in AXES.items()} | fixed
        # Many settings need others, which chance alone would seldom meet.
        if "ranks" not in fixed and dice.random() < 0.5:
            drawn["ranks"] = "one"
        if "model" not in fixed:
            drawn["model"] = dice.choice(RANKS[drawn["ranks"]][1])
        for name in ("mode", "path", "graphs", "drafts"):
            if name not in fixed and dice.random() < 0.5:
                drawn[name] = getattr(Cell, name)
        if allowed(cell := Cell(**drawn)):
            yield cell


def table(seed: int, small: bool = False) -> list[Cell]:
    """Cells in which any two settings meet that can; another seed gives other cells. Those of a
    small table are few, with few ranks and few models to compare with."""
    dice, cells, met, alone = Random(seed), [], set(), set()
    wanted = set(all_pairs(small))

    def gain(cell: Cell) -> float:
        dear = (cell.ranks != "one") + (cell.alone() not in alone) if small else 0
        return len((pairs(cell) & wanted) - met) - 2 * dear

    for pair in all_pairs(small):
        if pair not in met:
            one, this, other, that = pair
            found: list[Cell] = []
            for _ in range(MORE):
                if small or not found:
                    found += random_cells(dice, **{one: this, other: that})
            if found:
                cells.append(max(found, key=gain))
                met |= pairs(cells[-1])
                alone.add(cells[-1].alone())
    names = [cell.alone() for cell in cells]
    for cell in sorted(cells, key=lambda cell: names.count(cell.alone())) if small else ():
        others = (pairs(one) for one in cells if one != cell)
        if pairs(cell) & wanted <= set().union(*others):
            cells.remove(cell)
    return cells
