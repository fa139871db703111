"""The course's helpers and graders.

In a notebook::

    from minillm_exercises import predict, compare, measure, fact, figure, show, check
"""

from minillm_exercises.notebook import (
    check,
    compare,
    engine,
    fact,
    hint,
    predict,
    quiz,
    record,
    say,
    task,
    turn,
)
from minillm_exercises.plots import bars, bound, figure, listing, series, show
from minillm_exercises.timing import Timing, measure
from minillm_exercises.widgets import design, explore, step_through

__all__ = [
    "Timing", "bars", "bound", "check", "compare", "design", "engine", "explore", "fact", "figure",
    "hint", "listing", "measure", "predict", "quiz", "record", "say", "series", "show",
    "step_through", "task", "turn",
]  # fmt: skip
