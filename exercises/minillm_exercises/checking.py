"""What a grader is written with: `check` marks a function, the others compare and remember.

A check is an ordinary function ``def test_x(impl)`` in ``exercises/eNN_topic/test_eNN_M.py``;
`impl` is the module under test: the learner's file, a solution, or a known-wrong mutant. Each
comparison appends what it saw to a *trace*. The trace does two jobs: a check whose trace is
empty has compared nothing and may not pass, and a learner whose trace equals that of exactly one
mutant has that mutant's misconception (`grader.py`).

What a submission returns is judged by its exact type and read by that type's own methods: an object
of a class of the learner's own could agree with everything it is compared with. A check that
computes with a result, instead of comparing it, passes it through `number` or `accept` first.

Nothing here imports torch, so that an exercise without tensors is graded in a fraction of a second.
"""

import contextvars
import math
import os
import random
import re
import reprlib
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Check = Callable[[Any], None]


# What a function returns by mistake, and the mistake.
KINDS = (
    (types.GeneratorType, "a generator (is a list(...) missing, or is there a yield?)"),
    (types.CoroutineType, "a coroutine (a function with async; it needs none)"),
    (types.MethodType, "a method (are its parentheses missing?)"),
    ((types.FunctionType, types.BuiltinFunctionType), "a function (are its parentheses missing?)"),
    (type, "a class (are its parentheses missing?)"),
    ((map, filter, zip, reversed), "an iterator (is a list(...) missing?)"),
)

# The types a result may be made of. Two values are comparable when they are of one family: a bool
# is no number here, a list may stand for a tuple. `torch` adds the family "tensor".
FAMILIES = (
    ("bool", (bool,)), ("number", (int, float)), ("text", (str,)), ("bytes", (bytes,)),
    ("None", (type(None),)), ("sequence", (list, tuple)), ("other sequence", (range, deque)),
    ("set", (set, frozenset)), ("map", (dict, OrderedDict, defaultdict, Counter)),
)  # fmt: skip
FAMILY_OF = MappingProxyType({id(kind): name for name, kinds in FAMILIES for kind in kinds})
# Types without parts, most of what a result is made of: asked first, because checks compare by the
# hundred thousand.
ATOMS = frozenset(id(kind) for _, kinds in FAMILIES[:5] for kind in kinds)
EXACT = 2**53  # the floats beyond are whole numbers with gaps between them


class CheckFailedError(AssertionError):
    """A comparison failed; the message is for the learner."""


@dataclass(frozen=True)
class CheckInfo:
    """What the decorator wrote down about a check: its points and its name in words."""

    points: int
    task: str


@dataclass
class Trace:
    """What one run of a check observed, in order: plain numbers, strings, tuples."""

    seen: list[object] = field(default_factory=list)


_TRACE: contextvars.ContextVar[Trace | None] = contextvars.ContextVar("trace", default=None)


def check(points: int = 1, task: str = "") -> Callable[[Check], Check]:
    """Mark ``def test_x(impl)`` as a check worth `points`; `task` names it for the learner."""
    if points < 1 or not task:
        raise ValueError(f"A check needs points >= 1 and a task in words, not {points}, {task!r}.")

    def mark(function: Check) -> Check:
        function.check_info = CheckInfo(points, task)  # type: ignore[attr-defined]
        return function

    return mark


def run_traced(function: Check, impl: Any) -> Trace:
    """Run one check and return what it observed; what it raises passes through, with the trace
    so far as the exception's attribute `trace`."""
    trace = Trace()
    token = _TRACE.set(trace)
    try:
        function(impl)
    except BaseException as error:
        error.trace = trace  # type: ignore[attr-defined]
        raise
    finally:
        _TRACE.reset(token)
    return trace


def observe(value: object) -> None:
    """Add a value to the running check's trace (comparisons do it themselves)."""
    if _TRACE.get() is not None:
        _remember(plain(value))


def _remember(value: object) -> None:
    """Add a value that is plain already to the running check's trace."""
    trace = _TRACE.get()
    if trace is not None:
        trace.seen.append(value)


def equal(got: object, want: object, what: str, case: str = "") -> None:
    """`got` must be `want`, exactly and with the same type family (2 is not 2.5, nor "2").

    `what` says in the learner's words what was compared, `case` the smallest way to repeat it.
    """
    mine, strange = plain(got), _strange(got)
    _remember(mine)
    _refuse_own(strange, what, case)
    if strange or _family(got) != _family(want) or mine != plain(want):
        raise CheckFailedError(_message(what, case, got, want))


def close(
    got: object, want: object, what: str, case: str = "", rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """`got` must equal `want` within ``atol + rtol * |want|``, elementwise and shape for shape.

    Numbers, nested sequences of numbers and tensors are compared as float64; a NaN never passes.
    """
    observe(got)
    _refuse_own(_strange(got), what, case)
    try:
        mine, theirs = _flat(got), _flat(want)
    except (TypeError, OverflowError):
        raise CheckFailedError(_message(what, case, got, want)) from None
    shape, wanted = _shape(got), _shape(want)
    if shape == wanted and len(mine) != len(theirs):  # rows of different lengths
        raise CheckFailedError(_message(what, case, got, want))
    if shape != wanted:
        raise CheckFailedError(
            _sentence(what, case) + f"expected shape {wanted}, got shape {shape}."
        )
    for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if not (a == b or abs(a - b) <= atol + rtol * abs(b)):
            where = f" at {_unravel(index, wanted)}" if wanted else ""
            digits = 6 if _number(a) != _number(b) else 17  # else one would read: expected 2, got 2
            want_text, got_text = _number(b, digits), _number(a, digits)
            raise CheckFailedError(
                _sentence(what, case) + f"expected {want_text}{where}, got {got_text}."
            )


def accept(got: object, what: str, case: str = "") -> Any:
    """`got` itself, if it is made of plain types all through: a check may compute with it."""
    if strange := _strange(got):
        observe(got)
        _refuse_own(strange, what, case)
        raise CheckFailedError(_sentence(what, case) + f"got {describe(strange[0])}.")
    return got


def number(got: object, what: str, case: str = "") -> Any:
    """`got` itself, if it is a plain int or float: a check may compute with it."""
    if _family(accept(got, what, case)) != "number":
        observe(got)
        raise CheckFailedError(_sentence(what, case) + f"expected a number, got {_got(got, 0)}.")
    return got


def expect(condition: object, message: str, observed: object = None) -> None:
    """`condition` must hold; `observed` is what distinguishes one wrong solution from another.

    What a submission returned goes through `number` or `accept` before a condition is made of it.
    """
    observe(bool(condition) if observed is None else observed)
    if not condition:
        raise CheckFailedError(message)


def seeds(count: int) -> Iterator[int]:
    """`count` seeds, the same for everyone unless an instructor sets MINILLM_GRADE_SEED."""
    secret = int(os.environ.get("MINILLM_GRADE_SEED", "0"))
    draw = random.Random(0x5EED + secret)
    for _ in range(count):
        yield draw.randrange(2**31)


def tensor(seed: int, *shape: int, scale: float = 1.0) -> "torch.Tensor":
    """A float32 tensor of normal numbers, the same on every machine for the same seed."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * scale


def plain(value: Any) -> object:
    """A value as nested tuples of plain numbers and strings, for comparing and for sending."""
    if id(type(value)) in ATOMS:
        return value
    family = _family(value)
    if family == "tensor":
        bare = sys.modules["torch"].Tensor.detach(value)  # without attributes set on the object
        return ("tensor", tuple(bare.shape), tuple(bare.double().flatten().tolist()))
    if family == "map":
        pairs = ((repr(plain(k)), plain(v)) for k, v in value.items())
        return ("map", tuple(sorted(pairs, key=lambda pair: pair[0])))
    if family == "set":
        return ("set", tuple(sorted(repr(plain(v)) for v in value)))
    if family in ("sequence", "other sequence"):
        return tuple([v if id(type(v)) in ATOMS else plain(v) for v in value])
    return ("object", type(value).__name__)


def _family(value: object) -> str:
    """The family of a value by its exact type, or "" if it has none.

    Nothing is asked of the value, nor of its class: `isinstance`, `==`, `in` and a dictionary of
    classes would ask them.
    """
    if name := FAMILY_OF.get(id(type(value))):
        return name
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    if type(value) is torch.Tensor or type(value) is torch.nn.Parameter:
        return "tensor"
    return "sequence" if type(value) is torch.Size else ""


def _strange(value: Any) -> list[object]:
    """Everything in a value that is of no family."""
    if id(type(value)) in ATOMS:
        return []
    family = _family(value)
    if not family:
        return [value]
    if family == "map":
        parts = (part for pair in value.items() for part in pair)
    elif family in ("sequence", "other sequence", "set"):
        parts = value
    else:
        return []
    return [each for part in parts if id(type(part)) not in ATOMS for each in _strange(part)]


def _refuse_own(strange: list[object], what: str, case: str) -> None:
    """Fail if there is an object among `strange` whose class was derived from a plain type."""
    if not strange:
        return
    torch = sys.modules.get("torch")
    bases = [kind for _, kinds in FAMILIES for kind in kinds] + ([torch.Tensor] if torch else [])
    for part in strange:
        for base in bases:
            if issubclass(type(part), base):
                kind = base.__name__
                raise CheckFailedError(
                    _sentence(what, case) + f"got a {type(part).__name__}, which is a kind of "
                    f"{kind} of your own; return a plain {kind}."
                )


def _flat(value: Any) -> list[float]:
    family = _family(value)
    if family == "tensor":
        return list(plain(value)[2])  # type: ignore[index]
    if family == "number":
        return [float(value)]
    if family == "sequence":
        return [part for item in value for part in _flat(item)]
    raise TypeError(type(value).__name__)


def _shape(value: Any) -> tuple[int, ...]:
    family = _family(value)
    if family == "tensor":
        return tuple(value.shape)
    if family == "sequence":
        return (len(value), *(_shape(value[0]) if len(value) else ()))
    return ()


def _unravel(index: int, shape: tuple[int, ...]) -> str:
    position = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        position.append(rest)
    return str(list(reversed(position)))


def _sentence(what: str, case: str) -> str:
    return f"{what}{f' ({case})' if case else ''}: "


def _message(what: str, case: str, got: object, want: object) -> str:
    return _sentence(what, case) + f"expected {describe(want)}, got {_got(got, want)}."


def _got(got: object, want: object) -> str:
    """What came instead of `want`, with the reason where the value alone hints at it."""
    if got is None and want is not None:
        return "None (is there a return?)"
    if type(got) is float and type(want) is int and abs(got) >= EXACT:
        return f"a float, {_number(got)}"
    return describe(got)


def describe(value: object) -> str:
    """A value in a few words: short things as they are, tensors by shape and first numbers."""
    if _family(value) == "tensor":
        first = ", ".join(_number(v) for v in _flat(value)[:4])
        return f"a tensor of shape {_shape(value)} starting {first}"
    if type(value) is float:
        return _number(value)
    for kind, advice in KINDS:
        if issubclass(type(value), kind):
            return advice
    try:
        text = _short_repr().repr(value)
    except Exception:  # the learner's own __repr__, or an int of more digits than Python prints
        text = f"<{type(value).__name__}>"
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return text if len(text) <= 80 else f"{text[:70]}... ({type(value).__name__})"


def _short_repr() -> reprlib.Repr:
    """A repr that does not write out the millions of a list before they are cut."""
    short = reprlib.Repr()
    short.maxlist = short.maxtuple = short.maxdict = short.maxset = short.maxdeque = 40
    short.maxstring = short.maxlong = short.maxother = 100
    return short


def _number(value: float, digits: int = 6) -> str:
    return f"{value:.{digits}g}" if math.isfinite(value) else str(value)
