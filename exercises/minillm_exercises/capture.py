"""From a notebook's cell to the learner's file: `check("e03.1", fn)` saves what the cell defined.

The file gets the function or class, the helpers and simple constants it uses from other cells, what
it uses of the starter's given functions, and the imports, so that it can be graded alone; the
command line then grades the very same file. Cells are read through `linecache`, where Jupyter keeps
them under the name that code objects remember; that also finds a class's source, which `inspect`
does not before Python 3.13.
"""

import ast
import builtins
import inspect
import linecache
import symtable
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from minillm.errors import did_you_mean
from minillm_exercises.errors import ExerciseError
from minillm_exercises.manifest import Exercise
from minillm_exercises.workspace import Workspace, stamp, work_root

MAX_LITERAL = 2000  # characters; what is longer is data and no constant
CONSTANTS = frozenset({"constexpr", "float", "int"})  # tl.constexpr(float("-inf"))
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


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
    starter = _starter(exercise)
    pieces = _Pieces(_namespace(objects[0]), exercise.id, _given(starter))
    for name in _required(exercise):  # one that was not passed may still be in the notebook
        if name in names or name in pieces.namespace:
            pieces.add(name, names.get(name, pieces.namespace.get(name)))
    text = stamp(exercise) + pieces.text(exercise, _imports(starter))
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


def _starter(exercise: Exercise) -> str:
    """The starter, or nothing if it cannot be read."""
    try:
        text = exercise.starter.read_text(encoding="utf-8")
        ast.parse(text)
    except (OSError, SyntaxError):
        return ""
    return text


def _imports(starter: str) -> list[str]:
    tree = ast.parse(starter)
    return [ast.unparse(n) for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]


def _given(starter: str) -> dict[str, str]:
    """Name and source of what the starter gives: functions and classes with nothing to be done."""
    found = {}
    for node in ast.parse(starter).body:
        if isinstance(node, Definition):
            source = _cut(starter, node)
            if "TODO" not in source:
                found[node.name] = source
    return found


@dataclass
class _Pieces:
    """What goes into the file, in the order in which it must be defined."""

    namespace: dict[str, Any]
    exercise_id: str
    given: Mapping[str, str]  # what the starter has, for the names that no cell defines
    imports: list[str] = field(default_factory=list)
    definitions: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

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
            source = self._defined(name, value)
            self._add_used(source, name)
            self.definitions.append(source)

    def _add_used(self, source: str, user: str) -> None:
        for name in sorted(_used(source)):
            if name in self.namespace and not self._is_builtin(name):
                self.add(name, self.namespace[name], user)
            elif name in self.given:
                self._add_given(name)

    def _add_given(self, name: str) -> None:
        """Add a definition of the starter, after everything that it uses itself."""
        if name not in self.seen:
            self.seen.add(name)
            self._add_used(self.given[name], name)
            self.definitions.append(self.given[name])

    def _is_builtin(self, name: str) -> bool:
        """Whether a name means what it means everywhere; IPython has an `open` of its own."""
        value = self.namespace[name]
        ours = not callable(value) or getattr(value, "__module__", "") == "__main__"
        return hasattr(builtins, name) and not ours

    def _add_elsewhere(self, name: str, value: Any) -> bool:
        """Add an import, a simple constant or an alias; False if `value` is none of them."""
        if isinstance(value, ModuleType):
            self.imports.append(self._imported(name) or f"import {value.__name__} as {name}")
        elif _is_literal(value):
            self.definitions.append(f"{name} = {value!r}")
        elif statement := self._imported(name):
            self.imports.append(statement)
        elif isinstance(value, FunctionType | BuiltinFunctionType | type) and value.__module__:
            self.imports.append(f"from {value.__module__} import {value.__name__} as {name}")
        elif statement := self._alias(name):
            self._add_used(statement, name)
            self.definitions.append(statement)
        else:
            return False
        return True

    def _cells(self) -> Iterator[ast.Module]:
        """The notebook's cells that can be read, the latest first (IPython keeps them in `In`)."""
        for text in reversed(self.namespace.get("In", [])):
            try:
                yield ast.parse(text)
            except (SyntaxError, ValueError):
                continue

    def _imported(self, name: str) -> str:
        """The import statement that bound `name`, alone."""
        for cell in self._cells():
            for node in ast.walk(cell):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    for alias in node.names:
                        if (alias.asname or alias.name.split(".")[0]) == name:
                            node.names = [alias]
                            return ast.unparse(node)
        return ""

    def _alias(self, name: str) -> str:
        """A type alias such as ``Block = list[int]``, or a constant of kernels: an assignment that
        calls nothing, or only ``tl.constexpr``."""
        for cell in self._cells():
            for node in cell.body:
                if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
                    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
                    constant = {_last_name(call.func) for call in calls} <= CONSTANTS
                    return ast.unparse(node) if constant else ""
        return ""

    def _defined(self, name: str, value: Any) -> str:
        """The source of a function or class of this notebook, or of ``name = lambda ...``."""
        if "<locals>" in getattr(value, "__qualname__", ""):
            raise ExerciseError(
                f"`{name}` is defined inside another function: define it at the top of a cell."
            )
        if isinstance(value, FunctionType):
            return _function_source(name, value.__code__)
        if isinstance(value, type):
            return self._class_source(name, value)
        raise ExerciseError(
            f"`{name}` is an object of the class {type(value).__name__}, which cannot be saved: "
            f"make it inside the function that uses it."
        )

    def _class_source(self, name: str, value: type) -> str:
        files = {method.__code__.co_filename for method in _methods(value)}
        for file in files:
            for node in _nodes(_text(file)):
                if isinstance(node, ast.ClassDef) and node.name == name:
                    return _cut(_text(file), node)
        for text in reversed(self.namespace.get("In", [])):  # a class without methods
            for node in _nodes(text):
                if isinstance(node, ast.ClassDef) and node.name == name:
                    return _cut(text, node)
        raise _unavailable(name)


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node).rsplit(".", 1)[-1]


def _function_source(name: str, code: CodeType) -> str:
    text = _text(code.co_filename)
    for node in _nodes(text):
        if isinstance(node, ast.Assign) and code.co_name == "<lambda>":
            if node.lineno <= code.co_firstlineno <= (node.end_lineno or 0):
                return _cut(text, node)
        elif isinstance(node, Definition) and node.name == code.co_name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == code.co_firstlineno:
                return _cut(text, node) + (
                    f"\n\n\n{name} = {node.name}" if name != node.name else ""
                )
    raise _unavailable(name)


def _text(file: str) -> str:
    return "".join(linecache.getlines(file))


def _nodes(text: str) -> Iterator[ast.AST]:
    try:
        return ast.walk(ast.parse(text))
    except (SyntaxError, ValueError):  # a cell with a magic; its definitions cannot be read
        return iter(())


def _cut(text: str, node: Definition | ast.Assign) -> str:
    """The lines of a definition with its decorators, comments and all."""
    decorators = [] if isinstance(node, ast.Assign) else node.decorator_list
    first = min([node.lineno, *(d.lineno for d in decorators)])
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))


def _unavailable(name: str) -> ExerciseError:
    return ExerciseError(
        f"The source of `{name}` is not available: run the cell that defines it again, without "
        f"magics in that cell, or write it into a .py file."
    )


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
