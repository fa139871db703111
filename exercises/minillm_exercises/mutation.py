"""Mechanical mutants: a solution with one small thing wrong, to ask whether the checks notice.

The operators are the usual ones of mutation testing (R. DeMillo, R. Lipton, F. Sayward: "Hints on
Test Data Selection", 1978): another operator, a comparison that is off at its edge, a number that
is one too large, a statement left out, a condition turned round. Docstrings, annotations,
decorators and raised errors stay: no check could see them, or should.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

# Each operator with its sign, and the sign of what it becomes.
OPERATORS: Mapping[str, tuple[type[ast.AST], str]] = MappingProxyType({
    "+": (ast.Add, "-"), "-": (ast.Sub, "+"), "*": (ast.Mult, "+"), "/": (ast.Div, "*"),
    "//": (ast.FloorDiv, "/"), "%": (ast.Mod, "//"), "**": (ast.Pow, "*"), "<<": (ast.LShift, ">>"),
    ">>": (ast.RShift, "<<"), "&": (ast.BitAnd, "|"), "|": (ast.BitOr, "&"), "and": (ast.And, "or"),
    "or": (ast.Or, "and"), "<": (ast.Lt, "<="), "<=": (ast.LtE, "<"), ">": (ast.Gt, ">="),
    ">=": (ast.GtE, ">"), "==": (ast.Eq, "!="), "!=": (ast.NotEq, "=="), "is": (ast.Is, "is not"),
    "is not": (ast.IsNot, "is"), "in": (ast.In, "not in"), "not in": (ast.NotIn, "in"),
})  # fmt: skip
SIGNS = MappingProxyType({kind: sign for sign, (kind, _) in OPERATORS.items()})
UNTOUCHED = ("annotation", "returns", "decorator_list", "type_params")
DROPPED = ast.Expr | ast.AugAssign | ast.Break | ast.Continue | ast.If


@dataclass(frozen=True)
class Mutant:
    """One changed solution; `id` says what was changed, as "line 12: + -> -"."""

    id: str
    source: str


@dataclass(frozen=True)
class _Edit:
    """Put `new` in place of one attribute or list entry of a node."""

    holder: Any  # a node, with `key` an attribute; or a list, with `key` an index
    key: Any
    new: Any
    line: int
    says: str

    def swap(self) -> "_Edit":
        """Make the change, and return the edit that undoes it."""
        if isinstance(self.holder, list):
            old, self.holder[self.key] = self.holder[self.key], self.new
        else:
            old = getattr(self.holder, self.key)
            setattr(self.holder, self.key, self.new)
        return _Edit(self.holder, self.key, old, self.line, self.says)


def mechanical_mutants(source: str, most: int = 40) -> list[Mutant]:
    """At most `most` mutants of `source`, spread evenly over the file, always the same ones."""
    tree = ast.parse(source)
    edits = sorted(_edits(tree), key=lambda edit: edit.line)
    count = min(most, len(edits))
    chosen = [edits[i * len(edits) // count] for i in range(count)]
    mutants: dict[str, Mutant] = {}
    for edit in chosen:
        name = f"line {edit.line}: {edit.says}"
        again = sum(known.split(" (again")[0] == name for known in mutants)
        name += f" (again {again})" if again else ""
        undo = edit.swap()
        mutants[name] = Mutant(name, ast.unparse(ast.fix_missing_locations(tree)))
        undo.swap()
    return list(mutants.values())


def _edits(node: ast.AST) -> Iterator[_Edit]:
    """The edits of a node and of all below it."""
    if isinstance(node, ast.Raise | ast.Assert):
        return
    yield from _operators(node)
    yield from _values(node)
    for field, value in ast.iter_fields(node):
        if field in UNTOUCHED:
            continue
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield from _statements(value)
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_docstring(child):
                yield from _edits(child)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _operators(node: ast.AST) -> Iterator[_Edit]:
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SIGNS:
        yield _operator(node, "op", node.op, node.lineno)
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            yield _operator(node.ops, index, operator, node.lineno)


def _operator(holder: Any, key: Any, old: ast.AST, line: int) -> _Edit:
    sign = SIGNS[type(old)]
    new = OPERATORS[sign][1]
    return _Edit(holder, key, OPERATORS[new][0](), line, f"{sign} -> {new}")


def _values(node: ast.AST) -> Iterator[_Edit]:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        new = not node.value if isinstance(node.value, bool) else node.value + 1
        yield _Edit(node, "value", new, node.lineno, f"{node.value} -> {new}")
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        turned = ast.UnaryOp(ast.Not(), node.test)
        says = f"{_short(node.test)} -> not {_short(node.test)}"
        yield _Edit(node, "test", turned, node.test.lineno, says)


def _statements(body: list[ast.stmt]) -> Iterator[_Edit]:
    for index, statement in enumerate(body):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        stored = isinstance(target, ast.Attribute | ast.Subscript)
        if (isinstance(statement, DROPPED) or stored) and not _is_docstring(statement):
            says = f"without {_short(statement)}"
            yield _Edit(body, index, ast.Pass(), statement.lineno, says)


def _short(node: ast.AST) -> str:
    text = ast.unparse(node).split("\n")[0]
    return text if len(text) <= 50 else f"{text[:47]}..."
