"""The tables of INSTRUCTOR.md, which would go stale, and the page of common errors.

    python exercises/instructor_tables.py            # are the tables up to date? (exit 1 if not)
    python exercises/instructor_tables.py --write    # bring them up to date
    python exercises/instructor_tables.py --errors   # print the page of common errors

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
TEACHING = ROOT / "notebooks" / "teaching"
BREAK = 15  # minutes
PAUSE = 10  # in the middle of a chapter whose teaching page has a place for one
LUNCH = 60
SLACK = 30  # for questions, and for what took longer
MOST = 250  # minutes of a day's chapters in the plan of the whole course
PLANS: Mapping[str, Sequence[str | int]] = MappingProxyType(
    {
        "half a day": ("00", BREAK, "01", BREAK, "03"),
        "one day": (
            *("00", "e00.1", BREAK, "01", LUNCH),
            *("03", "e03.1", BREAK, "06", "e06.1", SLACK),
        ),
        "first day of an engine": (
            *("01", BREAK, "01b", "e01.3", LUNCH),
            *("03", "e03.1", SLACK),
        ),
        "second day of an engine": (
            *("06", "e06.1", BREAK, "07", LUNCH),
            *("e07.1", "09", BREAK, "e09.1", SLACK),
        ),
        "first of two days": (
            *("00", "e00.1", BREAK, "01", "e01.1", LUNCH),
            *("02", BREAK, "03", "e03.1", SLACK),
        ),
        "second of two days": (
            *("05", BREAK, "06", "e06.1", LUNCH),
            *("07", "e07.1", BREAK, "08", "e08.1", SLACK),
        ),
        "third of four days": (
            *("09", BREAK, "04", LUNCH),
            *("10", "e10.1", BREAK, "16", SLACK),
        ),
        "fourth of four days": (
            *("11", BREAK, "12", LUNCH),
            *("18", BREAK, "19", SLACK),
        ),
        "for people who run vLLM": ("07", BREAK, "08", LUNCH, "09", BREAK, "22", SLACK),
        "what it costs to serve": ("13", BREAK, "15", LUNCH, "22", BREAK, "23", SLACK),
    }
)
DAYS = (  # plans of several days
    ("first day of an engine", "second day of an engine"),
    ("first of two days", "second of two days", "third of four days", "fourth of four days"),
    ("first of two days", "second of two days", "what it costs to serve"),
)
# What to say of a chapter that a plan leaves out and a later chapter needs: minutes, and what.
INSTEAD = {
    "00": (10, "no step is faster than the larger of bytes / bandwidth and operations / rate"),
    "01": (5, "a step of few tokens waits for bytes; above the knee it waits for operations"),
    "02": (5, "a model returns a score for each token, a logit; here the largest is chosen"),
    "03": (5, "keys and values of earlier tokens are kept, so a step computes only the new ones"),
    "05": (5, "a step of many rows reads the weights once, so a row more costs little"),
    "06": (5, "who runs is decided before every step, so no seat waits for a batch to end"),
    "09": (5, "a prompt that begins like an earlier one finds the cached blocks of this beginning"),
    "16": (5, "one step checks drafts, and keeps those that the model itself would have drawn"),
}
ERROR_PAGE = """\
# Common errors

What people most often get wrong in each exercise: the name of the mutant, and the sentence that is
shown to a learner whose code behaves like it.
"""
BLOCK = re.compile(r"(<!-- generated: (?P<name>[\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Chapter:
    """A chapter that exists: its file, the question it asks, the minutes it takes."""

    path: Path
    question: str
    minutes: int  # of a lone reader
    needs: Sequence[str]  # numbers of other chapters
    room: int  # minutes of a room, by its teaching page
    pause: int  # minutes of a break in it

    @property
    def link(self) -> str:
        """Its number, linked."""
        return f"[{self.path.stem.partition('_')[0]}](notebooks/{self.path.name})"


def load_chapters(folder: Path = ROOT / "notebooks") -> dict[str, Chapter]:
    """Every chapter by number, in order."""
    found = {}
    for path in sorted(folder.glob("[0-9][0-9]*_*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        about = notebook["metadata"]["minillm"]
        number, minutes = path.stem.partition("_")[0], int(about["minutes"])
        page = TEACHING / f"{number}.md"
        text = page.read_text("utf-8") if page.exists() else f"{minutes} in a room"
        (room,) = map(int, re.findall(r"(\d+)\s+in\s+a\s+room", text))
        pause = PAUSE if re.search(r"\bbreak\b", text, re.IGNORECASE) else 0
        found[number] = Chapter(path, about["question"], minutes, about["needs"], room, pause)
    return found


def contents(chapters: Mapping[str, Chapter], manifest: Mapping[str, Exercise]) -> Iterator[str]:
    """The table of what exists."""
    yield "| chapter | question | minutes (room) | exercises (minutes, points) | teaching page |"
    yield "|---|---|---|---|---|"
    for number, chapter in chapters.items():
        own = [exercise for exercise in manifest.values() if exercise.chapter == number]
        cells = "; ".join(
            f"{e.id} {e.title} ({'project, ' * e.project}{e.minutes}, {points(e)})" for e in own
        )
        page = TEACHING / f"{number}.md"
        teaching = f"[{number}](notebooks/teaching/{number}.md)" if page.exists() else ""
        row = chapter.link, chapter.question, f"{chapter.minutes} ({chapter.room})", cells, teaching
        yield f"| {' | '.join(map(str, row))} |"


def points(exercise: Exercise) -> int:
    """The points of an exercise's public checks."""
    return sum(check.points for check in list_checks(exercise))


def plan(
    name: str, chapters: Mapping[str, Chapter], manifest: Mapping[str, Exercise]
) -> Iterator[str]:
    """The table of one plan: when each part begins, with how long it is."""
    yield "| at | minutes | what |"
    yield "|---|---|---|"
    now, seen = 0, {str(part) for day in days_before(name) for part in PLANS[day]}
    for part in PLANS[name]:
        for minutes, what in rows(part, seen, chapters, manifest):
            yield f"| {now // 60}:{now % 60:02} | {minutes} | {what} |"
            now += minutes
        seen.add(str(part))
    yield f"| {now // 60}:{now % 60:02} | | end |"


def rows(
    part: str | int,
    seen: set[str],
    chapters: Mapping[str, Chapter],
    manifest: Mapping[str, Exercise],
) -> Iterator[tuple[int, str]]:
    """Minutes and words of one part of a plan, after what stands for chapters that it needs and
    that are not `seen`."""
    if isinstance(part, int):
        yield part, {LUNCH: "lunch", SLACK: "slack"}.get(part, "break")
    elif part in manifest:
        yield manifest[part].minutes, f"{part} {manifest[part].title}"
    elif part in chapters:
        chapter = chapters[part]
        for need in [need for need in chapter.needs if need not in seen]:
            seen.add(need)
            minutes, what = INSTEAD[need]
            yield minutes, f"from {chapters[need].link}: {what}"
        words = f" ({chapter.pause} for a break in it)" if chapter.pause else ""
        yield chapter.room + chapter.pause, f"{chapter.link} {chapter.question}{words}"


def days_before(name: str) -> Sequence[str]:
    """The days of a plan that come before a day."""
    return next((days[: days.index(name)] for days in DAYS if name in days), ())


def whole(chapters: Mapping[str, Chapter]) -> Iterator[str]:
    """The table of the whole course: the chapters of each day, in order."""
    days: list[list[Chapter]] = [[]]
    for chapter in chapters.values():
        if sum(each.room for each in days[-1]) + chapter.room > MOST:
            days.append([])
        days[-1].append(chapter)
    yield "| day | chapters (minutes in a room) | together |"
    yield "|---|---|---|"
    for number, day in enumerate(days, 1):
        parts = ", ".join(f"{each.link} ({each.room})" for each in day)
        yield f"| {number} | {parts} | {sum(each.room for each in day)} |"


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
        "the whole course": lambda: whole(chapters),
        **{name: lambda name=name: plan(name, chapters, manifest) for name in PLANS},  # type: ignore[misc]
    }
    return {name: "\n".join(make()).strip() for name, make in made.items()}


def error_page() -> str:
    """The page of common errors, whole."""
    return "\n".join([*ERROR_PAGE.splitlines(), "", *errors(load_manifest())])


def filled(text: str) -> str:
    """The guide with its generated parts made anew."""
    made = blocks()
    return BLOCK.sub(lambda m: f"{m[1]}\n{made[m['name']]}\n\n{m[3]}", text)


def main(arguments: Sequence[str]) -> int:
    """Compare, write or print; 0 if the guide is up to date at the end."""
    if "--errors" in arguments:
        sys.stdout.write(error_page())
        return 0
    text = GUIDE.read_text(encoding="utf-8")
    if filled(text) == text:
        return 0
    if "--write" in arguments:
        GUIDE.write_text(filled(text), encoding="utf-8")
        return 0
    sys.stdout.write(
        f"Out of date: {GUIDE.name}. Run: python exercises/instructor_tables.py --write\n"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
