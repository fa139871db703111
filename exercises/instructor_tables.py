"""The parts of INSTRUCTOR.md that would go stale: plans with their times, and common errors.

    python exercises/instructor_tables.py            # is INSTRUCTOR.md up to date? (exit 1 if not)
    python exercises/instructor_tables.py --write    # bring it up to date

Times come from the chapters' metadata and exercises.toml, errors from the known-wrong solutions in
`_solutions/`.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from minillm_exercises.grader import list_checks
from minillm_exercises.manifest import Exercise, load_manifest

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "INSTRUCTOR.md"
BREAK = 15  # minutes
LUNCH = 60
PLANS: Mapping[str, Sequence[str | int]] = MappingProxyType(
    {
        "half a day": ("00", "e00.1", BREAK, "01", "e01.1", BREAK, "03", "e03.1"),
        "one day": (
            *("00", "e00.1", BREAK, "01", "e01.1", "03", "e03.1", LUNCH),
            *("05", "e05.1", "06", "e06.1", BREAK, "07", "e07.1"),
        ),
        "first of two days": (
            *("00", "e00.1", "e00.2", BREAK, "01", "e01.1", "e01.2", LUNCH),
            *("02", "e02.1", "e02.2", BREAK, "03", "e03.1", "e03.2"),
        ),
        "second of two days": (
            *("05", "e05.1", BREAK, "06", "e06.1", "07", "e07.1", LUNCH),
            *("08", "e08.1", BREAK, "09", "e09.1"),
        ),
        "a third day": (
            *("04", "e04.1", "e04.2", BREAK, "10", "e10.1", "e10.2", LUNCH),
            *("11", "e11.1", BREAK, "e11.2", "12", "e12.1"),
        ),
    }
)
BLOCK = re.compile(r"(<!-- generated: (?P<name>[\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Chapter:
    """A chapter that exists: its file, the question it asks, the minutes it takes."""

    path: Path
    question: str
    minutes: int

    @property
    def link(self) -> str:
        """Its number, linked."""
        return f"[{self.path.stem[:2]}](notebooks/{self.path.name})"


def load_chapters(folder: Path = ROOT / "notebooks") -> dict[str, Chapter]:
    """Every chapter by number, in order."""
    found = {}
    for path in sorted(folder.glob("[0-9][0-9]_*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        about = notebook["metadata"]["minillm"]
        found[path.stem[:2]] = Chapter(path, about["question"], int(about["minutes"]))
    return found


def contents(chapters: Mapping[str, Chapter], manifest: Mapping[str, Exercise]) -> Iterator[str]:
    """The table of what exists."""
    yield "| chapter | question | minutes | exercises (minutes, points) |"
    yield "|---|---|---|---|"
    for number, chapter in chapters.items():
        own = [exercise for exercise in manifest.values() if exercise.chapter == number]
        cells = "; ".join(f"{e.id} {e.title} ({e.minutes}, {points(e)})" for e in own)
        yield f"| {chapter.link} | {chapter.question} | {chapter.minutes} | {cells} |"


def points(exercise: Exercise) -> int:
    """The points of an exercise's public checks."""
    return sum(check.points for check in list_checks(exercise))


def plan(
    name: str, chapters: Mapping[str, Chapter], manifest: Mapping[str, Exercise]
) -> Iterator[str]:
    """The table of one plan: when each part begins, with how long it is."""
    yield "| at | minutes | what |"
    yield "|---|---|---|"
    now = 0
    for part in PLANS[name]:
        if isinstance(part, int):
            minutes, what = part, "lunch" if part == LUNCH else "break"
        elif part in chapters:
            chapter = chapters[part]
            minutes, what = chapter.minutes, f"{chapter.link} {chapter.question}"
        elif part in manifest:
            minutes, what = manifest[part].minutes, f"{part} {manifest[part].title}"
        else:
            continue
        yield f"| {now // 60}:{now % 60:02} | {minutes} | {what} |"
        now += minutes
    yield f"| {now // 60}:{now % 60:02} | | end |"


def errors(manifest: Mapping[str, Exercise]) -> Iterator[str]:
    """The list of known misconceptions per exercise."""
    for exercise in manifest.values():
        yield f"**{exercise.id} {exercise.title}**"
        yield ""
        for mutant in exercise.mutants:
            yield f"- `{mutant.name}`: {mutant.teaches}"
        yield ""


def blocks() -> dict[str, str]:
    """Every generated part of the guide by name."""
    chapters, manifest = load_chapters(), load_manifest()
    made: dict[str, Callable[[], Iterator[str]]] = {
        "contents": lambda: contents(chapters, manifest),
        "errors": lambda: errors(manifest),
        **{name: lambda name=name: plan(name, chapters, manifest) for name in PLANS},  # type: ignore[misc]
    }
    return {name: "\n".join(make()).strip() for name, make in made.items()}


def filled(text: str) -> str:
    """The guide with its generated parts made anew."""
    made = blocks()
    return BLOCK.sub(lambda m: f"{m[1]}\n{made[m['name']]}\n\n{m[3]}", text)


def main(arguments: Sequence[str]) -> int:
    """Compare or write; 0 if INSTRUCTOR.md is up to date at the end."""
    old = GUIDE.read_text(encoding="utf-8")
    new = filled(old)
    if "--write" in arguments:
        GUIDE.write_text(new, encoding="utf-8")
    elif old != new:
        sys.stdout.write(
            "INSTRUCTOR.md is out of date: python exercises/instructor_tables.py --write\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
