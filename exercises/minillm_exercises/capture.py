"""From a notebook's cell to the learner's file: `check("e03.1", fn)` saves what the cell defined.

The file gets the function or class, the helpers and simple constants it uses from other cells, what
it uses of the starter's given functions, and the imports, so that it can be graded alone; the
command line then grades the very same file. What a name stands for is looked up in the text of the
cells, which IPython keeps in `In`: the latest statement at the top of a cell that binds it.
"""

import ast
import builtins
import copy
import inspect
import symtable
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from minillm.errors import did_you_mean
from minillm_exercises.errors import ExerciseError
from minillm_exercises.manifest import Exercise
from minillm_exercises.workspace import Workspace, stamp, work_root

MAX_LITERAL = 2000  # characters; what is longer is data and no constant
CONSTANTS = frozenset({"constexpr", "float", "int"})  # tl.constexpr(float("-inf"))
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Import = ast.Import | ast.ImportFrom


def save_function(
    exercise: Exercise, objects: Sequence[Any], workspace: Workspace | None = None
) -> Path:
    """Write the functions or classes `objects` of this notebook, with what they use, into the
    learner's file, and return its path. A different older file is kept in `.history/`.

    Raises:
        ExerciseError: an object is a lambda, a builtin, imported, unnamed in the exercise, without
            source, or uses a value that cannot be written down; the message says what to do.
    """
    workspace = Workspace(work_root()) if workspace is None else workspace
    objects = list(dict.fromkeys(_owner(exercise, _bare(thing)) for thing in objects))
    for thing in objects:
        _accept(exercise, thing)
    names = {thing.__name__: thing for thing in objects}
    starter = _statements(_read(exercise.starter))
    pieces = _Pieces(_namespace(objects[0]), _given(starter))
    for name in _required(exercise):  # one that was not passed may still be in the notebook
        if name in names or name in pieces.namespace:
            pieces.add(name, names.get(name, pieces.namespace.get(name)))
    imports = [ast.unparse(node) for node, _ in starter if isinstance(node, Import)]
    text = stamp(exercise) + pieces.text(exercise, imports)
    return workspace.put(workspace.file(exercise), text)


def _bare(thing: Any) -> Any:
    """A decorated function without its decorators, which its source has anyway. A Triton kernel
    is an object that holds its function, compiled or interpreted."""
    inner = inspect.unwrap(thing) if callable(thing) else thing
    while type(inner).__module__.startswith("triton.") and hasattr(inner, "fn"):
        inner = inner.fn
    return inner if isinstance(inner, FunctionType) else thing


def _owner(exercise: Exercise, thing: Any) -> Any:
    """The class that was asked for, if `thing` is one of its methods; `thing` itself if not."""
    if not isinstance(thing, FunctionType):
        return thing
    first, _, rest = thing.__qualname__.partition(".")
    known = thing.__globals__.get(first)
    return known if rest and first in _required(exercise) and isinstance(known, type) else thing


def _required(exercise: Exercise) -> list[str]:
    """The names a solution must define; a method "Cache.append" comes with its class."""
    return list(dict.fromkeys(name.split(".")[0] for name in exercise.names))


def _accept(exercise: Exercise, thing: Any) -> None:
    """Refuse what cannot be saved, before anything is written."""
    wanted = " and ".join(f"`{name}`" for name in _required(exercise))
    if isinstance(thing, str):
        call = f'check("{exercise.id}", {", ".join(_required(exercise))})'
        raise ExerciseError(
            f"{exercise.id} asks for {wanted} itself; {_short(thing)} is only a text. Write it "
            f"without quotes: {call}."
        )
    if not isinstance(thing, FunctionType | type):
        what = "a builtin" if isinstance(thing, type(len)) else f"of type {type(thing).__name__}"
        raise ExerciseError(
            f"{exercise.id} asks for {wanted}, a function or class; {_short(thing)} is {what}. "
            f"Pass its name without brackets."
        )
    name = thing.__name__
    if name == "<lambda>":
        raise ExerciseError(
            f"{exercise.id} asks for {wanted}; a lambda has no name to be saved under: write it "
            f"with def."
        )
    if thing.__module__ != "__main__":
        raise ExerciseError(
            f"{name} was imported from {thing.__module__}; {exercise.id} asks for a {wanted} "
            f"that you wrote in this notebook."
        )
    if name not in _required(exercise):
        raise ExerciseError(
            f"{exercise.id} asks for {wanted}, and yours is called `{name}`: rename it."
            + did_you_mean(name, _required(exercise))
        )


def _short(thing: Any) -> str:
    text = repr(thing)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _namespace(thing: FunctionType | type) -> dict[str, Any]:
    """The notebook's variables, as the object sees them."""
    if isinstance(thing, FunctionType):
        return thing.__globals__
    for method in _methods(thing):
        if method.__globals__.get("__name__") == "__main__":
            return method.__globals__
    return vars(sys.modules["__main__"])


def _methods(thing: type) -> Iterator[FunctionType]:
    for value in vars(thing).values():
        inner = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(inner, FunctionType):
            yield inner


def _read(file: Path) -> str:
    """A text, or nothing if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


def _statements(text: str) -> list[tuple[ast.stmt, str]]:
    """The statements at the top of a text with their source: comments, decorators and all; none of
    a text that is not Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    lines, found = text.splitlines(), []
    for node in tree.body:
        decorators = node.decorator_list if isinstance(node, Definition) else []
        first = min([node.lineno, *(d.lineno for d in decorators)])
        found.append((node, "\n".join(lines[first - 1 : node.end_lineno])))
    return found


def _binds(node: ast.stmt, name: str) -> bool:
    """Whether a statement gives `name` its value."""
    if isinstance(node, Definition):
        return node.name == name
    if isinstance(node, Import):
        return name in map(_local, node.names)
    return isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets)


def _local(alias: ast.alias) -> str:
    """What an import calls what it brings."""
    return alias.asname or alias.name.split(".")[0]


def _given(starter: Sequence[tuple[ast.stmt, str]]) -> dict[str, str]:
    """Name and source of what the starter gives: functions and classes with nothing to be done."""
    return {n.name: text for n, text in starter if isinstance(n, Definition) and "TODO" not in text}


@dataclass
class _Pieces:
    """What goes into the file, in the order in which it must be defined."""

    namespace: dict[str, Any]
    given: Mapping[str, str]  # what the starter has, for the names that no cell defines
    imports: list[str] = field(default_factory=list)
    definitions: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        cells = self.namespace.get("In", [])
        self.cells = [statement for cell in cells for statement in _statements(cell)]

    def text(self, exercise: Exercise, starter_imports: Sequence[str]) -> str:
        """The file below its stamp."""
        lines = list(dict.fromkeys([*starter_imports, *self.imports]))
        lines.sort(key=lambda line: not line.startswith("from __future__"))
        head = f'"""{exercise.id}: {exercise.title}. Saved from a notebook: change it there."""'
        parts = [head, "\n".join(lines), *self.definitions]
        return "\n\n".join(part for part in parts if part) + "\n"

    def add(self, name: str, value: Any, user: str = "") -> None:
        """Add what `name` stands for, after everything that it uses itself."""
        if name in self.seen:
            return
        self.seen.add(name)
        value = _bare(value)
        if isinstance(value, ModuleType) or getattr(value, "__module__", "") != "__main__":
            if not self._add_elsewhere(name, value):
                raise ExerciseError(
                    f"`{user}` uses `{name}`, a {type(value).__name__} from another cell, which "
                    f"cannot be saved with it: pass it as an argument, or make it inside."
                )
        else:
            self._add_source(self._defined(name, value), name)

    def _add_source(self, source: str, name: str) -> None:
        """Add a piece of source behind all that it uses of the notebook and of the starter."""
        for used in sorted(_used(source)):
            if used in self.namespace and not self._is_builtin(used):
                self.add(used, self.namespace[used], name)
            elif used in self.given and used not in self.seen:
                self.seen.add(used)
                self._add_source(self.given[used], used)
        self.definitions.append(source)

    def _is_builtin(self, name: str) -> bool:
        """Whether a name means what it means everywhere; IPython has an `open` of its own."""
        value = self.namespace[name]
        ours = not callable(value) or getattr(value, "__module__", "") == "__main__"
        return hasattr(builtins, name) and not ours

    def _add_elsewhere(self, name: str, value: Any) -> bool:
        """Add an import, a simple constant or an alias; False if `value` is none of them."""
        node, source = self._bound(name)
        if isinstance(node, Import):
            alone = copy.copy(node)
            alone.names = [alias for alias in node.names if _local(alias) == name]
            self.imports.append(ast.unparse(alone))
        elif isinstance(value, ModuleType):
            self.imports.append(f"import {value.__name__} as {name}")
        elif _is_literal(value):
            self.definitions.append(f"{name} = {value!r}")
        elif isinstance(value, FunctionType | BuiltinFunctionType | type) and value.__module__:
            self.imports.append(f"from {value.__module__} import {value.__name__} as {name}")
        elif node is not None and _calls(node) <= CONSTANTS:  # also a type: Block = list[int]
            self._add_source(source, name)
        else:
            return False
        return True

    def _bound(self, name: str) -> tuple[ast.stmt | None, str]:
        """The latest statement of a cell that binds `name`, and its source."""
        found = (pair for pair in reversed(self.cells) if _binds(pair[0], name))
        return next(found, (None, ""))

    def _defined(self, name: str, value: Any) -> str:
        """The source of a function or class of this notebook, or of ``name = lambda ...``."""
        if "<locals>" in getattr(value, "__qualname__", ""):
            raise ExerciseError(
                f"`{name}` is defined inside another function: define it at the top of a cell."
            )
        if not isinstance(value, FunctionType | type):
            raise ExerciseError(
                f"`{name}` is an object of the class {type(value).__name__}, which cannot be "
                f"saved: make it inside the function that uses it."
            )
        if source := self._bound(name)[1]:
            return source
        try:  # in a branch, or in a file that was run
            return textwrap.dedent(inspect.getsource(value)).rstrip()
        except (OSError, TypeError):
            raise ExerciseError(
                f"The source of `{name}` is not available: run the cell that defines it again, "
                f"without magics in that cell, or write it into a .py file."
            ) from None


def _calls(node: ast.AST) -> set[str]:
    """The last names of what a statement calls."""
    calls = [part.func for part in ast.walk(node) if isinstance(part, ast.Call)]
    return {ast.unparse(call).rsplit(".", 1)[-1] for call in calls}


def _used(source: str) -> set[str]:
    """The global names that a piece of source reads; a local of the same name is not one."""
    top = symtable.symtable(source, "cell", "exec")
    used = {s.get_name() for s in top.get_symbols() if s.is_referenced()}
    tables = list(top.get_children())
    while tables:
        table = tables.pop()
        used |= {s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()}
        tables += table.get_children()
    return used


def _is_literal(value: Any) -> bool:
    """Whether ``repr`` writes the value down exactly."""
    try:
        text = repr(value)
        return len(text) <= MAX_LITERAL and bool(ast.literal_eval(text) == value)
    except Exception:  # repr and == of any object may do anything
        return False
