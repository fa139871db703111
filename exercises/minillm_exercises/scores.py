"""The report for an instructor: every begun exercise graded again, as JSON and as JUnit XML.

The JSON is a superset of exercism's results.json, version 3
(https://exercism.org/docs/building/tooling/test-runners/interface).
"""

import importlib.metadata
import platform
import re
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minillm_exercises.explain import clean
from minillm_exercises.manifest import Exercise
from minillm_exercises.results import CheckResult, Verdict
from minillm_exercises.session import Session, checks_of, max_points

VERSION = 3
MAX_OUTPUT = 500  # characters; exercism's limit for what a test printed
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

Graded = tuple[Exercise, Verdict]


def grade_begun(
    session: Session, seed: int = 0, told: Callable[[Exercise], None] = lambda _: None
) -> list[Graded]:
    """Grade every exercise the learner has a file of; `told` is called before each."""
    graded = []
    for exercise in session.manifest.values():
        if session.workspace.begun(exercise):
            told(exercise)
            graded.append((exercise, session.run(exercise, seed=seed)))
    return graded


def report(session: Session, graded: Sequence[Graded], seed: int = 0) -> dict[str, Any]:
    """The report as plain data for JSON."""
    progress = session.progress()
    numbers = {exercise_id: n for n, exercise_id in enumerate(session.manifest, 1)}
    tests = [test for e, verdict in graded for test in _tests(e, verdict, numbers[e.id])]
    earned = sum(verdict.earned for _, verdict in graded)
    most = sum(max_points(e) for e in session.manifest.values())
    told = [(e.id, progress.of(e.id)) for e in session.manifest.values()]
    data = {
        "version": VERSION, "status": _status(tests), "tests": tests,
        "score": {"earned": earned, "max": most}, "summary": public_summary(tests),
        "exercises": {e.id: _exercise(e, v) for e, v in graded},
        "hints": {key: entry.hints for key, entry in told if entry.hints},
        "attempts": {key: entry.attempts for key, entry in told if entry.attempts},
        "gave_up": [key for key, entry in told if entry.gave_up], "seed": seed,
        "env": environment(),
    }  # fmt: skip
    return data if tests else data | {"message": "No exercise was begun, so nothing was graded."}


def public_summary(tests: Sequence[Mapping[str, Any]]) -> str:
    """``public checks 6/6; an instructor may run more``: no promise of passing hidden ones."""
    passed = sum(test["status"] == "pass" for test in tests)
    return f"public checks {passed}/{len(tests)}; an instructor may run more"


def _status(tests: Sequence[Mapping[str, Any]]) -> str:
    """No test is no pass."""
    if not tests:
        return "error"
    return "pass" if all(test["status"] == "pass" for test in tests) else "fail"


def _exercise(exercise: Exercise, verdict: Verdict) -> dict[str, Any]:
    return {
        "status": verdict.status, "earned": verdict.earned, "max": max_points(exercise),
        "message": verdict.message, "misconception": verdict.misconception,
    }  # fmt: skip


def _tests(exercise: Exercise, verdict: Verdict, number: int) -> list[dict[str, Any]]:
    """One entry per check. When the file could not be graded, every check it should have met is
    an error, so that no score is computed from fewer checks than there are."""
    checks = verdict.checks or checks_of(exercise)
    output = clean(verdict.printed)[:MAX_OUTPUT]
    return [
        {
            "name": f"{exercise.id} {check.task}",
            "status": check.status if check.status in ("pass", "fail") else "error",
            "message": _message(check, verdict),
            "output": output,
            "task_id": number,
            "exercise": exercise.id,
            "check": check.name,
            "points": check.points if check.status == "pass" else 0,
            "max_points": check.points,
        }
        for check in checks
    ]


def _message(check: CheckResult, verdict: Verdict) -> str | None:
    """Null for a pass, as exercism has it."""
    if check.status == "pass":
        return None
    if check.status == "not run":
        return clean(verdict.message) or "not run"
    return clean(" ".join(part for part in (check.message, check.where) if part))


def environment() -> dict[str, str]:
    """What the verdicts were reached with."""
    from minillm_exercises.doctor import torch_facts

    return {
        "python": platform.python_version(), "platform": platform.platform(),
        "torch": installed("torch"), "triton": installed("triton"),
        "device": str(torch_facts().get("device", "none")), "minillm": installed("minillm-course"),
        "commit": commit(),
    }  # fmt: skip


def installed(name: str) -> str:
    """The version of an installed distribution, or "" without one."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """The checkout's commit, or "" outside of one."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def junit(tests: Iterable[Mapping[str, Any]]) -> str:
    """The tests of a report as JUnit XML, one suite per exercise."""
    root = ET.Element("testsuites")
    suites: dict[str, list[Mapping[str, Any]]] = {}
    for test in tests:
        suites.setdefault(test["exercise"], []).append(test)
    for name, cases in suites.items():
        failures, errors = (
            str(sum(case["status"] == status for case in cases)) for status in ("fail", "error")
        )
        said = {"name": name, "tests": str(len(cases)), "failures": failures, "errors": errors}
        suite = ET.SubElement(root, "testsuite", said)
        for test in cases:
            case = ET.SubElement(suite, "testcase", classname=name, name=_xml(test["name"]))
            if test["status"] != "pass":
                tag = "failure" if test["status"] == "fail" else "error"
                ET.SubElement(case, tag, message=_xml(test["message"]))
            if test["output"]:
                ET.SubElement(case, "system-out").text = _xml(test["output"])
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _xml(text: str) -> str:
    """Text without the characters that XML cannot hold."""
    return NOT_XML.sub("", text)
