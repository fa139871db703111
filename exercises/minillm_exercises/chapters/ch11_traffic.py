"""Chapter 11: what a kernel reads and writes, counted access by access in Triton's interpreter."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from minillm_exercises.errors import ExerciseError
from minillm_kernels.launch import INTERPRETED

Program = tuple[int, int, int]


@dataclass
class Traffic:
    """What the kernels of a call asked memory for. Keys are the names of a kernel's arguments.

    Attributes:
        read, written: bytes, each as often as it was asked for.
        programs: how many ran, by the name of the kernel.
        outside: accesses to single numbers that lay outside of every tensor; none was made.
        complaint: what the bounds check says of the first of them.
        result: what the call returned, if it was a tensor.
        places: (argument, program) to the entries of the first two dimensions that were read.
    """

    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    programs: Counter[str] = field(default_factory=Counter)
    outside: int = 0
    complaint: str = ""
    result: torch.Tensor | None = None
    places: dict[tuple[str, Program], set[int]] = field(default_factory=dict)

    def moved(self) -> int:
        """All bytes, read and written."""
        return self.read.total() + self.written.total()

    def readers(self, name: str, place: int) -> list[Program]:
        """The programs that read an entry of the argument `name`, in order."""
        return sorted(who for (what, who), seen in self.places.items() if what == name
                      and place in seen)  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` reads it."""
        plain = {name: getattr(self, name) for name in ("read", "written", "programs")}
        places = [[name, who, sorted(seen)] for (name, who), seen in self.places.items()]
        result = None if self.result is None else self.result.double().tolist()
        return {
            **plain, "outside": self.outside, "complaint": self.complaint, "result": result,
            "places": places,
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Traffic":
        """What `to_json` wrote."""
        read, written, programs = (Counter(data[name]) for name in ("read", "written", "programs"))
        places = {(name, tuple(who)): set(seen) for name, who, seen in data["places"]}
        result = None if data["result"] is None else torch.tensor(data["result"])
        return cls(read, written, programs, data["outside"], data["complaint"], result, places)


# ---- counting, in an interpreted process -----------------------------------------------------


@dataclass(frozen=True)
class _Memory:
    """One tensor of a launch: where it lies, and the bytes of an entry of its first two sizes."""

    name: str
    start: int
    end: int
    entry: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> "_Memory":
        from minillm_kernels.interpreter import extent

        step = tensor.stride(1) if tensor.dim() > 2 else max(1, tensor.numel())
        return cls(name, *extent(tensor), step * tensor.element_size())


@contextmanager
def counting() -> Iterator[Traffic]:
    """Count the accesses of every kernel inside. An access out of bounds is counted and left out.

    Raises:
        ExerciseError: kernels are compiled in this process.
    """
    if not INTERPRETED:
        raise ExerciseError("Accesses are counted in an interpreted process: TRITON_INTERPRET=1.")
    from triton.runtime import interpreter as module

    from minillm_kernels.interpreter import install

    install()
    found = Traffic()
    builder, executor = module.InterpreterBuilder, module.GridExecutor
    before = (builder.create_masked_load, builder.create_masked_store, executor._init_args_hst)
    load, store, init = before
    launched: list[_Memory] = []
    running: list[str] = []  # the name of its kernel

    def init_args(self: Any, args: Any, kwargs: Any) -> Any:
        result = init(self, args, kwargs)
        named = [*zip(self.arg_names, result[0], strict=False), *result[1].items()]
        launched[:] = list(_memories(named))
        running[:] = [self.fn.__name__]
        return result

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        inside = tally(module, self, found, launched, pointers, mask, found.read)
        if inside is not mask:
            _complain(found, lambda: load(self, pointers, mask, *rest, **named))
        return load(self, pointers, inside, *rest, **named)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        inside = tally(module, self, found, launched, pointers, mask, found.written)
        if inside is not mask:
            _complain(found, lambda: store(self, pointers, value, mask, *rest))
        return store(self, pointers, value, inside, *rest)

    set_index = builder.set_grid_idx

    def set_grid_idx(self: Any, *index: int) -> None:
        found.programs[running[0]] += 1
        set_index(self, *index)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
    executor._init_args_hst, builder.set_grid_idx = init_args, set_grid_idx
    try:
        yield found
    finally:
        builder.create_masked_load, builder.create_masked_store, executor._init_args_hst = before
        builder.set_grid_idx = set_index


def _memories(named: Sequence[tuple[str, Any]]) -> Iterator[_Memory]:
    for name, value in named:
        tensor = getattr(value, "base", value)  # of a descriptor
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            yield _Memory.of(name, tensor)


def tally(
    module: Any,
    builder: Any,
    found: Traffic,
    launched: Sequence[_Memory],
    pointers: Any,
    mask: Any,
    counter: Counter[str],
) -> Any:
    """Count the bytes of one load or store of a program, tensor by tensor.

    Returns the mask without the places that lie outside of all tensors.
    """
    np = module.np
    size = pointers.get_element_ty().primitive_bitwidth // 8
    wanted = np.broadcast_to(mask.data, pointers.data.shape)
    left = wanted.copy()
    for memory in launched:
        here = left & (pointers.data >= memory.start) & (pointers.data + size <= memory.end)
        if not here.any():
            continue
        left &= ~here
        counter[memory.name] += int(here.sum()) * size
        if counter is found.read:
            entries = np.unique((pointers.data[here] - memory.start) // memory.entry)
            x, y, z = map(int, builder.grid_idx)
            found.places.setdefault((memory.name, (x, y, z)), set()).update(map(int, entries))
    if not left.any():
        return mask
    found.outside += int(left.sum())
    return module.TensorHandle(wanted & ~left, mask.dtype)


def _complain(found: Traffic, access: Callable[[], object]) -> None:
    """Keep what the bounds check says of an access that it refuses."""
    from minillm_kernels.interpreter import OutOfBoundsError

    try:
        access()
    except OutOfBoundsError as error:
        found.complaint = found.complaint or str(error)
