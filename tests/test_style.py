"""What the linters do not know about this project's style, checked on every file of the library.

Each rule is a function from one parsed file to the lines that break it, and each is tested below on
planted violations: a checker that finds nothing may be broken.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from tests.pairs import cases

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
UNPICKLERS = ("pickle", "marshal", "shelve", "dill", "joblib")
# Files and folders that may ask torch for a GPU.
KNOWS_CUDA = (
    "minillm/lab/ceilings.py",
    "minillm/lab/gpu/",
    "minillm/execution/graphs.py",
    "kernels/minillm_kernels/launch.py",
    "kernels/minillm_kernels/check/",
    "kernels/minillm_kernels/bench/",
)

# Words of old books and riddles: the subject of a sentence is the field's noun.
RIDDLES = re.compile(
    r"\b(whoever|whomever|nobody|somebody|anybody|lest|whence|thereof|dear|mend(?:s|ed|ing)?)\b"
    r"|\bin vain\b|\bbehind 128\b|\bover the better\b",
    re.IGNORECASE,
)
PAGES = ("*.md", "minillm/**/*.md", "kernels/**/*.md", "exercises/*.md", "notebooks/results/*.md")
OTHER_PAGES = ("INSTRUCTOR.md",)  # for teachers: rewritten with the chapters

Function = ast.FunctionDef | ast.AsyncFunctionDef
Violations = Iterator[tuple[int, str]]  # line, what is wrong there


@dataclass(frozen=True)
class Source:
    """One file: where it is below the root, its lines and its syntax tree."""

    path: str
    lines: int
    tree: ast.Module
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree."""
        return list(ast.walk(self.tree))

    @classmethod
    def parse(cls, path: str, text: str) -> "Source":
        """The source `text` as if it stood in the file `path`."""
        return cls(path, text.count("\n"), ast.parse(text), text)


def calls(source: Source, name: str) -> list[ast.Call]:
    """The calls of `name`, dotted or not, as it is written: ``torch.load``, ``print``."""
    found = [node for node in source.nodes if isinstance(node, ast.Call)]
    last = name.rpartition(".")[2]  # looked at first: to unparse every call takes seconds
    named = [c for c in found if last in (getattr(c.func, "attr", ""), getattr(c.func, "id", ""))]
    return [call for call in named if ast.unparse(call.func) == name]


def prints(source: Source) -> Violations:
    """A library that prints cannot be embedded, and the commands write through `Terminal`."""
    for call in calls(source, "print"):
        yield call.lineno, "print: return it, or write through minillm.cli.terminal"


def asserts(source: Source) -> Violations:
    """`python -O` removes an assert, and its message helps no user: raise an error of errors.py."""
    for node in source.nodes:
        if isinstance(node, ast.Assert):
            yield node.lineno, "assert: raise one of minillm.errors"


def too_long(source: Source) -> Violations:
    """One idea per file, one step per function."""
    if source.lines > MAX_FILE_LINES:
        yield 1, f"{source.lines} lines; a file has at most {MAX_FILE_LINES}"
    for node in source.nodes:
        if isinstance(node, Function):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {lines} lines of {MAX_FUNCTION_LINES}"


def imported(source: Source) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported: ``from torch import load`` is torch.load."""
    for node in source.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from ((node.lineno, prefix + alias.name) for alias in node.names)


def dangerous(source: Source) -> Violations:
    """A model is data: nothing in a checkpoint may run, so nothing here can run data."""
    for line, name in imported(source):
        if name == "torch.load" or name.split(".")[0] in UNPICKLERS:
            yield line, f"{name}: unpickling runs what the file says"
    for name in ("torch.load", "eval", "exec", "builtins.eval", "builtins.exec", "__import__"):
        for call in calls(source, name):
            yield call.lineno, f"{name} runs data"
    for node in source.nodes:
        remote = isinstance(node, ast.keyword) and node.arg == "trust_remote_code"
        if remote and ast.unparse(node.value) != "False":  # a variable may hold True
            yield node.value.lineno, "trust_remote_code runs code of the checkpoint"


def torch_cuda(source: Source) -> Violations:
    """Devices are one file's business: everything else works on any of them."""
    if source.path.startswith(KNOWS_CUDA):
        return
    used = [node for node in source.nodes if getattr(node, "attr", "") == "cuda"]
    lines = [node.lineno for node in used if ast.unparse(node) == "torch.cuda"]
    lines += [line for line, name in imported(source) if f"{name}.".startswith("torch.cuda.")]
    for line in lines:
        yield line, f"torch.cuda outside {', '.join(KNOWS_CUDA)}"


# No mutable module globals: two engines live in one process and share nothing that changes.
# A value bound at module level is made of constants, other names and calls of these:
IMMUTABLE_CALLS = frozenset(
    "MappingProxyType frozenset tuple range int float str bytes bool len min max sum round "  # noqa: SIM905
    "NewType namedtuple compile getLogger constexpr partial replace".split()
)
# ... of classes, which are frozen dataclasses here, but for these; and of functions of the same
# file whose return type is one of the others.
MUTABLE_CLASSES = frozenset(
    "OrderedDict Counter ChainMap Queue SimpleQueue SimpleNamespace Generator Random Thread "  # noqa: SIM905
    "WeakKeyDictionary WeakValueDictionary WeakSet StringIO BytesIO ThreadPoolExecutor "
    "ProcessPoolExecutor Tensor Parameter ContextVar Any MutableMapping MutableSequence "
    "MutableSet List Dict DefaultDict".split()
)
# A list, dict or set may stand there plain if its annotation is one of these, because mypy then
# refuses every write to it.
READ_ONLY_TYPES = frozenset(["Mapping", "Sequence", "Set", "Collection"])
DISPLAYS = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp


def module_bindings(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr, ast.expr | None]]:
    """Target, value and annotation of every assignment that runs at module level."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Assign):
            yield from ((target, node.value, None) for target in node.targets)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield node.target, node.value, node.annotation
        elif isinstance(node, ast.AugAssign | ast.NamedExpr):
            yield node.target, node.value, None
        elif not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)


def last_name(node: ast.expr | None) -> str:
    """The name of a call or a type without its module or parameters: ``a.Mapping[K, V]``."""
    return ast.unparse(node).split("[")[0].split(".")[-1] if node else ""


def makes_immutable(name: str, tree: ast.Module) -> bool:
    """Whether a call of `name` at module level gives something that nobody can change."""
    for node in tree.body:
        if isinstance(node, Function) and node.name == name:
            name = last_name(node.returns)
    return name in IMMUTABLE_CALLS or (name[:1].isupper() and name not in MUTABLE_CLASSES)


def mutable_parts(value: ast.expr, tree: ast.Module) -> Iterator[ast.expr]:
    """The parts of a module-level value that something could change later."""
    inside: list[ast.AST] = []
    if isinstance(value, DISPLAYS):
        yield value
    elif isinstance(value, ast.Call):
        if not makes_immutable(last_name(value.func), tree):
            yield value
        elif last_name(value.func) == "MappingProxyType" and isinstance(value.args[0], ast.Dict):
            inside += value.args[0].values
    elif isinstance(value, ast.Tuple | ast.IfExp | ast.BinOp | ast.BoolOp | ast.Starred):
        inside += ast.iter_child_nodes(value)
    for child in inside:
        if isinstance(child, ast.expr):
            yield from mutable_parts(child, tree)


def mutable_globals(source: Source) -> Violations:
    """Module state is what makes two engines in one process disturb each other."""
    for target, value, annotation in module_bindings(source.tree):
        name = ast.unparse(target)
        read_only = isinstance(value, DISPLAYS) and last_name(annotation) in READ_ONLY_TYPES
        if read_only or name == "__all__":
            continue
        for part in mutable_parts(value, source.tree):
            yield part.lineno, f"{name} can be changed: use a tuple, frozenset or MappingProxyType"
    for node in source.nodes:
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"


def decorators(node: Function | ast.ClassDef) -> set[str]:
    """Last names of the decorators: ``@triton.jit(...)`` gives jit."""
    return {ast.unparse(item).split("(")[0].split(".")[-1] for item in node.decorator_list}


def public(tree: ast.AST) -> Iterator[Function | ast.ClassDef]:
    """Public classes, functions and methods; not what is nested inside a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            if not node.name.startswith("_"):
                yield node
                if isinstance(node, ast.ClassDef):
                    yield from public(node)
        elif not isinstance(node, ast.Lambda):
            yield from public(node)


@cache
def library() -> list[Source]:
    """Every file of the library."""
    paths = sorted([*ROOT.glob("minillm/**/*.py"), *ROOT.glob("kernels/**/*.py")])
    return [Source.parse(each.relative_to(ROOT).as_posix(), each.read_text("utf-8"))
            for each in paths]  # fmt: skip


@cache
def classes() -> list[ast.ClassDef]:
    """Every class of the library."""
    return [node for source in library() if source.path.startswith("minillm/")
            for node in source.nodes if isinstance(node, ast.ClassDef)]  # fmt: skip


def base_documents(node: ast.ClassDef, method: str) -> bool:
    """Whether a class from which this one derives documents a method."""
    names = [ast.unparse(base).split(".")[-1] for base in node.bases]
    bases = [each for each in classes() if each.name in names]
    own = [one for base in bases for one in base.body if getattr(one, "name", "") == method]
    return any(map(ast.get_docstring, own)) or any(base_documents(b, method) for b in bases)


def undocumented(source: Source) -> Violations:
    """Every public object says what it does; a second definition of a property, and a method that a
    base class documents, need not."""
    owners = {each: node for node in source.nodes if isinstance(node, ast.ClassDef)
              for each in node.body}  # fmt: skip
    for node in public(source.tree):
        if ast.get_docstring(node) or decorators(node) & {"overload", "override", "setter"}:
            continue
        if node not in owners or not base_documents(owners[node], node.name):
            yield node.lineno, f"{node.name} has no docstring"


def untyped(source: Source) -> Violations:
    """Every public signature is typed, but for kernels, whose arguments are Triton's pointers."""
    for node in public(source.tree):
        if isinstance(node, ast.ClassDef) or "jit" in decorators(node):
            continue
        args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        args += [arg for arg in (node.args.vararg, node.args.kwarg) if arg]
        missing = [arg.arg for arg in args if not arg.annotation and arg.arg not in {"self", "cls"}]
        missing += [] if node.returns else ["return"]
        if missing:
            yield node.lineno, f"{node.name} has untyped {', '.join(missing)}"


def riddles(source: Source) -> Violations:
    """Names, docstrings, comments and errors are in plain English."""
    yield from hard_words(source.text)


def hard_words(text: str) -> Violations:
    """The lines of a text that have one of the words of `RIDDLES`."""
    for number, line in enumerate(text.splitlines(), 1):
        if found := RIDDLES.search(line):
            yield number, f"{found[0]!r}: name the request, block, step, process or reader"


RULES = (
    prints,
    asserts,
    too_long,
    dangerous,
    torch_cuda,
    mutable_globals,
    undocumented,
    untyped,
    riddles,
)


def test_the_library_keeps_every_rule() -> None:
    broken = [f"{source.path}:{line}: {what} ({rule.__doc__})"
              for source in library() for rule in RULES for line, what in rule(source)]  # fmt: skip
    assert not broken, "\n".join(broken)


def test_the_pages_are_in_plain_english() -> None:
    pages = sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})
    assert len(pages) > 8
    broken = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in pages
        if path.name not in OTHER_PAGES
        for line, what in hard_words(path.read_text("utf-8"))
    ]
    assert not broken, "\n".join(broken)


PLANTED = [
    (riddles, "'Whoever waits needs none.'"),
    (riddles, "raise ConfigError('Nobody asked for it.')"),
    (prints, "def f():\n    print(1)"),
    (asserts, "def f(x):\n    assert x > 0"),
    (too_long, "x = 1\n" * (MAX_FILE_LINES + 1)),
    (too_long, "class A:\n    def f(self):\n" + "        x = 1\n" * MAX_FUNCTION_LINES),
    (dangerous, "from pickle import loads"),
    (dangerous, "torch.load(path)"),
    (dangerous, "from torch import load"),
    (dangerous, "def f(s):\n    return eval(s)"),
    (dangerous, "AutoModel.from_pretrained(name, trust_remote_code=flag)"),
    (torch_cuda, "if torch.cuda.is_available():\n    pass"),
    (torch_cuda, "from torch import cuda"),
    (mutable_globals, "CACHE = {}"),
    (mutable_globals, "NAMES: list[str] = ['a']"),
    (mutable_globals, "A, B = [], ()"),
    (mutable_globals, "PAIR = (1, [2])"),
    (mutable_globals, "NESTED = MappingProxyType({'a': []})"),
    (mutable_globals, "TABLE = build_table()"),
    (mutable_globals, "def build() -> dict[str, int]: ...\nTABLE = build()"),
    (mutable_globals, "COUNTS = collections.Counter()"),
    (mutable_globals, "if True:\n    CACHE = dict()"),
    (mutable_globals, "X = 1\ndef f():\n    global X\n    X = 2"),
    (undocumented, "def f() -> None:\n    pass"),
    (undocumented, "class A:\n    'A.'\n    def f(self) -> None:\n        pass"),
    (undocumented, "if True:\n    async def f() -> None:\n        pass"),
    (undocumented, "class A(Matcher):\n    'A.'\n    def fell(self) -> None:\n        pass"),
    (untyped, "def f(x) -> None:\n    pass"),
    (untyped, "def f(*args, y: int) -> None:\n    pass"),
    (untyped, "class A:\n    def f(self):\n        pass"),
]
ACCEPTED = [
    (riddles, "vain = recommended = 'The amendment is behind 1280 tokens.'"),
    (too_long, "x = 1\n" * MAX_FILE_LINES),
    (too_long, "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1)),
    (dangerous, "model.eval()\nre.compile('a')\nload(path)"),
    (dangerous, "f(trust_remote_code=False)"),
    (torch_cuda, "torch.device('cuda')"),
    (mutable_globals, "def f():\n    seen = []\nclass A:\n    def g(self):\n        self.x = {}"),
    (mutable_globals, "LIMITS = MappingProxyType({'a': 1, 'b': (1, 2)})"),
    (mutable_globals, "def f() -> Mapping[str, int]: ...\nA = f()\nB = replace(A, x=1)"),
    (mutable_globals, "NAMES = tuple([1, 2])\nPARTS = frozenset({1})\n__all__ = ['NAMES']"),
    (mutable_globals, "Alias = Callable[[int], str]\nDEFAULT = RopeConfig(theta=1.0)"),
    (undocumented, "def _f():\n    pass\nclass _A:\n    def g(self):\n        pass"),
    (undocumented, "def f():\n    'Documented.'\n    def inner():\n        pass"),
    (undocumented, "class A(Matcher):\n    'A.'\n    def fill(self) -> None:\n        pass"),
    (untyped, "class A:\n    def __init__(self, x):\n        pass\n    def f(self) -> int: ..."),
    (untyped, "@triton.jit\ndef kernel(x_ptr, n):\n    pass"),
]


@cases("rule text", PLANTED)
def test_a_planted_violation_is_found(rule: Callable[[Source], Violations], text: str) -> None:
    assert len(list(rule(Source.parse("minillm/planted.py", text)))) == 1


def test_the_command_line_may_not_print_either() -> None:
    assert list(prints(Source.parse("minillm/cli/planted.py", "print(1)")))


@cases("rule text", ACCEPTED)
def test_clean_code_is_accepted(rule: Callable[[Source], Violations], text: str) -> None:
    assert list(rule(Source.parse("minillm/planted.py", text))) == []


def test_every_rule_has_a_planted_violation() -> None:
    assert {planted for planted, _ in PLANTED} == set(RULES)
