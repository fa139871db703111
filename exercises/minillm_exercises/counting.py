"""For checks that grade work instead of time: count a solution's operations, refuse one of them.

Both work while a ``with`` block runs, whatever name the solution reaches an operation by.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from minillm_exercises.checking import CheckFailedError

OF_VECTORS = ("mv", "addmv", "dot", "vdot")


@dataclass
class Counts:
    """What ran: operator names in order ("mm", "add"), floating-point operations of the matrix
    products (2 for a multiply and an add), elements of the largest tensor that was made, and of the
    largest that was made in memory of its own: a view of another, or the same changed, is none."""

    ops: list[str] = field(default_factory=list)
    flops: int = 0
    max_numel: int = 0
    max_new: int = 0

    def of(self, *names: str) -> int:
        """How often the operators called `names` ran."""
        return sum(op in names for op in self.ops)


class _Counter(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts
        self._whole: set[Any] = set()  # operators that lead to no other: asked once each

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # asked when a subclass is made; True imports 800 modules at the first use

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self._whole:
            with self:  # under inference_mode linear arrives whole; this leads to the mm inside
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
            self._whole.add(func)
        given = {_memory(tensor) for tensor in _tensors((*args, *kwargs.values()))}
        out = func(*args, **kwargs)
        self.counts.ops.append(func.overloadpacket.__name__)
        if func.overloadpacket in flop_registry:
            formula = flop_registry[func.overloadpacket]
            self.counts.flops += int(formula(*args, **kwargs, out_val=out))
        elif self.counts.ops[-1] in OF_VECTORS:  # which torch's registry leaves out
            matrix = args[1] if self.counts.ops[-1] == "addmv" else args[0]
            self.counts.flops += 2 * matrix.numel()
        for tensor in _tensors((out,)):
            self.counts.max_numel = max(self.counts.max_numel, tensor.numel())
            if _memory(tensor) not in given:
                self.counts.max_new = max(self.counts.max_new, tensor.numel())
        return out


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments or results, and in lists among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _memory(tensor: torch.Tensor) -> int:
    """Where a tensor's numbers begin, its own or those it is a view of."""
    return tensor.untyped_storage().data_ptr()


@contextmanager
def counting() -> Iterator[Counts]:
    """Count every operation on tensors inside the block."""
    counts = Counts()
    with _Counter(counts):
        yield counts


def _refuse(name: str, names: tuple[str, ...]) -> None:
    """Raise if the function or operator `name` is one of `names`, underscores aside."""
    plain = name.strip("_")
    if plain.startswith("scaled_dot_product"):  # one operator per device and algorithm
        plain = "scaled_dot_product_attention"
    if plain in names:
        raise CheckFailedError(
            f"{plain} does what this exercise asks for: the exercise is to build it yourself."
        )


class _RefusesFunctions(TorchFunctionMode):
    """Sees what the submission calls: torch.softmax, x.softmax, F.softmax."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse(str(getattr(func, "__name__", "")), self.names)
        return func(*args, **(kwargs or {}))


class _RefusesOperators(TorchDispatchMode):
    """Sees what a call leads to: a module's softmax ends in the operator _softmax."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse(func.overloadpacket.__name__, self.names)
        return func(*args, **(kwargs or {}))


@contextmanager
def banned_calls(*names: str) -> Iterator[None]:
    """Refuse the torch functions, methods and operators called `names` inside the block; the
    block holds the submission's call alone, for a reference solution may want them."""
    with _RefusesFunctions(names), _RefusesOperators(names):
        yield
