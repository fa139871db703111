"""What several chapters use: the option nearest to a measurement, tables, and drawn traces."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from minillm.trace.recorder import Trace
from minillm_exercises.errors import ExerciseError
from minillm_exercises.notebook import say
from minillm_exercises.plots import show

T = TypeVar("T")


def nearest(value: float, options: Mapping[str, float]) -> str:
    """The letter of the option whose ratio to `value` is closest to 1; options are above 0."""
    low, high = min(options.values()), max(options.values())
    value = min(max(value, low), high)  # zero is nearest to the smallest, infinity to the largest
    return min(options, key=lambda letter: abs(math.log(options[letter] / value)))


def rounds(count: int) -> int:
    """How often to measure: `count` times, or once where only the facts are wanted, as by
    `timing.measure`."""
    return 1 if os.environ.get("MINILLM_QUICK") else count


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


def your_turn(function: Callable[..., Any], *cases: tuple[tuple[Any, ...], Any]) -> None:
    """Try a function that the reader is writing on cases (arguments, result), up to the first that
    it does not give; a function that returns None is not written yet."""
    for arguments, wanted in cases:
        call = f"{function.__name__}({', '.join(map(repr, arguments))})"
        found = function(*arguments)
        if found is None:
            say(f"Your turn: {call} should be {wanted}.")
            return
        if not _same(found, wanted):
            say(f"Not yet: {call} should be {wanted} and is {found}.")
            return
    say(f"{function.__name__} is right in all {len(cases)} cases.")


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, float):
        return isinstance(found, int | float) and math.isclose(found, wanted, abs_tol=1e-9)
    return bool(found == wanted)
