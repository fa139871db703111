"""Choosing tokens on a CPU: the C functions of `c/sample.c`, one backend of `sampling.choose`.

The reference beside `choose` says what they mean. The random words are the same ones bit for bit,
the scaled logits too, and the noise is computed in float64 and rounded once by both. So the tokens
are the same, but for two things that hang on rounding: math libraries round the logarithm of about
one word in 10^8 to another float32, and where top-p ends within some 10^-6 of the edge of a token,
that token may be in or out, as on a GPU.
"""

from array import array
from collections.abc import Callable
from ctypes import CDLL, Structure, byref, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from minillm.ops import cpu
from minillm.ops.c_library import library
from minillm.ops.philox import Purpose

P, N = c_void_p, c_int64
BLOCK = 64  # tokens whose noise is drawn together
MOST_TOKENS = 2**31  # of a vocabulary; ids lie in 32 bits when log-probabilities are sorted
COLUMNS = (
    ("temperature", torch.float32),
    ("min_p", torch.float32),
    ("top_p", torch.float32),
    ("top_k", torch.int32),
    ("seed", torch.int64),
    ("sample_index", torch.int64),
    ("position", torch.int64),
)


class _Pack(Structure):
    """Where the columns of a `sampling.Pack` lie: `pack` in `c/sample.c`, in the same order."""

    _fields_ = tuple((name, c_void_p) for name, _ in COLUMNS)


@dataclass(frozen=True)
class Functions:
    """The C functions of one library; all of them take bf16 and float32 logits."""

    choose_tokens: Callable[..., int]
    describe_tokens: Callable[..., int]
    draw_from_shard: Callable[..., int]


@cache
def functions(dtype: torch.dtype) -> Functions | None:
    """The functions for logits of this type; None where there are none."""
    element = dict(cpu.ELEMENTS).get(dtype)
    built = None if element is None else library(element)
    return bind(built) if isinstance(built, CDLL) else None


def bind(built: CDLL) -> Functions:
    """The functions of a library."""
    choose, describe, draw = built.choose_tokens, built.describe_tokens, built.draw_from_shard
    choose.restype = describe.restype = draw.restype = c_int64
    choose.argtypes = [P, N, P, N, N, N, P, P]
    describe.argtypes = [P, N, N, N, P, N, P, P, P]
    draw.argtypes = [P, N, P, N, N, N, N, P, P, P]
    return Functions(choose, describe, draw)


def takes(logits: Tensor, model_dtype: torch.dtype | None = None) -> bool:
    """Whether these logits [K, V] go to C."""
    return (
        cpu.takes(logits)
        and functions(model_dtype or logits.dtype) is not None
        and logits.dim() == 2
        and 0 < logits.shape[1] < MOST_TOKENS
        and (logits.stride(1) == 1 or logits.shape[1] == 1)
    )


def choose_tokens(
    logits: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    seed: Tensor,
    sample_index: Tensor,
    position: Tensor,
    model_dtype: torch.dtype | None = None,
    purpose: Purpose = Purpose.SAMPLE,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row: `sampling.choose`, whose `Pack` has the arguments' shapes and types.

    Args:
        logits: [K, V], of which `takes` said yes.
        model_dtype: of the model, where these are edited logits in float32: the library of a bf16
            model takes them, too, and no second one has to be built.
        purpose: whose noise is added.

    Returns:
        Tokens, int64 [K], some token where a row's largest logit is not finite; and the largest
        logit of each row, float32 [K].
    """
    rows = Rows.of(logits)
    columns = checked(len(logits), temperature, min_p, top_p, top_k, seed, sample_index, position)
    count = len(logits)
    best, tokens = torch.empty(count), torch.empty(count, dtype=torch.int64)
    status = _functions(model_dtype or logits.dtype).choose_tokens(
        rows.at.buffer_info()[0],
        rows.wide,
        byref(_Pack(*(column.data_ptr() for column in columns))),
        count,
        rows.size,
        int(purpose),
        best.data_ptr(),
        tokens.data_ptr(),
    )
    _check_memory(status)
    return tokens, best


def draw_from_shard(
    logits: Tensor, before: int, best: Tensor, purpose: Purpose, *columns: Tensor
) -> tuple[Tensor, Tensor]:
    """What a shard of the vocabulary would choose: totals float32 and places int64, both [K].

    Args:
        logits: [K, V / n], of which `takes` said yes.
        before: tokens of the vocabulary before the shard, a multiple of 64.
        best: float32 [K], the largest logit of the whole row.
        purpose: whose noise is added.
        columns: of a `sampling.Pack`, without top-k and top-p.

    Returns:
        The scaled logit with its noise of the token that wins in each row, and that token's place.
    """
    rows, given = Rows.of(logits), checked(len(logits), *columns)
    best, count = best.contiguous(), len(logits)
    totals, tokens = torch.empty(count), torch.empty(count, dtype=torch.int64)
    status = _functions(logits.dtype).draw_from_shard(
        rows.at.buffer_info()[0],
        rows.wide,
        byref(_Pack(*(column.data_ptr() for column in given))),
        count,
        rows.size,
        int(purpose),
        before // BLOCK,
        best.data_ptr(),
        totals.data_ptr(),
        tokens.data_ptr(),
    )
    _check_memory(status)
    return totals, tokens


def checked(count: int, *columns: Tensor) -> list[Tensor]:
    """The columns of a pack for so many rows, side by side in memory."""
    found = [column.contiguous() for column in columns]
    for (name, dtype), column in zip(COLUMNS, found, strict=True):
        if column.shape != (count,) or column.dtype != dtype:
            raise ValueError(
                f"{name} is {list(column.shape)}, {column.dtype}, for {count} rows; "
                f"{dtype} {[count]} is due."
            )
    return found


def describe_tokens(logits: Tensor, targets: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of each row's target and of its best tokens.

    Args:
        logits: [K, V], of which `takes` said yes, each row's largest being finite.
        targets: int64 [K].
        top: how many of the best; all of them if there are fewer.

    Returns:
        Log-probabilities float32, ids and ranks int64, all [K, top + 1]: the target's, then those
        of the best tokens in falling order, of equals the lowest id first.
    """
    rows, targets = Rows.of(logits), targets.contiguous()
    if targets.shape != logits.shape[:1] or targets.dtype != torch.int64 or top < 0:
        raise ValueError(
            f"targets are {list(targets.shape)}, {targets.dtype}, and top is {top}; int64 "
            f"{list(logits.shape[:1])} and at least 0 are due."
        )
    top = min(top, rows.size)
    logprobs = torch.empty(len(targets), top + 1)
    ids, ranks = torch.empty(2, len(targets), top + 1, dtype=torch.int64)
    status = _functions(logits.dtype).describe_tokens(
        rows.at.buffer_info()[0],
        rows.wide,
        len(targets),
        rows.size,
        targets.data_ptr(),
        top,
        logprobs.data_ptr(),
        ids.data_ptr(),
        ranks.data_ptr(),
    )
    if status == 2:
        raise IndexError(f"A target is no token: ids go from 0 to {rows.size - 1}.")
    _check_memory(status)
    return logprobs, ids, ranks


@dataclass(frozen=True)
class Rows:
    """Where rows of logits lie."""

    at: array
    wide: bool  # float32, else bf16
    size: int

    @classmethod
    def of(cls, logits: Tensor) -> "Rows":
        """All rows of a tensor, in place."""
        count, size = logits.shape
        right = logits.dtype in (torch.bfloat16, torch.float32) and logits.device.type == "cpu"
        if not right or (logits.stride(1) != 1 and size != 1):
            raise ValueError(f"logits are {logits.dtype} with strides {logits.stride()}.")
        start, step = logits.data_ptr(), logits.stride(0) * logits.element_size()
        at = array("q", [start + i * step for i in range(count)])
        return cls(at, logits.dtype == torch.float32, size)


def _functions(dtype: torch.dtype) -> Functions:
    if (found := functions(dtype)) is None:
        raise RuntimeError(f"there are no C functions for {dtype}; ask `takes` first.")
    return found


def _check_memory(status: int) -> None:
    if status:
        raise MemoryError("There is no memory to choose tokens in.")
