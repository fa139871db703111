"""Small tasks between the sections of a chapter: a few lines to fill in, checked at once.

A cell tagged `turn` has its answer in lines that end in ``# answer``, which `notebooks/lab.py`
replaces by ``...`` in a learner's copy. `exercises/turns.json` has salted hashes of the answers,
and in base64 what is said about them: nobody reads them by accident, and who looks finds them.
"""

import base64
import hashlib
import json
import math
import re
import zlib
from fractions import Fraction
from typing import Any

from minillm_exercises.errors import ExerciseError
from minillm_exercises.manifest import exercises_root
from minillm_exercises.wording import wrapped

RUN = re.compile(r"(?:.*  # answer(?:\n|$))+")  # answer lines that follow each other
GIVE_UP = "give up"


def canonical(value: Any, digits: int, by: float = 1) -> str:
    """One text for all ways to write an answer: a tuple and an array are lists, 2.0 is 2. Numbers
    are rounded to so many significant `digits`, and exact with 0. `by` multiplies fractions."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return f"[{','.join(canonical(part, digits, by) for part in value)}]"
    if isinstance(value, dict):
        parts = (f"{canonical(key, 0)}:{canonical(value[key], digits, by)}" for key in value)
        return f"{{{','.join(sorted(parts))}}}"
    if isinstance(value, bool) or not isinstance(value, int | float | Fraction):
        return repr(value)
    if isinstance(value, int) and not (digits and abs(value) < 1e300):
        return str(value)
    number = value if isinstance(value, int) else float(value) * by
    if digits and math.isfinite(number):
        return f"{number if abs(number) > 1e-9 else 0:.{digits - 1}e}"
    whole = math.isfinite(number) and math.isclose(number, round(number), abs_tol=1e-9)
    return str(round(number) if whole else number)


def hashed(name: str, answer: Any, digits: int, by: float = 1) -> str:
    """Sixteen hexadecimal digits of an answer; the name of the question is the salt."""
    return hashlib.sha256(f"{name}={canonical(answer, digits, by)}".encode()).hexdigest()[:16]


def sealed(name: str, answer: Any, hint: str, why: str = "") -> str:
    """The entry of `exercises/turns.json` for a question: digits, hash, and the sentences for a
    wrong and for a right answer. With these digits no number is near the middle between two
    roundings, so that an error of rounding changes no hash."""
    near = (1 - 1e-5, 1, 1 + 1e-5)
    digits = next(n for n in (0, 4, 5, 3) if len({hashed(name, answer, n, by) for by in near}) == 1)
    said = base64.b64encode(zlib.compress(json.dumps([hint, why or hint]).encode())).decode()
    return f"{digits} {hashed(name, answer, digits)} {said}"


def load_turns() -> dict[str, str]:
    """The sealed answers by the name of their question."""
    path = exercises_root() / "turns.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ExerciseError(f"The answers of the small tasks cannot be read: {error}.") from None


def verdict(name: str, answer: Any) -> str:
    """What a learner reads: the cell is open, right, or not right yet with a hint; or the published
    answer, if they give up.

    Raises:
        ExerciseError: there is no such question, or the answers cannot be read.
    """
    if str(name) not in (known := load_turns()):
        near = ", ".join(each for each in known if of_chapter(each) == of_chapter(name)) or "none"
        raise ExerciseError(f"There is no question {name!r}; this chapter has: {near}.")
    if isinstance(answer, str) and answer == GIVE_UP:
        return published(name)
    if re.search(r"\b(None|Ellipsis)\b", canonical(answer, 0)):  # a function's body may be dots
        give_up = f'turn("{name}", "{GIVE_UP}") shows an answer.'
        return wrapped(f"Your turn: replace the dots above, and run this cell again. {give_up}")
    digits, right, said = known[name].split()
    hint, why = json.loads(zlib.decompress(base64.b64decode(said)))
    if hashed(name, answer, int(digits)) == right:
        return wrapped(f"Right: {short(answer)}. {why}")
    return wrapped(f"Not yet: your answer is {short(answer)}. {hint}")


def of_chapter(name: object) -> str:
    """The chapter of a question: "03", "01b"."""
    return str(name).partition(".")[0]


def published(name: str) -> str:
    """The answer lines of the chapter as it is published, beside the exercises."""
    for path in (exercises_root().parent / "notebooks").glob(f"{of_chapter(name)}_*.ipynb"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if f'turn("{name}",' in (source := "".join(cell["source"])):
                lines = "".join(RUN.findall(source)).replace("  # answer", "").rstrip("\n")
                return f"An answer, in place of the dots:\n{lines}"
    return "An answer is in the published chapter, which is not on this machine."


def short(value: Any) -> str:
    """A value in at most 80 characters; large integers get thousands commas."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = re.sub(r"\d+\.\d{5,}(e-?\d+)?", lambda match: f"{float(match[0]):.4g}", str(value))
    if len(text) <= 80:
        return text
    parts = ("], ", ", ")  # whole rows, or whole numbers
    ends = [at + len(part) for part in parts if (at := text.rfind(part, 0, 77)) > 0]
    return f"{text[: ends[0] if ends else 77]}..."


def blanked(source: str) -> str:
    """The cell as a learner gets it: an answer that is an assignment keeps its name, and a run of
    other answer lines, such as a function's body, becomes one line with dots.

    Raises:
        ExerciseError: the source has no answer line.
    """

    def dots(run: re.Match[str]) -> str:
        names = re.findall(r"^(\w+(?:, \w+)*) = ", run[0], re.MULTILINE)
        named = [name + " = " + re.sub(r"\w+", "...", name) for name in names]
        lines = named or [f"{run[0][: -len(run[0].lstrip())]}..."]
        return "".join(f"{line}  # your turn\n" for line in lines)

    if not RUN.search(source):
        raise ExerciseError('A cell tagged "turn" has no line that ends in "# answer".')
    return RUN.sub(dots, source).rstrip("\n")
