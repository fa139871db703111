"""Programs that strangers wrote, right and wrong ones, and what the graders say of them.

They stand in `exercises/_solutions/eNN_M/strangers.toml`. A swap is texts in pairs, old and new;
each old one is in the program once. A program is "solution", "starter", or one of the file's own.

    [programs]
    trie = '''...'''
    [right.trie]                # these changes stay right
    counts_twice = ['old', 'new']
    [named.solution]            # these are recognised as the mutant of that name
    one_too_many = ['old', 'new', 'another old', 'its new']
    [told.trie.a_node_per_token]
    swap = ['old', 'new']
    status = 'fail'             # of the verdict; this is the default
    says = 'the first message has this'         # one text or several
    tells = 'one of the messages has this'
    silent = 'no message has this'
    where = 'a check points to a line with this'
    mutant = 'node_per_token'   # '' for none
    only = ['test_edges']       # exactly these checks fail
    failed = ['test_edges']     # these fail, perhaps with others
    passed = ['test_match']
    first = 'test_edges'        # the first that fails
    earned = 2                  # points
    seconds = 1                 # of processor time, for programs without an end
"""

import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minillm_exercises.grader import Grader
from minillm_exercises.limits import DEFAULT
from minillm_exercises.manifest import Exercise, load_manifest
from minillm_exercises.results import Verdict

Expected = dict[str, Any]


def strangers(exercise: Exercise) -> Iterator[tuple[str, str, Expected]]:
    """Name, program and expectations of each."""
    file = exercise.answers / "strangers.toml"
    data = tomllib.loads(file.read_text("utf-8")) if file.exists() else {}
    own = data.get("programs", {})
    own |= {"solution": (exercise.answers / "solution.py").read_text("utf-8")}
    own |= {"starter": exercise.starter.read_text("utf-8")}
    for program, source in own.items():
        for name, swap in data.get("right", {}).get(program, {}).items():
            yield f"right-{name}", source, {"swap": swap, "status": "pass"}
        for name, swap in data.get("named", {}).get(program, {}).items():
            yield f"named-{name}", source, {"swap": swap, "mutant": name}
        for name, expected in data.get("told", {}).get(program, {}).items():
            yield f"told-{name}", source, expected


def parameters() -> Iterator[Any]:
    """All of them. Not slow is of every fourth exercise the first that is told something: that
    right ones pass is seen with `alternate.py` in test_verify_exercises.py, and that mistakes are
    named with toys in test_grader.py, and with the known ones in the run of `mutation`."""
    long = "e10.2-no_guard", "e11.1-a_row_in_pieces", "e11.2-pages_gathered_on_the_host"
    seen = {(each, kind) for each in load_manifest() for kind in ("named", "right")}
    for exercise in load_manifest().values():
        for name, source, expected in strangers(exercise):
            kind = exercise.id, name.partition("-")[0]
            is_long = f"{exercise.id}-{name.partition('-')[2]}" in long
            marks = [pytest.mark.slow] * (kind in seen or is_long or len(seen) % 4)
            seen.add(kind)
            yield pytest.param(exercise, source, expected, id=f"{exercise.id}-{name}", marks=marks)


@pytest.fixture(scope="module")
def grader(request: pytest.FixtureRequest) -> Grader:
    """One for all programs of an exercise."""
    if "triton" in request.param.needs:
        pytest.importorskip("triton")
    return Grader(request.param)


@pytest.mark.parametrize(("grader", "source", "expected"), parameters(), indirect=["grader"])
def test_a_stranger(grader: Grader, source: str, expected: Expected, tmp_path: Path) -> None:
    swap = expected.get("swap", [])
    for old, new in zip(swap[::2], swap[1::2], strict=True):
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    if seconds := expected.get("seconds"):
        verdict = grader.run(source, limits=replace(DEFAULT, cpu=seconds))
    else:
        file = tmp_path / "submission.py"
        file.write_text(source, "utf-8")
        verdict = grader.grade(file)
    assert (wrong := found(verdict, expected)) == [], "\n".join(wrong)


def found(verdict: Verdict, expected: Expected) -> list[str]:
    """In what a verdict is not as expected."""
    failed = [check.name for check in verdict.checks if check.status != "pass"]
    messages = [text for text in (verdict.message, *(c.message for c in verdict.checks)) if text]
    holds = {
        "swap": lambda _: True, "seconds": lambda _: True,
        "says": lambda texts: all(text in "".join(messages[:1]) for text in listed(texts)),
        "tells": lambda texts: all(any(x in m for m in messages) for x in listed(texts)),
        "silent": lambda text: not any(text in message for message in messages),
        "where": lambda text: any(text in check.where for check in verdict.checks),
        "mutant": lambda name: verdict.mutant == name, "only": lambda names: failed == names,
        "failed": lambda names: set(names) <= set(failed),
        "passed": lambda names: not set(names) & set(failed),
        "first": lambda name: failed[0] == name, "earned": lambda points: verdict.earned == points,
        "status": lambda status: verdict.status == status,
    }  # fmt: skip
    expected = {"status": "fail"} | expected
    wrong = [f"{key}: {value}" for key, value in expected.items() if not holds[key](value)]
    return [*wrong, f"{verdict.status}, {verdict.mutant!r}: {failed}", *messages] if wrong else []


def listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
