"""What a submission may not contain, found by reading it: no code of the learner runs here.

The point is to teach, not to jail: a solution that imports the engine, or calls the one operator
the exercise is about, is told so by line. Someone who wants to cheat will find a way.
"""

import ast
import builtins
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from minillm.errors import did_you_mean
from minillm_exercises.manifest import Exercise

MAX_BYTES = 200_000

_FILES = "the exercise reads and writes no files"
_HIDDEN = "it would hide from the checks what your code does"
HIDING = "eval exec compile __import__ globals vars locals __builtins__ __loader__ __spec__"
FORBIDDEN_NAMES: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(HIDING.split(), _HIDDEN)
    | {
        "open": _FILES,
        "input": "the checks call your code without a keyboard",
        "breakpoint": "the checks call your code without a keyboard; print instead",
    }
)
FORBIDDEN_ATTRIBUTES = frozenset(
    "__subclasses__ __globals__ __builtins__ __import__ __loader__ __spec__ __bases__ __mro__ "  # noqa: SIM905
    "__base__ __code__ __closure__ f_globals f_locals f_back tb_frame gi_frame cr_frame".split()
)
ALWAYS_BANNED = (
    "torch.ops", "torch._C", "torch.hub", "torch.load", "torch.utils.cpp_extension",
    "torch.compile", "torch._dynamo", "torch._inductor", "torch.jit", "torch.library",
    "triton.runtime", "triton.compiler", "triton.backends", "triton.knobs", "triton._C",
    "triton.autotune", "triton.testing", "triton.tools",
)  # fmt: skip
REFLECTION = ("getattr", "setattr", "delattr", "hasattr")


@dataclass(frozen=True)
class Finding:
    """Why a submission is not run: `status` is "refused" or "missing", `message` may have the
    offending line and a caret below its first sentence."""

    status: Literal["refused", "missing"]
    message: str


def inspect_source(source: bytes | str, exercise: Exercise) -> Finding | None:
    """The first thing that keeps `source` from being graded, or None."""
    try:
        text = source if isinstance(source, str) else source.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Finding("refused", f"The file is not UTF-8 text (byte {error.start}).")
    if len(text) > MAX_BYTES:
        return Finding(
            "refused", f"The file has {len(text):,} characters, the grader reads {MAX_BYTES:,}."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(text)
    except SyntaxError as error:
        return Finding("refused", _syntax_message(error, text))
    except (ValueError, RecursionError, MemoryError) as error:
        return Finding("refused", f"Python cannot read the file: {error}.")
    for node, why in _forbidden(tree, exercise):
        where = f"Line {node.lineno}: {why}"
        return Finding("refused", where + _pointer(text, node.lineno, node.col_offset + 1))
    return _missing(tree, exercise)


def _syntax_message(error: SyntaxError, text: str) -> str:
    line = error.lineno or 1
    message = f"Line {line} is not Python: {error.msg}."
    return message + _pointer(text, line, error.offset or 1)


def _pointer(text: str, line: int, column: int) -> str:
    """The line and a caret under its `column`, counted from 1."""
    lines = text.splitlines()
    shown = lines[line - 1].rstrip() if 0 < line <= len(lines) else ""
    if not shown.strip() or not shown.strip().isprintable():
        return ""
    indent = len(shown) - len(shown.lstrip())
    return f"\n    {shown.strip()[:90]}\n    {' ' * min(max(column - 1 - indent, 0), 90)}^"


Forbidden = Iterator[tuple[ast.expr | ast.stmt, str]]  # where, and the sentence that says why


def _forbidden(tree: ast.Module, exercise: Exercise) -> Forbidden:
    found = [*_imports(tree, exercise), *_uses(tree, exercise), *_patches(tree)]
    yield from sorted(found, key=lambda pair: (pair[0].lineno, pair[0].col_offset))


def _imports(tree: ast.Module, exercise: Exercise) -> Forbidden:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if not _allowed(alias.name, exercise):
                    yield node, _import_message(alias.name, exercise)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level or not _allowed(module, exercise):
                yield node, _import_message("." * node.level + module, exercise)
            for alias in node.names:
                if alias.name == "*":
                    yield node, "import the names that you use, instead of everything (*)."
                if banned := _banned(f"{module}.{alias.name}", exercise):
                    yield node, _banned_message(banned, exercise)


def _allowed(module: str, exercise: Exercise) -> bool:
    return module == "__future__" or any(
        module == name or module.startswith(f"{name}.") for name in exercise.imports
    )


def _import_message(module: str, exercise: Exercise) -> str:
    if module.startswith(("minillm", ".")):
        return (
            f"import of {module!r}: the engine has this already, and the exercise is to build it "
            f"yourself. Allowed here: {', '.join(exercise.imports)}."
        )
    return (
        f"import of {module!r}: this exercise works without it. Allowed here: "
        f"{', '.join(exercise.imports)}."
    )


def _banned_message(name: str, exercise: Exercise) -> str:
    if name in exercise.banned:
        return f"{name!r} does what {exercise.id} asks for: the exercise is to build it yourself."
    return f"{name!r} is not for this course's exercises: {_HIDDEN}."


def _banned(dotted: str, exercise: Exercise) -> str:
    """The entry of the lists that forbids `dotted`; one without a dot forbids that last name."""
    for entry in (*exercise.banned, *ALWAYS_BANNED):
        last = "." not in entry and dotted.rsplit(".", 1)[-1] == entry
        if last or dotted == entry or dotted.startswith(f"{entry}."):
            return entry
    return ""


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Local name of everything imported, to its dotted name: F is torch.nn.functional."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name if alias.asname else alias.name.split(".")[0]
                known[alias.asname or root] = root
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return known


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    """`F.pad` as torch.nn.functional.pad; "?.pad" for an attribute of anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    root = aliases.get(node.id, "?") if isinstance(node, ast.Name) else "?"
    return ".".join([root, *reversed(parts)])


def _uses(tree: ast.Module, exercise: Exercise) -> Forbidden:
    aliases, bound = _aliases(tree), _bound(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in bound:
            if node.id in FORBIDDEN_NAMES:
                yield node, f"{node.id!r} is not for this exercise: {FORBIDDEN_NAMES[node.id]}."
            elif node.id in exercise.banned and hasattr(builtins, node.id):
                yield node, _banned_message(node.id, exercise)
        elif isinstance(node, ast.Attribute):
            if node.attr in FORBIDDEN_ATTRIBUTES:
                yield node, f"{node.attr!r} is not for this exercise: {_HIDDEN}."
                continue
            banned = _banned(_dotted(node, aliases), exercise)
            if banned and banned not in bound:  # a method of their own may be called so
                yield node, _banned_message(banned, exercise)
        elif isinstance(node, ast.Call) and (why := _reflection(node, exercise, bound)):
            yield node, why


def _bound(tree: ast.Module) -> set[str]:
    """Names that the file defines itself: a variable called `input` is allowed."""
    bound = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
    return bound


def _reflection(call: ast.Call, exercise: Exercise, bound: set[str]) -> str:
    """getattr(torch.nn.functional, "pa" + "d") and the like."""
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if name not in REFLECTION or name in bound or len(call.args) < 2:
        return ""
    asked = call.args[1]
    if not isinstance(asked, ast.Constant) or not isinstance(asked.value, str):
        return f"{name!r} with a computed name: {_HIDDEN}. Write the attribute with a dot."
    if asked.value in FORBIDDEN_ATTRIBUTES:
        return f"{asked.value!r} is not for this exercise: {_HIDDEN}."
    ends = [entry.rsplit(".", 1)[-1] for entry in exercise.banned]
    if asked.value in ends:
        return _banned_message(exercise.banned[ends.index(asked.value)], exercise)
    return ""


def _patches(tree: ast.Module) -> Forbidden:
    """Assignments to the attributes of a module: the checks use the same module."""
    aliases = _aliases(tree)
    modules = {name for name in aliases if aliases[name].islower()} - _bound(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load):
            continue
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id in modules:
            yield node, f"it changes {ast.unparse(node)}, which the checks use too: leave it be."


def defined_names(tree: ast.Module) -> set[str]:
    """What importing the module defines: ``append``, ``Cache`` and ``Cache.append``."""
    names: set[str] = set()
    todo: list[tuple[ast.AST, str]] = [(node, "") for node in tree.body]
    while todo:
        node, prefix = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(prefix + node.name)
        elif isinstance(node, ast.ClassDef):
            names.add(prefix + node.name)
            todo += [(child, f"{prefix}{node.name}.") for child in node.body]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(prefix + node.id)
        elif isinstance(node, ast.alias):
            names.add(prefix + (node.asname or node.name))
        elif not isinstance(node, ast.Lambda):
            todo += [(child, prefix) for child in ast.iter_child_nodes(node)]
    return names


def _missing(tree: ast.Module, exercise: Exercise) -> Finding | None:
    defined = defined_names(tree)
    missing = [name for name in exercise.names if name not in defined]
    if not missing:
        return None
    place = missing[0].rpartition(".")[0]  # its class, or "" for the file
    new = {
        name
        for name in defined - set(exercise.names)
        if name.rpartition(".")[0] == place and not name.rpartition(".")[2].startswith("__")
    }
    return Finding(
        "missing",
        f"{missing[0]!r} is not in the file: the checks call it by that name."
        + did_you_mean(missing[0], new)
        + f" The starter has it: {exercise.starter.name}.",
    )
