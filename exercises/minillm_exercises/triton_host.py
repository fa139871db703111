"""What a submission does beside its kernels: it may allocate, view and copy, and compute nothing.

A launcher that calls torch.softmax gives the right numbers and has not written a kernel. So every
operator of torch that runs outside of a launch is looked at, whatever name it was reached by. The
interpreter uses torch as well: what runs inside a launch is not looked at here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from minillm_exercises.checking import CheckFailedError

ALLOCATES = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided zeros zeros_like new_zeros ones "  # noqa: SIM905
    "ones_like new_ones full full_like new_full fill zero arange scalar_tensor".split()
)
VIEWS = frozenset(
    "view _unsafe_view reshape _reshape_alias as_strided select slice unsqueeze squeeze transpose "  # noqa: SIM905
    "permute t numpy_T expand detach alias split split_with_sizes chunk unbind narrow flatten "
    "unflatten lift lift_fresh view_as movedim swapaxes expand_as contiguous to".split()
)
COPIES = frozenset({"clone", "copy", "_to_copy"})
# These hand numbers to Python without an operator.
READS = frozenset(
    "tolist numpy item __array__ __dlpack__ untyped_storage storage __float__ __int__ __bool__ "  # noqa: SIM905
    "__reduce_ex__ __repr__ __format__".split()
)


@dataclass
class Host:
    """What ran outside of launches; `launching` is true while a kernel runs."""

    copied: int = 0  # bytes
    refused: list[str] = field(default_factory=list)
    launching: bool = False

    def refuse(self, name: str, why: str) -> None:
        """Remember an operation, for its exception may be caught, and raise."""
        self.refused.append(
            f"{name} runs outside of your kernels: {why} Beside the launch you may only allocate "
            f"memory, and view tensors."
        )
        self.complain()

    def complain(self) -> None:
        """Raise for the first operation that was refused, if there is one."""
        if self.refused:
            raise CheckFailedError(self.refused[0])


class _Functions(TorchFunctionMode):
    """Sees methods that read numbers without an operator."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self.host = host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(getattr(func, "__name__", ""))
        if not self.host.launching and name in READS:
            self.host.refuse(
                f"{name.strip('_')}()",
                "it brings numbers to Python, and on a GPU it waits for them.",
            )
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    """Sees every operator, by whatever function or method it was reached."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self.host = host

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True imports 800 modules at the first use

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        plain = name.rstrip("_")
        if not self.host.launching:
            if plain == "_local_scalar_dense":
                self.host.refuse("item()", "it waits for the GPU to bring a number to Python.")
            if plain not in ALLOCATES | VIEWS | COPIES:
                self.host.refuse(f"torch's {plain}", "the kernel is to do the arithmetic.")
            if plain in COPIES:
                source = args[1] if plain == "copy" else args[0]
                self.host.copied += source.numel() * source.element_size()
        return func(*args, **(kwargs or {}))


@contextmanager
def watched_host(host: Host) -> Iterator[None]:
    """Refuse arithmetic on the host inside the block; `host.launching` switches it off."""
    with _Functions(host), _Operators(host):
        yield
    host.complain()
