"""Inputs that show mistakes, and the comparison of a result with what is right."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

GUARD = 64  # elements of poison on each side of an output
# Largest error that rounding explains, as a share of the largest number that is right: inputs and
# the result are rounded to the dtype (unit roundoffs 2^-24, 2^-11 and 2^-8), sums are in float32.
TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
)


class Mismatch(AssertionError):
    """A kernel computed something else than its reference, or wrote where it must not."""


@dataclass(frozen=True)
class Launch:
    """A call with the shapes of a real model, on `blank` tensors: only to be compiled.

    `run` is called inside `offline.compiling(arch)`. `tensor_cores` and `bulk_copies` say what the
    machine code has to contain, on which architectures; `may_spill` names those where it may spill.
    """

    name: str
    run: Callable[[], object]
    tensor_cores: tuple[int, ...] = ()
    bulk_copies: tuple[int, ...] = ()
    may_spill: tuple[int, ...] = ()


def blank(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory, an argument of a `Launch`."""
    return torch.empty(shape, dtype=dtype, device="meta")


def short(dtype: torch.dtype) -> str:
    """The name of a dtype."""
    return str(dtype).removeprefix("torch.")


def generator(seed: int) -> torch.Generator:
    """The random numbers of a case, drawn on the CPU so that every device gets the same."""
    return torch.Generator().manual_seed(seed)


def normal(
    rng: torch.Generator, shape: Sequence[int], dtype: torch.dtype, device: str, scale: float = 1.0
) -> Tensor:
    """Normal numbers, already rounded to the dtype."""
    return (torch.randn(tuple(shape), generator=rng) * scale).to(dtype).to(device)


@dataclass(frozen=True)
class Guarded:
    """An output `view` inside a larger buffer, all of it poison: NaN, or an unlikely integer."""

    buffer: Tensor
    view: Tensor

    def check(self, written: bool = True) -> None:
        """Nothing around the view was touched; and, if `written`, no number of it is as before."""
        poison = poisoned(1, self.buffer.dtype, self.buffer.device)[0]

        def same(part: Tensor) -> Tensor:
            return part.isnan() if poison.isnan() else part == poison

        for side, part in (("before", self.buffer[:GUARD]), ("behind", self.buffer[-GUARD:])):
            if not bool(same(part).all()):
                raise Mismatch(f"the kernel wrote {side} its output")
        if written and bool(same(self.view).any()):
            place = same(self.view).nonzero()[0].tolist()
            raise Mismatch(f"the kernel left its output at {place} unwritten (or NaN)")


def poisoned(count: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Poisoned memory: a kernel that reads it, or leaves it unwritten, has a wrong result."""
    value = math.nan if dtype.is_floating_point else 0x7F if dtype.itemsize == 1 else -(2**30) - 7
    return torch.full((count,), value, dtype=dtype, device=device)


def guarded(shape: Sequence[int], dtype: torch.dtype, device: str) -> Guarded:
    """An output of this shape with poison in it and around it."""
    count = math.prod(shape)
    buffer = poisoned(count + 2 * GUARD, dtype, device)
    return Guarded(buffer, buffer[GUARD : GUARD + count].view(tuple(shape)))


def surrounded(tensor: Tensor) -> Tensor:
    """A copy between guard bands."""
    return guarded(tensor.shape, tensor.dtype, str(tensor.device)).view.copy_(tensor)


def in_rows(rows: Tensor, gap: int, powers: bool = False) -> Tensor:
    """A copy of [rows, size] between guard bands, with `gap` numbers of poison after each row; rows
    differ by `powers` of two."""
    count, size = rows.shape
    place = guarded((count, size + gap), rows.dtype, str(rows.device)).view[:, :size]
    place.copy_(rows)
    if powers:
        place *= 2.0 ** (torch.arange(count, device=rows.device) % 3).to(rows.dtype)[:, None]
    return place


def compare_products(
    got: Tensor, expected: Tensor, factors: Tensor, weight: Tensor, floor: float
) -> None:
    """`compare` products of `factors` [rows, in] and `weight` [out, in], each row by its own scale:
    how far apart sums of such products are, even if one is near 0."""
    if got.numel():
        spread = (factors**2 @ weight.T**2).sqrt()  # [rows, out]
        for row in range(len(got)):
            least = max(floor, float(spread[row].max()))
            compare(got[row], expected[row], f"row {row}", floor=least)


def compare(
    got: Tensor, expected: Tensor, what: str, tolerance: float | None = None, floor: float = 1e-3
) -> None:
    """Every number within `tolerance` (default: its dtype's) times the largest expected one.

    `expected` is in float64. Where nothing expected is larger than `floor`, that is the scale.
    Infinities have to be the same, and are no scale.
    """
    wanted, found = expected.double().cpu(), got.double().cpu()
    if wanted.shape != found.shape:
        raise Mismatch(f"{what} is {list(found.shape)}; it must be {list(wanted.shape)}")
    if not wanted.numel():
        return
    limit = TOLERANCE[got.dtype] if tolerance is None else tolerance
    finite = wanted[wanted.isfinite()].abs()
    scale = max(float(finite.max()) if finite.numel() else 0.0, floor)
    error = (found - wanted).abs() / scale
    error = torch.where(found == wanted, 0.0, error)  # equal infinities
    worst = int(error.nan_to_num(nan=math.inf).argmax())
    if not float(error.flatten()[worst]) <= limit:
        index = [int(i) for i in torch.unravel_index(torch.tensor(worst), wanted.shape)]
        raise Mismatch(
            f"{what} at {index} is {float(found.flatten()[worst]):.6g}, not "
            f"{float(wanted.flatten()[worst]):.6g} (error {float(error.flatten()[worst]):.2g} of "
            f"the largest, allowed {limit:.2g})"
        )
