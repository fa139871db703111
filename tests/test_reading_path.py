"""The reading path of `minillm/README.md`: short, and complete without the files beside it."""

import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.test_floors import graph_of_minillm

ROOT = Path(__file__).resolve().parent.parent
RULES = tomllib.loads((ROOT / "tests" / "reading_path.toml").read_text("utf-8"))
STEP = re.compile(
    r"^\| (\d+) \| \[`([\w/]+\.py)`\]\(([\w/]+\.py)\) \| .+ \| (\d+) \| (\d+) \|$", re.M
)
LINES_PER_MINUTE = 50


class Step(NamedTuple):
    """One row of the table: its number, its file below `minillm/`, lines and minutes."""

    number: int
    file: str
    lines: int
    minutes: int


def steps_of(page: str) -> list[Step]:
    """The rows of the reading path, in order."""
    return [
        Step(int(number), file, int(lines), int(minutes))
        for number, file, link, lines, minutes in STEP.findall(page)
        if file == link
    ]


PAGE = (ROOT / "minillm" / "README.md").read_text("utf-8")
STEPS = steps_of(PAGE)
MODULES = ["minillm." + step.file.removesuffix(".py").replace("/", ".") for step in STEPS]


def num_lines(file: str) -> int:
    """Lines of a file below `minillm/`."""
    return len((ROOT / "minillm" / file).read_text("utf-8").splitlines())


def too_long(total: int, rules: dict[str, Any]) -> list[str]:
    """What is wrong with a path of `total` lines."""
    features, allowance = rules["features"], rules["allowance"]
    wrong = [
        f"{name} adds {lines} lines to the path; a feature may add {allowance}"
        for name, lines in features.items()
        if lines > allowance
    ]
    if total > (due := rules["base"] + sum(features.values())):
        wrong.append(
            f"the path has {total} lines; base and features of tests/reading_path.toml allow "
            f"{due}: put what is new into a file beside the path, or name the feature there"
        )
    if total > rules["max_lines"]:
        wrong.append(f"the path has {total} lines; the limit is {rules['max_lines']}")
    return wrong


def foreign(graph: dict[str, Any], modules: list[str], allowed: dict[str, str]) -> list[str]:
    """Imports of the path's modules that lead neither to the path nor to a module named for it."""
    return [
        f"{module}:{line} imports {name}: read it on the path, or name it in reading_path.toml"
        for module in modules
        for name, line in graph[module]
        if name.split(".")[0] == "minillm" and name not in modules and name not in allowed
    ]


def counted(page: str) -> str:
    """The page with the lines and minutes of every file as they are, and their sums."""
    total = minutes = 0
    for step in steps_of(page):
        lines = num_lines(step.file)
        total, minutes = total + lines, minutes + (due := max(1, round(lines / LINES_PER_MINUTE)))
        row = re.compile(rf"(\]\({step.file}\) \| .+ \| )\d+ \| \d+ \|$", re.M)
        page = row.sub(rf"\g<1>{lines} | {due} |", page)
    sums = rf"\g<1>{total:,}** | **{minutes}**"
    return re.sub(r"(\| \*\*\d+ files\*\* \| \| \*\*)[\d,]+\*\* \| \*\*\d+\*\*", sums, page)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.file)
def test_lines_and_minutes_are_those_of_the_file(step: Step) -> None:
    lines = num_lines(step.file)
    why = f"{step.file} has {lines} lines: python -m tests.test_reading_path"
    assert abs(step.lines - lines) <= max(5, lines // 20), why
    assert step.minutes == max(1, round(step.lines / LINES_PER_MINUTE))


def test_the_path_is_short() -> None:
    assert too_long(sum(num_lines(step.file) for step in STEPS), RULES) == []


def test_the_path_needs_few_other_files() -> None:
    assert foreign(graph_of_minillm(), MODULES, RULES["imports"]) == []


def test_every_named_import_is_one() -> None:
    imported = {name for module in MODULES for name, _ in graph_of_minillm()[module]}
    assert set(RULES["imports"]) - imported == set()


# The checks above are worth what they catch.


if __name__ == "__main__":  # renew the table
    (ROOT / "minillm" / "README.md").write_text(counted(PAGE), "utf-8")
