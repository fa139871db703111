"""For checks that grade work instead of time: count a solution's operations, refuse one of them.

Both work while a ``with`` block runs, whatever name the solution reaches an operation by.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from minillm_exercises.checking import CheckFailedError


@dataclass
class Counts:
    """What ran: operator names in order ("mm", "add"), floating-point operations of the matrix
    products (2 for a multiply and an add), elements of the largest tensor that was made."""

    ops: list[str] = field(default_factory=list)
    flops: int = 0
    max_numel: int = 0

    def of(self, *names: str) -> int:
        """How often the operators called `names` ran."""
        return sum(op in names for op in self.ops)


class _Counter(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # asked when a subclass is made; True would import 800 modules here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.counts.ops.append(func.overloadpacket.__name__)
        if func.overloadpacket in flop_registry:
            formula = flop_registry[func.overloadpacket]
            self.counts.flops += int(formula(*args, **(kwargs or {}), out_val=out))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.counts.max_numel = max(self.counts.max_numel, tensor.numel())
        return out


@contextmanager
def counting() -> Iterator[Counts]:
    """Count every operation on tensors inside the block."""
    counts = Counts()
    with _Counter(counts):
        yield counts


class _Refuser(TorchFunctionMode):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(getattr(func, "__name__", ""))
        if name.strip("_") in self.names:
            raise CheckFailedError(
                f"{name} does what this exercise asks for: the exercise is to build it yourself."
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def banned_calls(*names: str) -> Iterator[None]:
    """Refuse the torch functions and tensor methods called `names` inside the block."""
    with _Refuser(names):
        yield
