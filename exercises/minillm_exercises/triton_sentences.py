"""What a mistake in a Triton kernel means, in a sentence; nothing here imports Triton.

Triton's own messages say what its code found. The commonest mistakes of a first kernel each have
a sentence here that says what to do.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

# A part of Triton's message, and what to do about it.
ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "range must be a power of 2": "a tl.arange has a power of two of lanes: round up with "
        "triton.next_power_of_2, and mask the lanes that are too many",
        "arguments must be of type tl.constexpr": "the size of a tile has to be known when the "
        "kernel is compiled: declare the parameter as BLOCK: tl.constexpr",
        "Shape element": "the size of a tile has to be known when the kernel is compiled: "
        "declare the parameter as BLOCK: tl.constexpr",
        "Cannot access global variable": "a compiled kernel sees no variables of your file: hand "
        "the value over as an argument, or make it a tl.constexpr",
        "AST node type: Break": "a kernel has no break: let the loop's bounds or a mask decide",
        "AST node type: Continue": "a kernel has no continue: let a mask decide",
        "Input shapes should have": "tl.dot takes tiles of 16 and more in each direction: pad "
        "with masked lanes, or multiply and use tl.sum",
        "missing a required argument": "the launch does not give all that the kernel takes",
        "missing 1 required positional": "the launch does not give all that the kernel takes",
        "was specified but unrecognised": "the launch names an argument that the kernel has not",
        "incompatible dimensions": "two tiles cannot be broadcast to one shape",
        "could not be broadcast": "two tiles cannot be broadcast to one shape",
        "has no attribute 'to'": "a plain number is no tile",
    }
)
OUTSIDE = re.compile(
    r"(?P<kernel>\S+) at program \((?P<program>[\d, ]+)\) (?P<does>reads|writes|changes) "
    r"(?P<bytes>\d+) bytes (?P<side>behind the end|before the beginning) of (?P<argument>.+)\."
)
FAR = 2**16  # bytes
PLACE = re.compile(r"^at (\d+):(\d+):\n(.*)\n *\^\n?(.*)$", re.DOTALL)


def kernel_sentence(error: BaseException) -> str:
    """About an exception inside of an interpreted kernel; empty if it is an ordinary one."""
    text = str(error)
    if found := OUTSIDE.search(text):
        return _outside(found)
    if advice := _advice(text):
        return f"{_upper(advice)}. (Triton says: {_short(text)})"
    return ""


def _outside(found: re.Match[str]) -> str:
    distance = int(found["bytes"])
    side, argument = found["side"], found["argument"]
    place = f"{distance} bytes {side} of {argument}" if distance else f"right {side} of {argument}"
    if distance > FAR:
        place = f"memory that is far from every tensor of the launch ({argument} is the nearest)"
    return (
        f"Out of bounds: {found['kernel']}, program ({found['program'].strip(', ')}), "
        f"{found['does']} {place}. Which lanes have an element there? A mask keeps the others "
        f"away, and a wrong stride or index leads astray."
    )


def compiler_sentence(error: BaseException) -> str:
    """About what Triton's compiler refused; empty if `error` is none of its errors."""
    if type(error).__name__ not in ("CompilationError", "UnsupportedLanguageConstruct"):
        return ""
    found = PLACE.match(str(error).strip())
    if not found:
        return f"Triton's compiler refuses the kernel: {_short(str(error))}."
    lines = found[3].splitlines()
    code, reason = lines[-1].strip() if lines else "", found[4].strip()
    if error.__cause__ is not None and (not reason or reason.startswith("Error")):
        reason = str(error.__cause__)
    said = _advice(reason) or _short(reason)
    return f"On a GPU this would not compile, at \u201c{code[:80]}\u201d: {said}."


def _advice(text: str) -> str:
    return next((advice for part, advice in ADVICE.items() if part in text), "")


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _short(text: str) -> str:
    line = next((line for line in text.strip().splitlines() if line.strip()), "")
    return line.strip().rstrip(".")[:200]
