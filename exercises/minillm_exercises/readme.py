"""The task of an exercise, taken from its folder's README.md, which holds both tasks."""

import re

from minillm_exercises.manifest import Exercise

HEADING = re.compile(r"^(#+)\s+(.*)$")


def task(exercise: Exercise) -> str:
    """The section of the README whose heading names the exercise, as Markdown without the heading;
    empty when there is none."""
    try:
        lines = (exercise.folder / "README.md").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    found: list[str] = []
    depth, fenced = 0, False
    for line in lines:
        fenced ^= line.startswith("```")
        heading = None if fenced else HEADING.match(line)
        if heading and depth and len(heading[1]) <= depth:
            break
        if heading and not depth and exercise.id in heading[2]:
            depth = len(heading[1])
        elif depth:
            found.append(line)
    return "\n".join(found).strip()


def brief(exercise: Exercise) -> str:
    """The beginning of the task: its first paragraph, and the code that belongs to it."""
    text = task(exercise)
    first, gap, rest = text.partition("\n\n")
    if first.startswith("```"):
        return text[: text.find("```", 3) + 3]
    fence = re.match(r"\s*```.*?\n```", rest, re.DOTALL)
    return first + gap + fence[0] if fence else first
