"""Patches Triton's interpreter: correct bfloat16 arithmetic, and bounds checks.

With TRITON_INTERPRET=1 a kernel runs in numpy. Without patches (Triton 3.6 to 3.9) the interpreter
computes with the bit patterns of bfloat16 numbers as integers, truncates where hardware rounds, and
an access after the end of a tensor crashes the process. `install` patches the whole process:

* bfloat16 arithmetic is done in float32 and rounded to nearest even, as on a GPU;
* an access outside of the tensors of the launch raises `OutOfBoundsError`. A view into a larger
  buffer has the bounds of the view.

It also removes repeated preparation work of the interpreter: two fifths of the time of a launch
whose kernel calls many functions.

It patches private names of Triton, and raises KernelError if they do not exist. Like the
interpreter, it is not thread-safe.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from minillm_kernels.launch import INTERPRETED, KernelError, tl

TORCH_TYPES = MappingProxyType(
    {
        tl.bfloat16: torch.bfloat16,
        tl.float16: torch.float16,
        tl.float32: torch.float32,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }
)
SATURATING = (tl.float8e4nv, tl.float8e5)  # casts saturate, as on a GPU; not in every torch
COMPARISONS = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")
BITWISE = ("bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift")


class OutOfBoundsError(KernelError, IndexError):
    """A kernel accessed memory outside of the tensors of its launch."""


def install() -> None:
    """Patch the interpreter of this process, once; KernelError without TRITON_INTERPRET=1."""
    if not INTERPRETED:
        raise KernelError(
            "TRITON_INTERPRET=1 is not set, or was set after Triton's import: there is no "
            "interpreter to patch. Set it before Python starts."
        )
    from triton.runtime import interpreter

    if getattr(interpreter, "patched_by_minillm", False):
        return
    _patch_casts(interpreter)
    _patch_arithmetic(interpreter)
    _patch_reductions(interpreter)
    _check_bounds(interpreter)
    _prepare_once(interpreter)
    interpreter.patched_by_minillm = True  # type: ignore[attr-defined]
    _self_test()


# ---- bfloat16 ---------------------------------------------------------------------------------


def _convert(module: Any, handle: Any, target: Any) -> Any:
    """Convert a handle's numbers to another floating-point type, rounded by torch."""
    source, target = handle.dtype.scalar, target.scalar
    np = module.np
    raw = np.ascontiguousarray(handle.data).reshape(-1).view(np.uint8)
    wide = torch.from_numpy(raw).view(TORCH_TYPES[source]).float()
    if target in SATURATING:
        largest = torch.finfo(TORCH_TYPES[target]).max
        wide = wide.clamp(-largest, largest)
    numbers = wide.to(TORCH_TYPES[target])
    data = numbers.view(torch.uint8).numpy().view(module._get_np_dtype(target))
    return module.TensorHandle(data.reshape(handle.data.shape), target)


def _patch_casts(module: Any) -> None:
    builder = module.InterpreterBuilder
    cast, fp_to_fp = builder.cast_impl, builder.create_fp_to_fp

    def ours(handle: Any, target: Any) -> bool:
        source, target = handle.dtype.scalar, target.scalar
        return source in TORCH_TYPES and target in TORCH_TYPES and source != target

    def cast_impl(self: Any, handle: Any, target: Any) -> Any:
        if ours(handle, target):
            return _convert(module, handle, target)
        if handle.dtype.scalar == tl.bfloat16 and target.scalar != tl.bfloat16:
            handle = _convert(module, handle, tl.float32)
        if target.scalar == tl.bfloat16 and handle.dtype.scalar != tl.bfloat16:
            return _convert(module, cast(self, handle, tl.float32), target)
        return cast(self, handle, target)

    def create_fp_to_fp(self: Any, handle: Any, target: Any, rounding: Any = None) -> Any:
        if ours(handle, target):
            return _convert(module, handle, target)
        return fp_to_fp(self, handle, target, rounding)

    def get_bf16(self: Any, value: float) -> Any:
        single = module.TensorHandle(module.np.array([value], dtype="float32"), tl.float32)
        return _convert(module, single, tl.bfloat16)

    builder.cast_impl, builder.create_fp_to_fp = cast_impl, create_fp_to_fp
    builder.get_bf16 = get_bf16


def _widened(module: Any, handle: Any) -> Any:
    return _convert(module, handle, tl.float32) if handle.dtype.scalar == tl.bfloat16 else handle


def _patch_arithmetic(module: Any) -> None:
    builder, np = module.InterpreterBuilder, module.np
    binary, unary, ternary = builder.binary_op, builder.unary_op, builder.ternary_op
    comparisons = tuple(getattr(np, name) for name in COMPARISONS)
    bitwise = tuple(getattr(np, name) for name in BITWISE)

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16 or op in bitwise:
            return binary(self, left, right, op)
        result = binary(self, _widened(module, left), _widened(module, right), op)
        return result if op in comparisons else _convert(module, result, tl.bfloat16)

    def unary_op(self: Any, handle: Any, op: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return unary(self, handle, op)
        return _convert(module, unary(self, _widened(module, handle), op), tl.bfloat16)

    def ternary_op(self: Any, first: Any, second: Any, third: Any, op: Any) -> Any:
        if third.dtype.scalar != tl.bfloat16 or op is np.where:  # choosing rounds nothing
            return ternary(self, first, second, third, op)
        parts = [_widened(module, handle) for handle in (first, second, third)]
        return _convert(module, ternary(self, *parts, op), tl.bfloat16)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        """Fused multiply-add, rounded once: the product of two float32 is exact in float64."""
        wide = [_widened(module, handle).data.astype(np.float64) for handle in (x, y, z)]
        result = module.TensorHandle((wide[0] * wide[1] + wide[2]).astype(np.float32), tl.float32)
        target = z.dtype.scalar
        if target == tl.float32:
            return result
        return _convert(module, result, target) if target in TORCH_TYPES else cast(self, result, z)

    def cast(self: Any, result: Any, like: Any) -> Any:
        return module.TensorHandle(result.data.astype(like.data.dtype), like.dtype.scalar)

    def create_dot(self: Any, a: Any, b: Any, acc: Any, precision: Any, imprecise: Any) -> Any:
        floats = [
            _convert(module, handle, tl.float32) if handle.dtype.scalar in TORCH_TYPES else handle
            for handle in (a, b)
        ]
        product = self.product(floats[0].data, floats[1].data, acc.data.dtype)
        return module.TensorHandle(product + acc.data, acc.dtype.scalar)

    builder.binary_op, builder.unary_op, builder.ternary_op = binary_op, unary_op, ternary_op
    builder.create_fma, builder.create_dot = create_fma, create_dot
    builder.product = staticmethod(lambda a, b, dtype: np.matmul(a, b, dtype=dtype))


@contextmanager
def ordered_dots() -> Iterator[None]:
    """For the block, `tl.dot` adds products one by one, so a row's bits do not depend on its place.

    numpy's products (BLAS) split the sum differently for rows at the edge of a matrix; tensor cores
    do not. Slow; for tests of the batch-invariant mode.
    """
    from triton.runtime import interpreter

    builder, np = interpreter.InterpreterBuilder, interpreter.np
    usual = builder.product  # type: ignore[attr-defined]

    def product(a: Any, b: Any, dtype: Any) -> Any:
        total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
        rows, columns, one = a.astype(dtype), b.astype(dtype), np.empty_like(total)
        for k in range(a.shape[-1]):
            total += np.multiply(rows[..., :, k, None], columns[..., k, None, :], out=one)
        return total

    builder.product = staticmethod(product)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        builder.product = staticmethod(usual)  # type: ignore[attr-defined]


def _patch_reductions(module: Any) -> None:
    """Patch `tl.sum`, `tl.max`, `tl.cumsum` and similar reductions."""

    def recast(tensor: Any, target: Any) -> Any:
        shape = list(tensor.shape)
        block = tl.block_type(target, shape) if shape else target
        return tl.core.tensor(_convert(module, tensor.handle, target), block)

    def patched(original: Callable) -> Callable:
        def apply_impl(self: Any, tensors: Any) -> Any:
            narrow = [tensor.dtype == tl.bfloat16 for tensor in tensors]
            if not any(narrow):
                return original(self, tensors)
            wide = tuple(
                recast(tensor, tl.float32) if is_narrow else tensor
                for tensor, is_narrow in zip(tensors, narrow, strict=True)
            )
            result = original(self, wide)
            several = isinstance(result, list | tuple)
            parts = list(result) if several else [result]
            parts = [
                recast(part, tl.bfloat16) if narrow[min(i, len(narrow) - 1)]
                and part.dtype == tl.float32 else part
                for i, part in enumerate(parts)
            ]  # fmt: skip
            return parts if several else parts[0]

        return apply_impl

    for operation in (module.ReduceOps, module.ScanOps):
        operation.apply_impl = patched(operation.apply_impl)


def _self_test() -> None:
    """Check the patches with a product in bfloat16: a new Triton may have other private names."""
    from triton.runtime import interpreter as module

    builder, np = module.interpreter_builder, module.np
    ones = module.TensorHandle(np.full((2, 2), 1.5, dtype=np.float32), tl.float32)
    narrow = builder.cast_impl(ones, tl.bfloat16)
    zeros = module.TensorHandle(np.zeros((2, 2), dtype=np.float32), tl.float32)
    product = builder.create_dot(narrow, narrow, zeros, None, 0).data
    total = builder.cast_impl(builder.create_fadd(narrow, narrow), tl.float32).data
    if not (np.all(product == 4.5) and np.all(total == 3.0)):
        raise KernelError("This version of Triton has another interpreter; adapt interpreter.py.")


# ---- memory -----------------------------------------------------------------------------------


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Address of the first byte of a view, and of the byte after its last."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Every tensor among the arguments of a launch, including those in descriptors and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)
        elif hasattr(value, "base"):
            yield from _tensors((value.base,))


def _check_bounds(module: Any) -> None:
    builder, np = module.InterpreterBuilder, module.np
    load, store = builder.create_masked_load, builder.create_masked_store
    modify, swap = builder.create_atomic_rmw, builder.create_atomic_cas
    init = module.GridExecutor._init_args_hst

    def init_args(self: Any, args: Any, kwargs: Any) -> Any:
        names = dict(zip(self.arg_names, args, strict=False)) | kwargs
        result = init(self, args, kwargs)
        hosts = [*result[0], *result[1].values()]
        module.interpreter_builder.extents = sorted({extent(t) for t in _tensors(hosts)})
        module.interpreter_builder.launched = (getattr(self.fn, "__name__", "kernel"), names)
        return result

    def check(self: Any, pointers: Any, mask: Any, what: str) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        active = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        if not active.size:
            return
        low, high = int(active.min()), int(active.max()) + size
        if any(start <= low and high <= end for start, end in self.extents):
            return
        inside = np.zeros(active.shape, dtype=bool)
        for start, end in self.extents:
            inside |= (active >= start) & (active + size <= end)
        if not inside.all():
            raise OutOfBoundsError(_described(self, int(active[~inside][0]), what))

    def masked_load(
        self: Any, pointers: Any, mask: Any, other: Any, *options: Any, **named: Any
    ) -> Any:
        check(self, pointers, mask, "reads")
        return load(self, pointers, mask, other, *options, **named)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
        check(self, pointers, mask, "writes")
        return store(self, pointers, value, mask, *options)

    def atomic_rmw(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(self, pointers, mask, "changes")
        return modify(self, op, pointers, value, mask, *rest)

    def atomic_cas(self: Any, pointers: Any, *rest: Any) -> Any:
        everywhere = module.TensorHandle(np.ones(pointers.data.shape, dtype=bool), tl.int1)
        check(self, pointers, everywhere, "changes")
        return swap(self, pointers, *rest)

    module.GridExecutor._init_args_hst = init_args
    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
    builder.create_atomic_rmw, builder.create_atomic_cas = atomic_rmw, atomic_cas


def _described(builder: Any, address: int, what: str) -> str:
    """The error message: the program, the nearest tensor, and the distance from it."""
    name, arguments = builder.launched
    nearest, distance = "no tensor", 0
    for argument, value in arguments.items():
        for tensor in _tensors((value,)):
            start, end = extent(tensor)
            away = address - end if address >= end else address - start
            if nearest == "no tensor" or abs(away) < abs(distance):
                nearest, distance = argument, away
    place = "behind the end" if distance >= 0 else "before the beginning"
    grid = tuple(int(index) for index in builder.grid_idx)
    return f"{name} at program {grid} {what} {abs(distance)} bytes {place} of {nearest}."


# ---- time -------------------------------------------------------------------------------------


def _prepare_once(module: Any) -> None:
    """Patch the interpreter to prepare each part of the language once per launch.

    A launch replaces Triton's operations by numpy's, and restores them at its end. The interpreter
    repeats the replacement for every name of the language whenever a kernel calls a function; this
    patch skips parts that are already replaced. The interpreter also builds a table of all numpy
    types for each operation; this patch looks each type up once. A patch is skipped if Triton's
    private names for it do not exist.
    """
    if hasattr(module, "_get_np_dtype"):
        _look_types_up_once(module)
    if not hasattr(module, "_LangPatchScope"):
        return
    patch = module._patch_lang
    done: set[str] = set()

    @cache
    def languages(fn: Callable) -> frozenset[str]:
        found = fn.__globals__.values()  # type: ignore[attr-defined]
        return frozenset(part.__name__ for part in (tl, tl.core) if any(v is part for v in found))

    def patch_lang(fn: Callable) -> Any:
        needed = languages(fn)
        if needed and needed <= done:
            return module._LangPatchScope()
        scope, outermost = patch(fn), not done
        done.update(needed)
        if outermost:
            restore = scope.restore

            def restore_all() -> None:
                done.clear()
                restore()

            scope.restore = restore_all
        return scope

    module._patch_lang = patch_lang


def _look_types_up_once(module: Any) -> None:
    usual = module._get_np_dtype
    of_numbers = cache(usual)

    def get_np_dtype(kind: Any) -> Any:
        scalar = kind.scalar
        return of_numbers(scalar) if type(scalar) is tl.dtype else usual(kind)

    module._get_np_dtype = get_np_dtype
