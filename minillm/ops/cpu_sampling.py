"""Choosing tokens on a CPU: the C functions of `c/sample.c` behind `minillm.sampler`.

`sampler` says with torch what they mean, and does the work where they cannot be built. The random
words are the same ones bit for bit, the scaled logits too, and the noise is computed in float64
and rounded once by both. So the tokens are the same, but for two things that hang on rounding:
math libraries round the logarithm of about one word in 10^8 to another float32, and where top-p
ends within some 10^-6 of the edge of a token, that token may be in or out, as on a GPU.
"""

from array import array
from collections.abc import Callable, Sequence
from ctypes import CDLL, Structure, c_double, c_float, c_int64, c_void_p, sizeof
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from minillm.ops import cpu
from minillm.ops.c_library import library
from minillm.ops.philox import Purpose

P, N = c_void_p, c_int64
MOST_TOKENS = 2**31  # of a vocabulary; ids lie in 32 bits when log-probabilities are sorted


class Request(Structure):
    """How to choose in one row: `request` in `c/sample.c`, whose fields stand in this order."""

    _fields_ = (
        ("top_p", c_double),  # 1: off
        ("seed", c_int64),
        ("sample_index", c_int64),
        ("top_k", c_int64),  # 0: off
        ("temperature", c_float),  # 0: greedy
        ("floor", c_float),  # log(min_p); -inf: off
    )


@dataclass(frozen=True)
class Functions:
    """The C functions of one library; all of them take bf16 and float32 logits."""

    choose_tokens: Callable[..., int]
    describe_tokens: Callable[..., int]


@cache
def functions(dtype: torch.dtype) -> Functions | None:
    """The functions for logits of this type; None where there are none."""
    element = dict(cpu.ELEMENTS).get(dtype)
    built = None if element is None else library(element)
    return bind(built) if isinstance(built, CDLL) else None


def bind(built: CDLL) -> Functions:
    """The functions of a library."""
    choose, describe = built.choose_tokens, built.describe_tokens
    choose.restype = describe.restype = c_int64
    choose.argtypes = [P, N, P, P, N, N, N, P, P]
    describe.argtypes = [P, N, N, N, P, N, P, P, P]
    return Functions(choose, describe)


def takes(logits: Tensor) -> bool:
    """Whether these logits [K, V] go to C."""
    return (
        cpu.takes(logits)
        and functions(logits.dtype) is not None
        and logits.dim() == 2
        and 0 < logits.shape[1] < MOST_TOKENS
        and (logits.stride(1) == 1 or logits.shape[1] == 1)
    )


def best_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, float32 [K], and its id, int64 [K]; of equals the first.

    A row with NaN has NaN as its largest, and some id.
    """
    return _choose(Rows.of(logits), logits.dtype, None, None)


def choose_tokens(
    logits: Tensor,
    requests: Sequence[bytes],
    positions: Sequence[int],
    members: Sequence[int] | None = None,
    model_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row: temperature, min-p, top-k, top-p, and the largest noisy logit.

    Args:
        logits: [K, V], of which `takes` said yes; or rows that were edited, float32 then, with
            `model_dtype` as it was before.
        requests: for each row `bytes(Request(..))`.
        positions: for each row, of the token that is chosen.
        members: which rows; all of them.

    Returns:
        The largest logit of each row, float32 [rows], and the tokens, int64 [rows]: some token
        where the largest is not finite.
    """
    rows, packed = Rows.of(logits, members), b"".join(requests)
    if not len(packed) // sizeof(Request) == len(positions) == len(rows.at):
        raise ValueError(
            f"{len(requests)} requests and {len(positions)} positions for {len(rows.at)} rows."
        )
    return _choose(rows, model_dtype or logits.dtype, packed, array("q", positions))


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
    def of(cls, logits: Tensor, members: Sequence[int] | None = None) -> "Rows":
        """All rows of a tensor, or these, in place."""
        count, size = logits.shape
        right = logits.dtype in (torch.bfloat16, torch.float32) and logits.device.type == "cpu"
        if not right or (logits.stride(1) != 1 and size != 1):
            raise ValueError(f"logits are {logits.dtype} with strides {logits.stride()}.")
        if members and not 0 <= min(members) <= max(members) < count:
            raise IndexError(f"Rows are {min(members)} to {max(members)} of {count}.")
        start, step = logits.data_ptr(), logits.stride(0) * logits.element_size()
        at = array("q", [start + i * step for i in (range(count) if members is None else members)])
        return cls(at, logits.dtype == torch.float32, size)


def _choose(
    rows: Rows, model_dtype: torch.dtype, requests: bytes | None, positions: array | None
) -> tuple[Tensor, Tensor]:
    count = len(rows.at)
    best, tokens = torch.empty(count), torch.empty(count, dtype=torch.int64)
    status = _functions(model_dtype).choose_tokens(
        rows.at.buffer_info()[0],
        rows.wide,
        requests,
        None if positions is None else positions.buffer_info()[0],
        count,
        rows.size,
        int(Purpose.SAMPLE),
        best.data_ptr(),
        tokens.data_ptr(),
    )
    _check_memory(status)
    return best, tokens


def _functions(dtype: torch.dtype) -> Functions:
    if (found := functions(dtype)) is None:
        raise RuntimeError(f"there are no C functions for {dtype}; ask `takes` first.")
    return found


def _check_memory(status: int) -> None:
    if status:
        raise MemoryError("There is no memory to choose tokens in.")
