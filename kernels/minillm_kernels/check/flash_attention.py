"""Cases of `flash_attention.flash_attention`.

What lies behind the last sequence and in gaps between rows is NaN. A sequence of a case may be all
NaN, a request gone wrong: the others must not notice. Rows of the result behind the last sequence
must stay as they were.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor

from minillm_kernels import flash_attention, reference
from minillm_kernels.check.case import (
    TOLERANCE,
    Guarded,
    Launch,
    Mismatch,
    blank,
    compare,
    generator,
    guarded,
    normal,
)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
GAP = 8  # numbers between two rows, where rows have gaps
PADDING = 3  # rows behind the last sequence


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        lengths: queries and keys of each sequence.
        gaps: rows of every tensor are not contiguous.
        bad: a sequence that is all NaN.
        sharpness: scores are about this large.
    """

    lengths: tuple[tuple[int, int], ...]
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = F32
    causal: bool = True
    block: int | None = 16
    gaps: bool = False
    bad: int | None = None
    sharpness: float = 1.0


MIXED = ((5, 5), (37, 37), (0, 9), (1, 40), (20, 50))
CASES: tuple[Case, ...] = (
    Case(()),
    Case(((0, 0), (0, 7)), block=None),
    Case(((3, 0), (2, 1), (7, 3)), gaps=True),  # rows that see nothing
    Case(((3, 0), (7, 3)), causal=False),
    Case(((1, 1), (130, 130)), 1, 1, 8, 8, BF16, block=None),
    Case(((9, 150),), 3, 1, 64, 80, F16, block=None),
    Case(((17, 20),), 6, 3, 96, 128, F16, gaps=True),
    Case(((6, 9),), 1, 1, 256, 24, F16),
    Case(((30, 30),), 2, 1, 32, 32, F32, sharpness=1e4),
    Case(((30, 70),), 2, 1, 32, 32, BF16, sharpness=1e4, causal=False),
    Case(MIXED, 4, 2, bad=1),  # tiles in front of the diagonal, on it, and behind it
    Case(MIXED, 2, 1, 24, 16, BF16, block=32, bad=1, gaps=True),
    Case(((40, 20), (0, 0), (33, 32)), 1, 1, bad=2),
    Case(((9, 37), (33, 70)), 1, 1, causal=False, gaps=True, bad=1),
    Case(((9, 37), (33, 70)), 1, 1, 24, 40, BF16, causal=False, block=32, bad=0),
)


def random_case(rng: random.Random) -> Case:
    """Any small call."""
    lengths = []
    for _ in range(rng.randint(1, 4)):
        num_queries = rng.choice((0, 1, 15, 16, 17, 31, 32, 33, rng.randint(0, 60)))
        num_keys = num_queries + rng.choice((0, 0, 0, 1, -num_queries, rng.randint(0, 60)))
        lengths.append((num_queries, num_keys))
    num_kv_heads = rng.choice((1, 1, 2))
    return Case(
        lengths=tuple(lengths),
        num_heads=num_kv_heads * rng.choice((1, 1, 3, 4)),
        num_kv_heads=num_kv_heads,
        head_dim=rng.choice((8, 24, 64, 80, 128)),
        value_dim=rng.choice((8, 24, 64, 80, 128)),
        dtype=rng.choice((F32, F16, BF16)),
        causal=rng.random() < 0.75,
        block=rng.choice((None, 16, 32)),
        gaps=rng.random() < 0.3,
        bad=rng.choice((None, 0)),
        sharpness=rng.choice((1.0, 1.0, 20.0)),
    )


def rows_of(
    case: Case, rng: torch.Generator, lengths: Sequence[int], heads: int, dim: int, device: str
) -> Tensor:
    """One input: numbers where sequences are, NaN around them."""
    total = sum(lengths)
    tensor = torch.full((total + PADDING, heads, dim + GAP * case.gaps), math.nan, dtype=case.dtype)
    tensor[:total, :, :dim] = normal(rng, (total, heads, dim), case.dtype, "cpu")
    if case.bad is not None and case.bad < len(lengths):
        start = sum(lengths[: case.bad])
        tensor[start : start + lengths[case.bad]] = math.nan
    return tensor.to(device)[..., :dim]


def inputs_of(case: Case, device: str) -> tuple[Tensor, ...]:
    """q, k, v, query_start and key_start; the same numbers on every device."""
    rng = generator(1000 * len(case.lengths) + case.head_dim)
    num_queries, num_keys = ([pair[side] for pair in case.lengths] for side in (0, 1))
    counts = (num_queries, num_keys)
    starts = (torch.tensor([0, *count]).cumsum(0).to(torch.int32) for count in counts)
    return (
        rows_of(case, rng, num_queries, case.num_heads, case.head_dim, device),
        rows_of(case, rng, num_keys, case.num_kv_heads, case.head_dim, device),
        rows_of(case, rng, num_keys, case.num_kv_heads, case.value_dim, device),
        *(start.to(device) for start in starts),
    )


def verify(case: Case, device: str = "cpu", kernels: ModuleType = flash_attention) -> None:
    """Mismatch if `kernels.flash_attention` is wrong in this case, or writes where it must not."""
    inputs, scale = inputs_of(case, device), case.sharpness * case.head_dim**-0.5
    total = len(inputs[0]) - PADDING
    shape = len(inputs[0]), case.num_heads, case.value_dim + GAP * case.gaps
    guard = guarded(shape, case.dtype, device)
    out = guard.view[..., : case.value_dim]
    got = kernels.flash_attention(*inputs, scale, case.causal, out=out, block=case.block)
    if got.data_ptr() != out.data_ptr():
        raise Mismatch("the result is not in `out`")
    guard.check(written=False)
    if not bool(guard.view[..., case.value_dim :].isnan().all()):
        raise Mismatch("the kernel wrote between the rows of its output")
    if not bool(out[total:].isnan().all()):
        raise Mismatch("the kernel wrote behind the last sequence")
    q, k, v, query_start, key_start = (tensor.cpu() for tensor in inputs)
    expected = reference.flash_attention(
        q.double(), k.double(), v.double(), query_start, key_start, scale, case.causal
    )
    # In float32 a score of 1e4 is known to 1e-3, and so is its exponential.
    tolerance = max(TOLERANCE[case.dtype], 8e-7 * case.sharpness)
    for number, (start, end) in enumerate(pairwise(query_start.tolist())):
        if number != case.bad:
            what = f"sequence {number} (its own row is the first index)"
            Guarded(guard.buffer, out[start:end]).check()
            compare(out[start:end], expected[start:end], what, tolerance)


# ---- calls of real models, to be compiled --------------------------------------------------------


def call(num_heads: int, num_kv_heads: int, dim: int, dtype: torch.dtype) -> Callable[[], object]:
    """A call at a model's sizes."""
    q, k = (blank(4096, heads, dim, dtype=dtype) for heads in (num_heads, num_kv_heads))
    start = blank(5, dtype=torch.int32)
    return partial(flash_attention.flash_attention, q, k, k, start, start, dim**-0.5)


ALL = (80, 90, 100)
LAUNCHES: tuple[Launch, ...] = (
    Launch("Llama-3.1-8B", call(32, 8, 128, BF16), ALL),
    Launch("Llama-3.2-1B fp16", call(32, 8, 64, F16), ALL),
    Launch("Gemma-2-2B (256)", call(8, 4, 256, BF16), ALL),
    Launch("Llama-3.1-8B float32", call(32, 8, 128, F32)),
)
