"""Small tasks between the sections of a chapter: a few lines to fill in, checked at once.

A cell tagged `turn` holds its answer in lines that end in ``# answer``. The published page shows
them. `notebooks/lab.py` replaces them by ``...`` in a learner's copy, and puts the answer below the
cell, folded.
"""

import math
import re
from typing import Any

from minillm_exercises.errors import ExerciseError

MARK = re.compile(r"\s+# answer$")
BLANK = "...  # your turn"


def is_open(answer: Any) -> bool:
    """Whether something is not filled in: `...`, or None from a function whose body is `...`."""
    if isinstance(answer, list | tuple):
        return any(is_open(part) for part in answer)
    if isinstance(answer, dict):
        return any(is_open(part) for part in answer.values())
    return answer is None or answer is Ellipsis


def plain(value: Any) -> Any:
    """Tensors and arrays as numbers and nested lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def same(answer: Any, expected: Any) -> bool:
    """Equality of numbers up to rounding, and of tensors, lists, tuples and dicts of numbers."""
    answer, expected = plain(answer), plain(expected)
    if isinstance(expected, list | tuple):
        fits = isinstance(answer, list | tuple) and len(answer) == len(expected)
        return fits and all(map(same, answer, expected))
    if isinstance(expected, dict):
        fits = isinstance(answer, dict) and answer.keys() == expected.keys()
        return fits and all(same(answer[key], expected[key]) for key in expected)
    if isinstance(answer, bool) or isinstance(expected, bool):
        return answer is expected
    numbers = isinstance(answer, int | float) and isinstance(expected, int | float)
    if numbers and float in (type(answer), type(expected)):
        return math.isclose(answer, expected, rel_tol=1e-5, abs_tol=1e-9)
    return bool(answer == expected)


def verdict(answer: Any, expected: Any, hint: str) -> str:
    """What a learner reads: the cell is open, right, or not right yet with the hint."""
    if is_open(answer):
        return "Your turn: replace the dots above, and run this cell again."
    if same(answer, expected):
        return f"Right: {short(answer)}."
    return f"Not yet: your answer is {short(answer)}. {hint}"


def short(value: Any) -> str:
    """A value in at most 80 characters; large integers get thousands commas."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(plain(value))
    return text if len(text) <= 80 else f"{text[:77]}..."


def blanked(source: str) -> str:
    """The cell as a learner gets it: each run of answer lines becomes one line with dots.

    An assignment keeps its name. Other lines, a function's body for instance, become dots with the
    indentation of the first.

    Raises:
        ExerciseError: the source has no answer line.
    """
    lines: list[str] = []
    inside = False
    for line in source.splitlines():
        if not MARK.search(line):
            inside = False
            lines.append(line)
            continue
        indent, name = re.fullmatch(r"(\s*)(?:(\w+(?:, \w+)*) = )?.*", line).groups()  # type: ignore[union-attr]
        if name and not indent:
            several = name.count(",")
            dots = ", ".join(["..."] * (several + 1))
            lines.append(f"{name} = {dots}  # your turn")
        elif not inside:
            lines.append(indent + BLANK)
        inside = True
    if lines == source.splitlines():
        raise ExerciseError('A cell tagged "turn" has no line that ends in "# answer".')
    return "\n".join(lines)


def unmarked(source: str) -> str:
    """The source with the marks of its answer lines removed."""
    return "\n".join(MARK.sub("", line) for line in source.splitlines())


def answer_cell(source: str) -> str:
    """Markdown with the answer, folded until a reader opens it."""
    code = unmarked(source)
    return f"<details><summary>Answer</summary>\n\n```python\n{code}\n```\n\n</details>"
