"""A GPU that is not there: tensors on "fake:0" without values, of which every copy is seen.

Torch's fake tensors have a device, a dtype and a shape. An operation between devices raises as it
would on a GPU, and so does one that needs a value on the host (`item`, a mask as an index). A
`FakeGpu` adds what `torch.cuda.set_sync_debug_mode("error")` demands: a copy between host and
device is non-blocking and has pinned memory on the host. It counts copies and launches.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minillm import ops
from minillm.ops import dispatch
from minillm.ops.dispatch import Backend
from minillm_kernels import launch
from minillm_kernels.launch import triton
from minillm_kernels.offline import compiling


class Absent(backend_registration._DummyBackendModule):
    """So that torch's other users find no accelerator: the backend stays for the whole process."""

    __name__ = "absent"

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 0


backend_registration._setup_privateuseone_for_python_backend("fake", Absent())
DEVICE = torch.device("fake:0")
NO_LAUNCH = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "view", "select",
    "_unsafe_view", "slice", "split", "split_with_sizes", "as_strided", "expand", "transpose", "t",
    "detach", "unsqueeze", "squeeze", "permute", "alias", "unbind", "lift_fresh", "reshape",
    "_reshape_alias", "to", "flatten", "contiguous", "device",
}  # fmt: skip


class WaitError(Exception):
    """The host would wait for the GPU."""


def has_mask(indices: Any) -> bool:
    """Whether an index is a mask: fake tensors do not count what is written with one."""
    return any(each is not None and each.dtype == torch.bool for each in indices)


class FakeGpu(TorchDispatchMode):
    """Counts copies and launches, and refuses what waits while `is_watching`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.is_watching = False
        self._pinned: dict[int, Tensor] = {}  # by its memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__.split(".")[0]
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        host = [each for each in given if each.device.type == "cpu" and each.dim()]
        there = any(each.device == DEVICE for each in given)
        if (
            name in ("to", "_to_copy")
            and host
            and torch.device(kwargs.get("device", "cpu")) == DEVICE
        ):
            self._copy("to device", host[0], kwargs.get("non_blocking"))
            return torch.empty(
                host[0].shape, dtype=kwargs.get("dtype", host[0].dtype), device=DEVICE
            )
        result = func(*args, **kwargs)
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if not there and not any(each.device == DEVICE for each in made):
            return result
        if name in ("to", "_to_copy") and made[0].device != DEVICE:
            self._copy("to host", made[0], False)
        elif name in ("to", "_to_copy"):
            self.seen["conversion"] += made[0].dtype != given[0].dtype
        elif name == "copy_" and host:
            way = "to device" if host[0] is args[1] else "to host"
            if args[0].shape != args[1].shape:
                raise WaitError(f"{name} expands {list(args[1].shape)} on the host")
            self._copy(way, host[0], kwargs.get("non_blocking") or True in args[2:])
        elif host and self.is_watching:
            raise WaitError(f"{name} has operands on the host")
        elif self.is_watching and name.startswith("index_put") and has_mask(args[1]):
            raise WaitError(f"{name} counts a mask")
        elif name not in NO_LAUNCH:
            self.seen[name] += 1
        return result

    def _copy(self, what: str, here: Tensor, is_async: bool) -> None:
        self.seen[what] += 1
        is_pinned = here.untyped_storage()._cdata in self._pinned
        if self.is_watching and not (is_pinned and is_async):
            raise WaitError(f"a copy {what}: pinned {is_pinned}, non-blocking {is_async}")

    def pin(self, tensor: Tensor) -> Tensor:
        """In the place of `Tensor.pin_memory`."""
        self._pinned[tensor.untyped_storage()._cdata] = tensor
        return tensor

    @contextmanager
    def watching(self) -> Iterator[Counter[str]]:
        """For the block, waiting is an error; yields what is seen."""
        self.seen, self.is_watching = Counter(), True
        try:
            yield self.seen
        finally:
            self.is_watching = False


@contextmanager
def fake_gpu() -> Iterator[FakeGpu]:
    """For the block, there is one."""
    gpu, backend = FakeGpu(), Backend("triton", "not there")
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)

    def pinning(make: Any) -> Any:
        def made(*given: Any, pin_memory: bool = False, **more: Any) -> Tensor:
            return gpu.pin(make(*given, **more)) if pin_memory else make(*given, **more)

        return made

    def launching(kernel: Any, grid: Any) -> Any:
        return lambda *given, **more: gpu.seen.update([kernel.__name__])

    changes: list[tuple[Any, str, Any]] = [
        (dispatch, "backend_of", lambda device: backend),
        (ops, "backend_of", lambda device: backend),
        (torch, "empty", pinning(torch.empty)),
        (torch, "empty_like", pinning(torch.empty_like)),
        (torch, "Event", lambda device: event),
        (torch.Tensor, "pin_memory", lambda self: gpu.pin(self)),
        (torch.Tensor, "data_ptr", lambda self: self.untyped_storage()._cdata),
        (torch.accelerator, "device_index", lambda index: nullcontext()),
        (launch, "_counters", launch._counters.__wrapped__),
    ]
    with ExitStack() as stack:
        stack.enter_context(compiling(90))
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value))
        interface = triton.runtime.jit.KernelInterface
        stack.enter_context(patch.object(interface, "__getitem__", launching))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(gpu)
        yield gpu
