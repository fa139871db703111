"""What several chapters use: rounds of measurements, tables, and drawn traces."""

import os
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeVar

from minillm.trace.recorder import Trace
from minillm_exercises.errors import ExerciseError
from minillm_exercises.plots import show

T = TypeVar("T")


def rounds(count: int) -> int:
    """How often to measure: `count` times, or once where only the facts are wanted, as by
    `timing.measure`."""
    return 1 if os.environ.get("MINILLM_QUICK") else count


def rounded(value: Fraction | float, digits: int = 1) -> str:
    """A number with so many decimals, for a fact."""
    return f"{float(value):.{digits}f}"


def chosen(what: str, name: str, known: Mapping[str, T]) -> T:
    """The entry of this name.

    Raises:
        ExerciseError: there is none; the sentence says which there are.
    """
    if name not in known:
        raise ExerciseError(f"{what} is {name!r}; it must be one of {', '.join(known)}.")
    return known[name]


def show_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Show a table; a bool is a tick or a cross, and columns of numbers should have a unit."""
    from IPython.display import Markdown, display

    def cell(value: object) -> str:
        words = {True: "\u2713 passes", False: "\u2717 fails"}
        return words[value] if isinstance(value, bool) else str(value)

    lines = [" | ".join(map(cell, row)) for row in (head, ["---"] * len(head), *rows)]
    display(Markdown("\n".join(f"| {line} |" for line in lines)))


def show_trace(trace: Trace, caption: str, until: float | None = None, **options: Any) -> None:
    """Show the drawing of a trace with `caption` below; `options` are those of
    `minillm.lab.drawings.figure.figure`, such as ``panels=("gantt", "blocks")``. `until` is the
    end of the time axis, for drawings that are compared."""
    fig = trace.figure(**options)
    for ax in fig.axes if until is not None else ():
        ax.set_xlim(right=until)
    show(fig, caption)
