"""The counts in README.md: lines of the package, and chapters of the course."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
TOLERANCE = 0.03


def lines(folder: Path) -> int:
    """Lines of all Python files below a folder."""
    return sum(len(each.read_text("utf-8").splitlines()) for each in folder.rglob("*.py"))


def test_the_lines_of_the_package_are_within_three_percent():
    row = re.search(r"^\| lines of Python \| (.*?) \| 1,385 ", README, re.M)
    assert row, "README.md has no row 'lines of Python'"
    said = [int(each.replace(",", "")) for each in re.findall(r"\b\d+,\d{3}\b", row.group(1))]
    lab, package = lines(ROOT / "minillm" / "lab"), lines(ROOT / "minillm")
    path = re.search(
        r"\| \*\*\d+ files\*\* \| \| \*\*([\d,]+)\*\*",
        (ROOT / "minillm/README.md").read_text("utf-8"),
    )
    assert path, "minillm/README.md has no total of the reading path"
    counted = [package, package - lab, int(path.group(1).replace(",", "")), lab]
    assert len(said) == len(counted)
    for one, other in zip(said, counted, strict=True):
        assert abs(one - other) <= TOLERANCE * other, f"README.md says {said}, counted: {counted}"


def test_the_chapters_are_counted():
    chapters = len(list((ROOT / "notebooks").glob("[0-9][0-9]*_*.ipynb")))
    assert f"There are {chapters} chapters" in README
