"""For checks of Triton kernels: the same on a CPU, interpreted, and on a GPU, compiled.

    with watching(impl) as seen:
        impl.softmax(x, lengths, 1.0, out.view)
    seen.ran("softmax")
    out.unharmed("out")

Which of the two it is follows from the machine, and from TRITON_INTERPRET=1 for who wants the
interpreter on a GPU (`triton_mode`). It is settled before Triton is imported, so the checks of an
exercise do not import Triton: they import this module.

An access outside of a tensor is found in both. Interpreted, every address is looked at. On a GPU
tensors lie in larger buffers: around inputs is NaN, which shows in the result, and around outputs
is a pattern that has to be there afterwards.
"""

import contextlib
import importlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any, NoReturn

import torch

from minillm_exercises import triton_front_end
from minillm_exercises.checking import CheckFailedError, close, expect, observe
from minillm_exercises.triton_host import Host, watched_host
from minillm_exercises.triton_mode import DEVICE, INTERPRETED
from minillm_exercises.triton_sentences import compiler_sentence, kernel_sentence
from minillm_kernels import interpreter

if INTERPRETED:
    # Before the fork, so that both cost a submission nothing: a launch looks for gluon, too.
    interpreter.install()
    with contextlib.suppress(ImportError):
        importlib.import_module("triton.experimental.gluon")


GUARD = 64  # elements on each side of a buffer
PATTERN: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float32: -7.25e30, torch.bfloat16: -7.25e30, torch.float16: -60000.0}
)
NOT_A_NUMBER = "what may not be read is NaN here, like masked lanes without other= and like an out"


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel of the submission."""

    kernel: str
    grid: tuple[int, ...]

    @property
    def programs(self) -> int:
        """How many programs it started."""
        return math.prod(self.grid)


@dataclass
class Seen:
    """What ran inside `watching`. Bytes are counted interpreted only, by the names given to
    `watching`; host copies are counted everywhere."""

    launches: list[Launch] = field(default_factory=list)
    loaded: dict[str, int] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    launch_failed: bool = False
    host: Host = field(default_factory=Host)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def ran(self, function: str) -> None:
        """A kernel of the submission has to have been launched."""
        expect(
            bool(self.launches),
            f"{function} launched no kernel: it has to start an @triton.jit function of your file "
            f"as kernel[grid](...).",
        )

    def add(self, counts: dict[str, int], addresses: Any, size: int) -> None:
        """Count the bytes of an access in the tensors that are watched."""
        for name, tensor in self.tensors.items():
            start, end = interpreter.extent(tensor)
            inside = int(((addresses >= start) & (addresses < end)).sum())
            counts[name] = counts.get(name, 0) + inside * size


@dataclass(frozen=True)
class Guarded:
    """A tensor in the middle of a larger buffer."""

    buffer: torch.Tensor
    view: torch.Tensor
    before: torch.Tensor  # the buffer as it was

    def unharmed(self, what: str, case: str = "") -> None:
        """Nothing but `view` may have changed."""
        now, then = self.buffer.clone(), self.before.clone()
        for tensor in (now, then):
            _view(tensor, self.view).fill_(0)
        changed = (_bits(now) != _bits(then)).nonzero().flatten().tolist()
        if not changed:
            return
        observe(("harmed", what, len(changed)))
        first = self.view.storage_offset()
        sizes = self.view.shape, self.view.stride()
        last = first + sum((n - 1) * s for n, s in zip(*sizes, strict=True))
        where = (
            f"{first - changed[0]} elements before its beginning"
            if changed[0] < first
            else f"{changed[-1] - last} elements behind its end"
            if changed[-1] > last
            else f"between its rows, {changed[0] - first} elements behind its beginning"
        )
        raise CheckFailedError(
            f"Out of bounds{f' ({case})' if case else ''}: {len(changed)} elements outside of "
            f"{what} were overwritten, one of them {where}. A store needs a mask."
        )


def _view(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return buffer.as_strided(like.shape, like.stride(), like.storage_offset())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def guarded(
    values: torch.Tensor, strides: Sequence[int] | None = None, around: float | None = None
) -> Guarded:
    """`values` on the device of the launches, surrounded by `around` (default: NaN, or 1 where
    numbers are integers). `strides` (default: no gaps) may leave gaps, which hold the same."""
    if strides is None:
        strides = values.contiguous().stride()
    span = 1 + sum((n - 1) * s for n, s in zip(values.shape, strides, strict=True))
    span = span if values.numel() else 0
    if around is None:
        around = math.nan if values.dtype.is_floating_point else 1
    buffer = torch.full((span + 2 * GUARD,), around, dtype=values.dtype, device=DEVICE)
    view = buffer.as_strided(values.shape, tuple(strides), GUARD)
    view.copy_(values)
    return Guarded(buffer, view, buffer.clone())


def output(
    *shape: int, dtype: torch.dtype = torch.float32, strides: Sequence[int] | None = None
) -> Guarded:
    """A tensor to be written: NaN inside, a pattern around."""
    return guarded(torch.full(shape, math.nan, dtype=dtype), strides, PATTERN[dtype])


def filled(out: Guarded, want: torch.Tensor, what: str, case: str = "", rtol: float = 1e-5) -> None:
    """`out` must hold `want`, and nothing around it may have changed."""
    got = out.view.detach().cpu().clone()
    missing = (got.isnan() & ~want.isnan()).nonzero().tolist()
    if missing:
        observe(got)
        raise CheckFailedError(
            f"{what}{f' ({case})' if case else ''}: NaN at {missing[0]}, expected "
            f"{float(want[tuple(missing[0])]):.6g}. Every access counts: {NOT_A_NUMBER} that was "
            f"not written."
        )
    close(got, want, what, case, rtol=rtol, atol=rtol / 10)
    out.unharmed(what, case)


@contextmanager
def watching(impl: ModuleType, **tensors: torch.Tensor) -> Iterator[Seen]:
    """Watch the submission inside the block: its launches, what it does beside them, and the bytes
    that its kernels load from and store to `tensors`. Its mistakes become sentences."""
    seen = Seen(tensors=tensors)
    with _explained(impl, seen), watched_host(seen.host):
        yield seen


@contextmanager
def _explained(impl: ModuleType, seen: Seen) -> Iterator[None]:
    try:
        with _launches(impl, seen), _accesses(seen):
            yield
        if not INTERPRETED:
            torch.accelerator.synchronize()  # what went wrong there is known only then
    except CheckFailedError:
        raise
    except Exception as error:
        seen.host.complain()
        _explain(error, seen)


def _explain(error: Exception, seen: Seen) -> NoReturn:
    """Raise an error that came out of a launch as a sentence, with the line where it happened; if
    there is none for it, and outside of launches, as it was raised first."""
    root = _first(error)
    sentence = compiler_sentence(root) or (kernel_sentence(root) if seen.launch_failed else "")
    if not sentence:
        raise root
    observe(("kernel", type(root).__name__, _plain(str(root))))
    raise CheckFailedError(sentence).with_traceback(root.__traceback__) from None


def _first(error: BaseException) -> BaseException:
    """What Triton wrapped: the interpreter its kernel's errors, the compiler only some."""
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__
    return error


def _plain(text: str) -> str:
    """A message without addresses and distances, so that equal mistakes are equal."""
    return re.sub(r"0x[0-9a-f]+| \d+ bytes .*", "", text)[:200]


@contextmanager
def _launches(impl: ModuleType, seen: Seen) -> Iterator[None]:
    """Note every launch of a kernel that stands in the submission's file."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    function = InterpretedFunction if INTERPRETED else JITFunction
    run, call = function.run, function.__call__

    def noted(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        def measured(meta: Any) -> tuple[int, ...]:
            sizes = tuple(grid(meta)) if callable(grid) else _sizes(grid)
            if self.fn.__code__.co_filename == impl.__file__:
                seen.launches.append(Launch(self.fn.__name__, sizes))
            return sizes

        seen.host.launching = True
        try:
            return run(self, *args, grid=measured, warmup=warmup, **options)
        except Exception:
            seen.launch_failed = True
            raise
        finally:
            seen.host.launching = False

    def called(self: Any, *args: Any, **options: Any) -> Any:
        if not seen.host.launching:
            name = self.fn.__name__
            raise CheckFailedError(
                f"{name} was called like a function of Python: a kernel is launched with its grid "
                f"in brackets, {name}[grid](...)."
            )
        return call(self, *args, **options)

    function.run, function.__call__ = noted, called  # type: ignore[method-assign]
    try:
        yield
    finally:
        function.run, function.__call__ = run, call  # type: ignore[method-assign]


def _sizes(grid: Any) -> tuple[int, ...]:
    if not isinstance(grid, tuple | list):
        raise CheckFailedError(
            f"The grid is {grid!r}: it has to be a tuple of one to three sizes, as (rows,) with "
            f"its comma."
        )
    return tuple(grid)


@contextmanager
def _accesses(seen: Seen) -> Iterator[None]:
    """Count bytes in the interpreter, and give lanes without a value one that shows."""
    if not INTERPRETED:
        yield
        return
    from triton.runtime import interpreter as module

    builder, np = module.InterpreterBuilder, module.np
    load, store = builder.create_masked_load, builder.create_masked_store

    def active(pointers: Any, mask: Any) -> Any:
        return pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]

    def masked_load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any):  # type: ignore[no-untyped-def]
        kind = pointers.get_element_ty()
        seen.add(seen.loaded, active(pointers, mask), kind.primitive_bitwidth // 8)
        if other is None and kind.is_floating() and not mask.data.all():
            nothing = np.full(pointers.data.shape, math.nan, dtype=np.float32)
            handle = module.TensorHandle(nothing, module.tl.float32)
            other = handle if kind == module.tl.float32 else self.cast_impl(handle, kind)
        return load(self, pointers, mask, other, *rest, **named)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        result = store(self, pointers, value, mask, *rest)
        seen.add(seen.stored, active(pointers, mask), size)
        return result

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
    try:
        yield
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store


def bytes_read(
    seen: Seen, name: str, want: int, why: str, case: str = "", least: int | None = None
) -> None:
    """The kernels must load `want` bytes of a tensor, or between `least` and so many; `why` says
    where they come from. On a GPU bytes are not counted, and this passes."""
    if INTERPRETED:
        got = seen.loaded.get(name, 0)
        _bytes(got, want, f"bytes loaded of {name}", why, case, least)


def bytes_written(seen: Seen, name: str, want: int, why: str, case: str = "") -> None:
    """The same for stores."""
    if INTERPRETED:
        _bytes(seen.stored.get(name, 0), want, f"bytes stored to {name}", why, case, want)


def _bytes(got: int, want: int, what: str, why: str, case: str, least: int | None) -> None:
    observe(got)
    if not (want if least is None else least) <= got <= want:
        raise CheckFailedError(
            f"{what}{f' ({case})' if case else ''}: {why}, {want:,} bytes, but it was {got:,}."
        )


def compiles(impl: ModuleType, call: Callable[[Any], object], most: int, what: str) -> None:
    """`call(submission)` launches at least one kernel and at most `most`, and Triton's compiler
    takes each of them. On a GPU they are compiled and run."""
    names: list[str] = []
    if INTERPRETED:
        try:
            names = triton_front_end.compiled_launches(impl, call)
        except CheckFailedError:
            raise
        except Exception as error:
            if not (sentence := compiler_sentence(error) or kernel_sentence(error)):
                raise
            observe(("compiler", type(error).__name__, _plain(str(error))))
            raise CheckFailedError(sentence) from None
    else:
        seen = Seen()  # `call` may compute: it is a check's
        with _explained(impl, seen):
            call(impl)
        names = [launch.kernel for launch in seen.launches]
    expect(bool(names), f"{what} launched no kernel of your file.", observed=len(names))
    expect(
        len(names) <= most,
        f"{what}: {len(names)} launches, and {most} are enough.",
        observed=len(names),
    )
