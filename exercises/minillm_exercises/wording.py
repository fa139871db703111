"""The sentences a learner reads when code raises, loops or dies."""

import re
import signal
import textwrap
from collections.abc import Sequence
from typing import Any

from minillm_exercises.child import LOADING
from minillm_exercises.limits import GIB, Limits

PRINTED_LINES = 20
PRINTED_COLUMNS = 200
PAGE_COLUMNS = 88  # of a notebook's output on a page, where longer lines break inside a word


def wrapped(text: str, later: str = "") -> str:
    """Lines that fit a page; what is cut off a line goes on in the next, after `later`."""
    pieces = (
        textwrap.wrap(
            line, PAGE_COLUMNS, subsequent_indent=later,
            break_long_words=False, break_on_hyphens=False,
        )
        for line in text.split("\n")
    )  # fmt: skip
    return "\n".join("\n".join(piece) for piece in pieces)


def source_line(lines: Sequence[str], number: int) -> str:
    """``line 14: return x[t]``, or nothing for line 0."""
    if not 0 < number <= len(lines):
        return ""
    return f"line {number}: {lines[number - 1].strip()[:100]}"


def error_sentence(report: dict[str, Any]) -> str:
    """What an exception that was not caught means for the one who wrote the code."""
    kind, text = report.get("type", ""), report.get("message", "").split("\n")[0]
    if kind == "RecursionError":
        return "The function calls itself without end: what should stop it?"
    if kind == "NotImplementedError":
        return f"NotImplementedError: {text}. A part is still to be written."
    said = f"{kind}: {text}".rstrip(".") if text else kind
    if report.get("line"):
        return f"Your code raised {said}.{_there(report)}"
    if kind == "TypeError" and re.search(r"argument|takes no", text):
        return f"Your function cannot be called as the README says: {text}."
    if kind == "AttributeError" and "has no attribute" in text and "'NoneType'" not in text:
        return f"What the check needs is not there: {text}."
    return f"The check could not use what your code gave it ({said}). Is it what the README asks?"


def _there(report: dict[str, Any]) -> str:
    return f" There, {report['values']}." if report.get("values") else ""


def timeout_sentence(report: dict[str, Any], where: str, during: str, limits: Limits) -> str:
    """Which line did not come to an end."""
    place = f"{during} ({where})" if where else during
    used = f"Used {limits.cpu:g} s of processor time"
    said, question = {
        "loop": (used, "Does the loop end?"),
        "operation": (used, "Is this one operation very large, or without an end?"),
        "wait": (f"Waited {limits.wall:g} s without computing", "For what does it wait?"),
        "silent": (f"No answer within {limits.wall:g} s", "Does the loop end?"),
    }[report["kind"]]
    return f"{said} {place}. {question}{_there(report)} {_rest(report)}"


def _rest(report: dict[str, Any]) -> str:
    ran = "No check was" if report["check"] == LOADING else "The checks after it were not"
    return f"{ran} run."


def crash_sentence(
    report: dict[str, Any], code: int | None, where: str, during: str, limits: Limits
) -> str:
    """What ended the process of the submission."""
    place = f"{during} ({where})" if where else during
    rest = _rest(report)
    if report.get("kind") == "exit":
        return (
            f"Your code ended the program {place}. exit() ends everything; a function hands its "
            f"result back with return. {rest}"
        )
    if report.get("kind") == "gpu":
        return (
            f"A kernel went wrong on the GPU {place}: {_gpu_fault(report)}. Interpreted you see "
            f"where: set TRITON_INTERPRET=1 and grade again. {rest}"
        )
    if report.get("kind") == "memory":
        return (
            f"More than {(limits.memory or 0) / GIB:g} GiB of memory was asked for {place}. Which "
            f"shape or list grows larger than you meant? {rest}"
        )
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"The process was stopped by {name} {place}, not by an exception of Python. {rest}"
    return (
        f"The process ended {place} without an exception (exit code {code}), before your code had "
        f"answered. {rest}"
    )


def _gpu_fault(report: dict[str, Any]) -> str:
    text = report.get("message", "").split("\n")[0].rstrip(".")
    if "illegal memory access" in text or "misaligned" in text:
        return f"it touched memory that is not its own, as without a mask ({text})"
    return text or "CUDA did not say how"


def shorten_printed(text: str) -> str:
    """The first lines of what a submission printed, and how much there was beyond."""
    lines = text.splitlines()
    shown = [line[:PRINTED_COLUMNS] for line in lines[:PRINTED_LINES]]
    if len(lines) > PRINTED_LINES:
        shown.append(f"... and more ({len(lines):,} lines or more were printed)")
    return "\n".join(shown)
