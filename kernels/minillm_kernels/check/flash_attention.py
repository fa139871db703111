"""Cases of `flash_attention.flash_attention`.

What lies behind the last sequence and in gaps between rows is NaN. A sequence of a case may be all
NaN, a request gone wrong: the others must not notice. Rows of the result behind the last sequence
must stay as they were.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minillm_kernels import flash_attention, reference
from minillm_kernels.check.case import (
    TOLERANCE,
    Guarded,
    Launch,
    Mismatch,
    compare,
    generator,
    guarded,
    normal,
)
from minillm_kernels.flash_attention_config import (
    HOPPER_PLAIN,
    HOPPER_POINTERS,
    Config,
    Table,
    entry,
)
from minillm_kernels.launch import arch

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
GAP = 8  # numbers between two rows, where rows have gaps
PADDING = 3  # rows behind the last sequence
# Tiles so small that a toy prompt has several of everything.
POINTERS = Config(32, 16, 4, 2)
DESCRIBED = Config(16, 32, 4, 2, descriptors=True)
SPECIALISED = Config(32, 16, 4, 2, descriptors=True, warp_specialize=True)


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        lengths: queries and keys of each sequence.
        config: None leaves the choice to the launcher.
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
    window: int | None = None
    soft_cap: float | None = None
    config: Config | None = None
    gaps: bool = False
    bad: int | None = None
    sharpness: float = 1.0

    @property
    def attributes(self) -> dict[str, Any]:
        """Keyword arguments that the launcher and the reference have in common."""
        return {"causal": self.causal, "window": self.window, "soft_cap": self.soft_cap}


MIXED = ((5, 5), (37, 37), (0, 9), (1, 40), (20, 50))
CASES: tuple[Case, ...] = (
    Case(()),
    Case(((0, 0), (0, 7))),
    Case(((1, 1),), 1, 1, 64, 64),
    Case(((3, 0), (2, 1), (7, 3)), gaps=True),  # rows that see nothing
    Case(((3, 0), (7, 3)), causal=False),
    Case(((1, 1), (130, 130)), 1, 1, 8, 8, BF16),
    Case(((9, 150),), 3, 1, 64, 64, F16),
    Case(((12, 30),), 4, 1, 80, 80, BF16),
    Case(((17, 20),), 3, 3, 96, 96, F16, gaps=True),
    Case(((16, 16),), 8, 1, 128, 128, BF16),
    Case(((11, 33),), 2, 2, 192, 128, BF16, gaps=True),
    Case(((6, 9),), 1, 1, 256, 256, F16),
    Case(((20, 20), (3, 60)), 2, 1, 16, 40, F16, soft_cap=2.0, gaps=True),
    Case(((30, 30),), 2, 1, 32, 32, F32, sharpness=1e4),
    Case(((30, 70),), 2, 1, 32, 32, BF16, sharpness=1e4, causal=False),
    # Several tiles: full ones, those at the diagonal and at the end, those where a window begins.
    Case(MIXED, 2, 1, config=POINTERS, bad=1),
    Case(MIXED, 2, 1, 16, 24, BF16, config=DESCRIBED, bad=1, gaps=True),
    Case(MIXED, 2, 1, 24, 16, F16, config=SPECIALISED, bad=1),
    Case(((40, 20), (0, 0), (33, 32)), 1, 1, config=POINTERS, bad=2),
    Case(((40, 20), (0, 0), (33, 32)), 1, 1, dtype=F16, config=SPECIALISED, bad=2, gaps=True),
    Case(((9, 37), (33, 70)), 1, 1, causal=False, config=POINTERS, gaps=True, bad=1),
    Case(((9, 37), (33, 70)), 1, 1, 24, 40, BF16, causal=False, config=DESCRIBED, bad=1),
    Case(((9, 37), (33, 70)), 1, 1, 40, 24, F16, causal=False, config=SPECIALISED, bad=0),
    Case(((80, 80), (3, 50)), 1, 1, window=40, config=POINTERS),
    Case(((40, 90), (5, 5)), 1, 1, dtype=BF16, window=70, config=DESCRIBED, bad=1),
    Case(((40, 90), (5, 5)), 1, 1, dtype=F16, window=33, config=SPECIALISED, bad=1),
    Case(((40, 44),), 1, 1, window=1, config=POINTERS),
    Case(((30, 60),), 1, 1, soft_cap=1.5, config=POINTERS, sharpness=4.0),
    Case(((20, 70),), 1, 1, dtype=BF16, soft_cap=1.5, window=30, config=DESCRIBED),
    Case(((30, 60),), 1, 1, dtype=F16, soft_cap=1.5, config=SPECIALISED, sharpness=1e4),
)


def random_case(rng: random.Random) -> Case:
    """Any small call."""
    config = rng.choice((None, POINTERS, DESCRIBED, SPECIALISED))
    longest = 100 if config is None else 60
    lengths = []
    for _ in range(rng.randint(1, 4)):
        num_queries = rng.choice((0, 1, 15, 16, 17, 31, 32, 33, rng.randint(0, longest)))
        num_keys = num_queries + rng.choice((0, 0, 0, 1, -num_queries, rng.randint(0, longest)))
        lengths.append((num_queries, num_keys))
    causal = rng.random() < 0.75
    num_kv_heads = rng.choice((1, 1, 2))
    halves = (F16, BF16) if config is not None and config.descriptors else (F32, F16, BF16)
    return Case(
        lengths=tuple(lengths),
        num_heads=num_kv_heads * rng.choice((1, 1, 3, 4, 8)),
        num_kv_heads=num_kv_heads,
        head_dim=rng.choice((8, 24, 64, 80, 96, 128)),
        value_dim=rng.choice((8, 24, 64, 80, 96, 128)),
        dtype=rng.choice(halves),
        causal=causal,
        window=rng.choice((None, 1, 5, 16, 40)) if causal else None,
        soft_cap=rng.choice((None, None, 3.0)),
        config=config,
        gaps=rng.random() < 0.3,
        bad=rng.choice((None, 0)),
        sharpness=rng.choice((1.0, 1.0, 20.0)),
    )


class Inputs(NamedTuple):
    """The tensors of a call, in its order."""

    q: Tensor
    k: Tensor
    v: Tensor
    query_start: Tensor
    key_start: Tensor


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


def inputs_of(case: Case, device: str) -> Inputs:
    """The same numbers on every device."""
    rng = generator(1000 * len(case.lengths) + case.head_dim)
    num_queries, num_keys = ([pair[side] for pair in case.lengths] for side in (0, 1))

    def bounds(lengths: Sequence[int]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)

    return Inputs(
        rows_of(case, rng, num_queries, case.num_heads, case.head_dim, device),
        rows_of(case, rng, num_keys, case.num_kv_heads, case.head_dim, device),
        rows_of(case, rng, num_keys, case.num_kv_heads, case.value_dim, device),
        bounds(num_queries),
        bounds(num_keys),
    )


def verify(case: Case, device: str = "cpu", kernels: ModuleType = flash_attention) -> None:
    """Mismatch if `kernels.flash_attention` is wrong in this case, or writes where it must not."""
    inputs, scale = inputs_of(case, device), case.sharpness * case.head_dim**-0.5
    total = len(inputs.q) - PADDING
    shape = len(inputs.q), case.num_heads, case.value_dim + GAP * case.gaps
    guard = guarded(shape, case.dtype, device)
    out = guard.view[..., : case.value_dim]
    got = kernels.flash_attention(*inputs, scale, **case.attributes, out=out, config=case.config)
    if got.data_ptr() != out.data_ptr():
        raise Mismatch("the result is not in `out`")
    guard.check(written=False)
    if not bool(guard.view[..., case.value_dim :].isnan().all()):
        raise Mismatch("the kernel wrote between the rows of its output")
    if not bool(out[total:].isnan().all()):
        raise Mismatch("the kernel wrote behind the last sequence")
    q, k, v, query_start, key_start = (tensor.cpu() for tensor in inputs)
    expected = reference.flash_attention(
        q.double(), k.double(), v.double(), query_start, key_start, scale, **case.attributes
    )
    # In float32 a score of 1e4 is known to 1e-3, and so is its exponential.
    tolerance = max(TOLERANCE[case.dtype], 8e-7 * case.sharpness)
    for number, (start, end) in enumerate(pairwise(query_start.tolist())):
        if number != case.bad:
            what = f"sequence {number} (its own row is the first index)"
            Guarded(guard.buffer, out[start:end]).check()
            compare(out[start:end], expected[start:end], what, tolerance)


def verify_invariant(
    case: Case, device: str = "cpu", kernels: ModuleType = flash_attention
) -> None:
    """Mismatch if the bits of a sequence depend on the others.

    Interpreted, this needs `interpreter.ordered_dots()` around it.
    """
    inputs, scale = inputs_of(case, device), case.sharpness * case.head_dim**-0.5
    together = kernels.flash_attention(*inputs, scale, **case.attributes, config=case.config)
    for number, (num_queries, num_keys) in enumerate(case.lengths):
        first, first_key = int(inputs.query_start[number]), int(inputs.key_start[number])
        rows, keys = slice(first, first + num_queries), slice(first_key, first_key + num_keys)
        alone = kernels.flash_attention(
            inputs.q[rows],
            inputs.k[keys],
            inputs.v[keys],
            torch.tensor([0, num_queries], dtype=torch.int32, device=device),
            torch.tensor([0, num_keys], dtype=torch.int32, device=device),
            scale,
            **case.attributes,
            config=case.config if num_keys else None,
        )
        if number != case.bad and not torch.equal(alone, together[rows]):
            raise Mismatch(f"sequence {number} has other bits alone than in its batch")


# ---- calls of real models, to be compiled --------------------------------------------------------

ALL = (80, 90, 100)
NEW = (90, 100)


def call(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = BF16,
    value_dim: int | None = None,
    gap: int = 0,
    table: Table | None = None,
    **attributes: Any,
) -> Callable[[], object]:
    """A call at a model's sizes, on memory that is never accessed.

    `table` is another than the launcher's, on chips that have bulk copies.
    """

    def run() -> Tensor:
        config = entry(table, head_dim) if table is not None and arch() in NEW else None

        def empty(heads: int, dim: int) -> Tensor:
            return torch.empty(4096, heads, dim + gap, dtype=dtype)[..., :dim]

        start = torch.zeros(5, dtype=torch.int32)
        return flash_attention.flash_attention(
            empty(num_heads, head_dim),
            empty(num_kv_heads, head_dim),
            empty(num_kv_heads, value_dim or head_dim),
            start,
            start,
            head_dim**-0.5,
            config=config,
            **attributes,
        )

    return run


def launches() -> tuple[Launch, ...]:
    """Every row of the tables of tiles, and every variant of the kernel."""
    return (
        Launch("Llama-3.1-8B", call(32, 8, 128), ALL, NEW),
        Launch("Llama-3.1-8B fp16", call(32, 8, 128, F16), ALL, NEW),
        Launch("Qwen3-0.6B", call(16, 8, 128), ALL, NEW),
        Launch("Llama-3.2-1B", call(32, 8, 64), ALL, NEW),
        Launch("Phi-3-mini (96)", call(32, 32, 96), ALL, NEW),
        Launch("Gemma-2-2B (256, cap)", call(8, 4, 256, soft_cap=50.0), ALL, NEW),
        Launch(
            "Gemma-2-2B (256, cap, window)",
            call(8, 4, 256, soft_cap=50.0, window=4096),
            ALL,
            NEW,
        ),
        Launch("Mistral-7B (window)", call(32, 8, 128, window=4096), ALL, NEW),
        Launch("encoder (not causal)", call(12, 12, 64, causal=False), ALL, NEW),
        Launch("DeepSeek-V2-Lite prefill", call(16, 16, 192, value_dim=128), ALL, NEW),
        Launch("DeepSeek-V3 prefill fp16", call(128, 128, 192, F16, value_dim=128), ALL, NEW),
        Launch("Llama-3.1-8B, plain", call(32, 8, 128, table=HOPPER_PLAIN), ALL, NEW),
        Launch("Llama-3.2-1B, plain", call(32, 8, 64, table=HOPPER_PLAIN), ALL, NEW),
        Launch("Gemma-2-2B, plain", call(8, 4, 256, table=HOPPER_PLAIN), ALL, NEW),
        Launch("Llama-3.1-8B, pointers", call(32, 8, 128, table=HOPPER_POINTERS), ALL),
        Launch("Llama-3.1-8B, unaligned", call(32, 8, 128, gap=4), ALL),
        Launch("Llama-3.2-1B, unaligned", call(32, 8, 64, gap=4), ALL),
        Launch("Gemma-2-2B, unaligned", call(8, 4, 256, gap=4), ALL),
        Launch("Llama-3.1-8B float32", call(32, 8, 128, F32)),
        Launch("Llama-3.2-1B float32", call(32, 8, 64, F32)),
        Launch("Gemma-2-2B float32", call(8, 4, 256, F32)),
        Launch("DeepSeek-V2-Lite float32", call(16, 16, 192, F32, value_dim=128)),
    )


LAUNCHES: tuple[Launch, ...] = launches()
