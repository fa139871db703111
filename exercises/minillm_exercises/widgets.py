"""Widgets for looking around: they only call a tested function, and a page without them loses
nothing, because the same function is drawn once with fixed values."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from minillm_exercises.errors import ExerciseError

HEADLESS = ("MINILLM_RESULTS", "MINILLM_QUICK", "PYTEST_CURRENT_TEST", "CI")
CSS = Path(__file__).with_name("cells.css")


def _shell() -> Any:
    """IPython's shell, or None outside of it."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


def cell_number() -> int | None:
    """The number of the cell that runs, new in each run; None outside of a notebook."""
    return getattr(_shell(), "execution_count", None)


def is_live() -> bool:
    """Whether a person could press a button: a notebook kernel, outside tests and publication."""
    return hasattr(_shell(), "kernel") and not any(os.environ.get(name) for name in HEADLESS)


def design() -> None:
    """In a live notebook, give each kind of cell its colour, with the style sheet in `CSS`."""
    if is_live():
        from IPython.display import HTML, display

        display(HTML(f"<style>{CSS.read_text(encoding='utf-8')}</style>"))


def mark(kind: str) -> None:
    """In a live notebook, say once in the output of a cell what kind of cell it is."""
    if is_live():
        _mark(kind, cell_number())


@cache
def _mark(kind: str, cell: int | None) -> None:
    from IPython.display import HTML, display

    name = {"turn": "Your turn"}.get(kind, kind.capitalize())
    display(HTML(f'<span class="minillm minillm-{kind}">{name}</span>'))


def buttons(options: Mapping[str, str], press: Callable[[str], str], said: str = "") -> None:
    """In a live notebook, a button for each letter of `options`; beside them stands what `press`
    returned for the last one, and `said` before."""
    if not is_live():
        return
    from html import escape

    from IPython.display import display  # only a live notebook needs these two
    from ipywidgets import HTML, Button, HBox, Layout

    answer, row = HTML(value=said), []

    def pressed(button: Any) -> None:
        answer.value = escape(press(button.description))

    for letter, option in options.items():
        button = Button(description=letter, tooltip=option, layout=Layout(width="4em"))
        button.on_click(pressed)
        row.append(button)
    display(HBox([*row, answer]))


def explore(
    function: Callable[..., object], static: Mapping[str, Any], **choices: Sequence[Any]
) -> None:
    """Draw ``function(**static)``; in a live notebook add a slider for every argument of `choices`
    (its values in order). Moving one draws again, below; the first drawing stays to compare with.

    Raises:
        ExerciseError: `static` and `choices` do not name the same arguments, or a static value is
            not among the choices.
    """
    if set(static) != set(choices):
        raise ExerciseError(
            f"explore() has choices for {sorted(choices)} and static values for {sorted(static)}; "
            f"they must name the same arguments."
        )
    for name, value in static.items():
        if value not in choices[name]:
            raise ExerciseError(f"explore(): {name}={value!r} is none of {list(choices[name])}.")
    function(**static)
    if is_live():
        _add_sliders(function, static, choices)


def step_through(trace: Any) -> None:
    """In a live notebook, the viewer of a `minillm.trace.Trace`: curves over its steps, and every
    request, block and number of the chosen one."""
    if is_live():
        from IPython.display import display

        display(trace.widget())
    else:
        sys.stdout.write("In JupyterLab the trace viewer opens here: point at a step.\n")


def _add_sliders(
    function: Callable[..., object], static: Mapping[str, Any], choices: Mapping[str, Sequence[Any]]
) -> None:
    from IPython.display import display  # only a live notebook needs these two
    from ipywidgets import HTML, Output, SelectionSlider, VBox

    sliders = {
        name: SelectionSlider(
            options=list(values), value=static[name], description=name, continuous_update=False
        )
        for name, values in choices.items()
    }
    drawing = Output()

    def draw(_: object) -> None:
        drawing.clear_output(wait=True)
        with drawing:
            function(**{name: slider.value for name, slider in sliders.items()})

    for slider in sliders.values():
        slider.observe(draw, names="value")
    display(VBox([HTML("Move a slider to draw it again:"), *sliders.values(), drawing]))
