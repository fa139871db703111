"""Known-wrong solutions, each a change to the right one: `_solutions/eNN_M/mutants.toml`.

    [launch_timed]
    teaches = "You timed the launch, not the work: call sync() before you read the clock."
    change = '''
             step(x)
    -        sync()  # the step was only launched
             times.append(clock() - start)
    '''

A change is a diff without line numbers: lines that go (-), lines that come (+), and as many of
their neighbours as make the place the only one in solution.py. A line @@ begins another place. So
the mistake is what one reads, and it stays a mistake in the solution as it is now.
"""

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path

from minillm_exercises.errors import ExerciseError

FILE = "mutants.toml"
PLACE = "@@"


@dataclass(frozen=True)
class Mutant:
    """A plausible mistake: the sentence to its author, and the solution with it."""

    name: str
    teaches: str
    source: str


def load_mutants(answers: Path) -> tuple[Mutant, ...]:
    """The mutants of the exercise whose answers are in this folder, by name; none in a learner's
    release.

    Raises:
        ExerciseError: the file cannot be read, or a change does not fit the solution.
    """
    path = answers / FILE
    if not path.is_file():
        return ()
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
        solution = (answers / "solution.py").read_text(encoding="utf-8")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ExerciseError(f"The mutants of {answers.name} cannot be read: {error}.") from None
    found = []
    for name, entry in sorted(entries.items()):
        right = isinstance(entry, dict) and set(entry) == {"teaches", "change"}
        if not right or not all(isinstance(text, str) and text for text in entry.values()):
            raise ExerciseError(
                f"{answers.name}, mutant {name}: write teaches = the sentence to its author, and "
                f"change = the lines that go and come."
            )
        try:
            source = changed(solution, entry["change"])
            ast.parse(source)
        except (ValueError, SyntaxError) as error:
            raise ExerciseError(f"{answers.name}, mutant {name}: {error}") from None
        found.append(Mutant(name, entry["teaches"], source))
    return tuple(found)


def changed(source: str, change: str) -> str:
    """`source` with a change made.

    Raises:
        ValueError: a place of the change is in the source not once, or changes nothing.
    """
    lines = source.split("\n")
    for place in change.strip("\n").split(f"\n{PLACE}\n"):
        marked = [(line[:1] or " ", line[1:]) for line in place.split("\n")]
        if wrong := {mark for mark, _ in marked} - set("-+ "):
            raise ValueError(f"a line of a change begins with -, + or a blank, not {min(wrong)!r}.")
        old = [text for mark, text in marked if mark != "+"]
        new = [text for mark, text in marked if mark != "-"]
        starts = [at for at in range(len(lines)) if lines[at : at + len(old)] == old]
        if len(starts) != 1 or old == new:
            told = " / ".join(text.strip() for text in old)
            raise ValueError(
                f"the lines {told!r} stand in solution.py {len(starts)} times, and a change takes "
                f"some that stand there once and changes them: name other neighbours."
            )
        lines[starts[0] : starts[0] + len(old)] = new
    return "\n".join(lines)
